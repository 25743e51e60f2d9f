//go:build !linux

// Package platform ends a build for a system on which Switchyard cannot run, with one line that says why. Each package that needs Linux
// imports it, so that the compiler meets this package first and reports nothing else.
package platform

var _ = switchyard_runs_on_linux_only_because_it_needs_memfd_futexes_and_descriptors_passed_over_unix_sockets
