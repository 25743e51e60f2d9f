// Package netns makes network namespaces, which stand for hosts in tests and benchmarks on one machine.
package netns

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// ErrUnavailable is the error of a machine on which namespaces cannot be made. Its text names what is missing.
var ErrUnavailable = errors.New("no network namespaces")

// Namespace is one host.
type Namespace struct {
	// Via is a program and its first arguments that runs a command line there, which follows as further arguments.
	Via []string
	// IP is its address and Device its interface, which leads to all others.
	IP, Device string

	pid  int
	port string // the file with the state of its port of the bridge
}

// Net is namespaces that reach each other over a bridge.
type Net struct {
	Spaces []*Namespace

	holders []holder
}

// holder is a process that a namespace lives as long as. It ends with the process that started it, because its input does, so no namespace
// is left when that is killed.
type holder struct {
	cmd *exec.Cmd
	in  io.Closer
}

// New makes n namespaces. The caller closes the net.
func New(n int) (net *Net, err error) {
	if os.Geteuid() != 0 {
		return nil, fmt.Errorf("netns: %w: needs root", ErrUnavailable)
	}
	for _, tool := range []string{"ip", "unshare", "nsenter"} {
		if _, err := exec.LookPath(tool); err != nil {
			return nil, fmt.Errorf("netns: %w: needs %s", ErrUnavailable, tool)
		}
	}
	net = &Net{}
	defer func() {
		if err != nil {
			net.Close()
			net = nil
		}
	}()
	bridge, err := net.namespace()
	if err != nil {
		return net, err
	}
	if err := bridge.run("ip link add bridge type bridge", "ip link set bridge up"); err != nil {
		return net, err
	}
	for i := range n {
		s, err := net.namespace()
		if err != nil {
			return net, err
		}
		s.IP, s.Device = fmt.Sprintf("10.77.0.%d", i+1), "veth"+strconv.Itoa(i)
		if err := errors.Join(
			s.run(fmt.Sprintf("ip link add name %s type veth peer name port%d netns %d", s.Device, i, bridge.pid)),
			bridge.run(fmt.Sprintf("ip link set port%d master bridge up", i)),
			s.run(fmt.Sprintf("ip addr add %s/24 dev %s", s.IP, s.Device), "ip link set "+s.Device+" up")); err != nil {
			return net, err
		}
		s.port = fmt.Sprintf("/proc/%d/root/sys/class/net/port%d/brport/state", bridge.pid, i)
		net.Spaces = append(net.Spaces, s)
	}
	for _, s := range net.Spaces {
		if err := s.await(); err != nil {
			return net, err
		}
	}
	return net, nil
}

// patience bounds the wait for a port.
const patience = time.Minute

// await returns when the bridge forwards what the namespace sends. The kernel hears of an interface that has come up in a queue that all
// namespaces share, which takes seconds while many come and go.
func (s *Namespace) await() error {
	const forwards = "3"
	for began := time.Now(); ; time.Sleep(2 * time.Millisecond) {
		state, err := os.ReadFile(s.port)
		if err != nil {
			return fmt.Errorf("netns: %w", err)
		}
		if strings.TrimSpace(string(state)) == forwards {
			return nil
		}
		if time.Since(began) > patience {
			return fmt.Errorf("netns: %s is not up after %v: the state of its port is %s", s.Device, patience, state)
		}
	}
}

// namespace makes one that reaches nothing.
func (n *Net) namespace() (*Namespace, error) {
	// Interfaces are looked up in /sys too, which shows those of the namespace it was mounted in.
	cmd := exec.Command("unshare", "--net", "--mount", "sh", "-c", "mount -t sysfs sysfs /sys && exec cat")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a signal of the terminal is for those who use it
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("netns: %w", err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("netns: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("netns: %w", err)
	}
	n.holders = append(n.holders, holder{cmd, in})
	// Once it answers it is in its namespace.
	_, err = io.WriteString(in, "\n")
	if err == nil {
		_, err = io.ReadFull(out, make([]byte, 1))
	}
	if err != nil {
		return nil, fmt.Errorf("netns: %w: needs the right to make them (unshare --net --mount): %w", ErrUnavailable, err)
	}
	pid := strconv.Itoa(cmd.Process.Pid)
	s := &Namespace{pid: cmd.Process.Pid, Via: []string{"nsenter", "--net", "--mount", "--wd", "--target", pid, "--"}}
	return s, s.run("ip link set lo up")
}

// Close ends the namespaces.
func (n *Net) Close() {
	for _, h := range n.holders {
		_ = h.in.Close()
		_ = h.cmd.Wait()
	}
	n.holders = nil
}

// Pids are those of the processes that the namespaces live as long as.
func (n *Net) Pids() (pids []int) {
	for _, h := range n.holders {
		pids = append(pids, h.cmd.Process.Pid)
	}
	return pids
}

// run runs commands in the namespace, words of which are parted by blanks.
func (s *Namespace) run(commands ...string) error {
	for _, c := range commands {
		line := append(s.Via[:len(s.Via):len(s.Via)], strings.Fields(c)...)
		cmd := exec.Command(line[0], line[1:]...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		cmd.WaitDelay = 5 * time.Second
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("netns: %w: %s: %w: %s", ErrUnavailable, c, err, out)
		}
	}
	return nil
}

// Cut takes the namespace off the others, without a word to those that are connected.
func (s *Namespace) Cut() error { return s.run("ip link set " + s.Device + " down") }

// Mend ends a Cut.
func (s *Namespace) Mend() error {
	if err := s.run("ip link set " + s.Device + " up"); err != nil {
		return err
	}
	return s.await()
}

// Limit bounds what the namespace sends: rate is as tc writes it, such as 2gbit.
func (s *Namespace) Limit(rate string) error {
	return s.run("tc qdisc replace dev " + s.Device + " root tbf rate " + rate + " burst 512kb latency 50ms")
}

// Void gives the namespace an interface of this name whose packets are lost, with an address and a way to another one.
func (s *Namespace) Void(name, address, to string) error {
	return s.run("ip link add "+name+" type veth peer name nowhere", "ip link set "+name+" up", "ip link set nowhere up",
		"ip addr add "+address+"/24 dev "+name, "ip neigh add "+to+" lladdr 02:00:00:00:00:01 dev "+name)
}

// SentBytes is how much the namespace has sent on its interface.
func (s *Namespace) SentBytes() (int64, error) {
	path := "/sys/class/net/" + s.Device + "/statistics/tx_bytes"
	line := append(s.Via[:len(s.Via):len(s.Via)], "cat", path)
	out, err := exec.Command(line[0], line[1:]...).Output()
	if err != nil {
		return 0, fmt.Errorf("netns: %s: %w", path, err)
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(out)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("netns: %s: %w", path, err)
	}
	return n, nil
}
