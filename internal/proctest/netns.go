package proctest

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Namespace is a network namespace, which stands for a host in tests.
type Namespace struct {
	// Via has a process run there, as in Spec.
	Via []string
	// IP is its address and Device its interface, which leads to all others.
	IP, Device string

	t   testing.TB
	pid int
}

// Namespaces makes network namespaces that reach each other over a bridge. Each lives as long as a process that waits for the end of this
// one, so none is left when the test fails or is killed. It skips the test where that is not possible, and names what is missing.
func Namespaces(t testing.TB, n int) []*Namespace {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, for network namespaces")
	}
	for _, tool := range []string{"ip", "unshare", "nsenter"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("needs %s, for network namespaces", tool)
		}
	}
	bridge := newNamespace(t)
	bridge.run("ip", "link", "add", "bridge", "type", "bridge")
	bridge.run("ip", "link", "set", "bridge", "up")
	spaces := make([]*Namespace, n)
	for i := range spaces {
		s := newNamespace(t)
		s.IP, s.Device = fmt.Sprintf("10.77.0.%d", i+1), "veth"+strconv.Itoa(i)
		port := "port" + strconv.Itoa(i)
		s.run("ip", "link", "add", "name", s.Device, "type", "veth", "peer", "name", port, "netns", strconv.Itoa(bridge.pid))
		bridge.run("ip", "link", "set", port, "master", "bridge", "up")
		s.run("ip", "addr", "add", s.IP+"/24", "dev", s.Device)
		s.run("ip", "link", "set", s.Device, "up")
		spaces[i] = s
	}
	return spaces
}

func newNamespace(t testing.TB) *Namespace {
	t.Helper()
	// Interfaces are looked up in /sys too, which shows those of the namespace it was mounted in.
	cmd := exec.Command("unshare", "--net", "--mount", "sh", "-c", "mount -t sysfs sysfs /sys && exec cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	// Once it answers it is in its namespace.
	if _, err := io.WriteString(in, "\n"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 1)); err != nil {
		t.Skip("needs the right to make network namespaces (unshare --net --mount)")
	}
	s := &Namespace{t: t, pid: cmd.Process.Pid, Via: []string{"nsenter", "--net", "--mount", "--target", strconv.Itoa(cmd.Process.Pid), "--"}}
	s.run("ip", "link", "set", "lo", "up")
	return s
}

// run runs a command in the namespace, and skips the test where it fails.
func (s *Namespace) run(args ...string) {
	s.t.Helper()
	if out, err := s.command(args...); err != nil {
		s.t.Skipf("needs network namespaces: %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

func (s *Namespace) command(args ...string) ([]byte, error) {
	line := append(s.Via[:len(s.Via):len(s.Via)], args...)
	cmd := exec.Command(line[0], line[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = 5 * time.Second
	return cmd.CombinedOutput()
}

// Cut takes the namespace off the others, without a word to those that are connected.
func (s *Namespace) Cut() {
	s.t.Helper()
	if out, err := s.command("ip", "link", "set", s.Device, "down"); err != nil {
		s.t.Fatalf("cut: %v: %s", err, out)
	}
}
