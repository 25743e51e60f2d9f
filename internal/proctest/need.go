package proctest

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// hasVar lists what the machine is known to have, by the names that tests give to Missing, parted by commas.
const hasVar = "SWITCHYARD_CI_HAS"

// Missing skips a test on a machine that lacks what the test needs, by the name of that and with the reason. It fails the test where
// SWITCHYARD_CI_HAS has the name: continuous integration sets that, so that no test is skipped there unnoticed.
func Missing(t testing.TB, name string, reason any) {
	t.Helper()
	if slices.Contains(strings.Split(os.Getenv(hasVar), ","), name) {
		t.Fatalf("%s is missing, and %s has it: %v", name, hasVar, reason)
	}
	t.Skipf("needs %s: %v", name, reason)
}

// Need is the path of a program. It skips the test where that is Missing.
func Need(t testing.TB, program string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		Missing(t, program, err)
	}
	return path
}

// AsNobody prepares a process of the test binary that plays a part as another user. It skips the test where "nobody" is Missing: only root may
// start processes of other users, and not in every container.
func AsNobody(t testing.TB, part string, args ...string) *exec.Cmd {
	t.Helper()
	nobody := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if os.Geteuid() != 0 {
		Missing(t, "nobody", "only root can become another user")
	}
	exe, err := os.Open("/proc/self/exe") // another user may not reach it by its name
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { exe.Close() })
	command := func(part string, args ...string) *exec.Cmd {
		cmd := exec.Command("/proc/self/fd/3", args...)
		cmd.ExtraFiles = []*os.File{exe}
		cmd.Env = append(os.Environ(), As(part), "GORACE=atexit_sleep_ms=0")
		cmd.SysProcAttr = nobody
		cmd.Dir = "/"
		return cmd
	}
	switch err := command(idle).Run(); {
	case errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EINVAL): // EINVAL of a user that a namespace has not
		Missing(t, "nobody", err)
	case err != nil:
		t.Fatal(err)
	}
	return command(part, args...)
}
