package proctest

import "syscall"

// endsWithTest has a process end with the test, so that one that is killed leaves no process, and no namespace of one.
func endsWithTest() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
