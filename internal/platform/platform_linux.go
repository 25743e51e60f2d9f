// Package platform ends a build for a system on which Switchyard cannot run, with one line that says why. Each package that needs Linux
// imports it, so that the compiler meets this package first and reports nothing else.
package platform
