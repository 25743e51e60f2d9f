//go:build !linux

package proctest

import "syscall"

// endsWithTest is for Linux; elsewhere the library does not build.
func endsWithTest() *syscall.SysProcAttr { return nil }
