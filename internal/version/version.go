// Package version holds the version of this module. Releases of the Go module, of the Python package and of the command
// switchyard are made together, so there is one number.
package version

// Version is the release that this source belongs to, without a leading v.
const Version = "0.2.0"
