package doctor

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard"
	"github.com/switchyard-moe/switchyard/comm"
)

// machine is what checks of the host look at.
type machine struct {
	read   func(file string) (string, error) // without the space around it
	exists func(file string) bool
	limit  func(resource int) (uint64, error) // the soft one
	cores  int                                // that this process may use
	env    func() (comm.Config, error)
	memory func() error // whether memory that ranks share can be made
	listen func() error // whether a port of the loopback interface can be had
}

func newMachine() *machine {
	return &machine{
		read: func(file string) (string, error) {
			b, err := os.ReadFile(file)
			return strings.TrimSpace(string(b)), err
		},
		exists: func(file string) bool {
			_, err := os.Stat(file)
			return err == nil
		},
		limit: func(resource int) (uint64, error) {
			var r unix.Rlimit
			err := unix.Getrlimit(resource, &r)
			return r.Cur, err
		},
		cores: runtime.GOMAXPROCS(0),
		env:   comm.FromEnv,
		memory: func() error {
			fd, err := unix.MemfdCreate("switchyard-doctor", unix.MFD_CLOEXEC)
			if err == nil {
				err = errors.Join(unix.Ftruncate(fd, 4096), unix.Close(fd))
			}
			return err
		},
		listen: func() error {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				return err
			}
			return l.Close()
		},
	}
}

// The fewest file descriptors of a rank that are enough for groups of 64.
const enoughFiles = 1024

// Host makes the checks of the host.
func Host() []Finding { return newMachine().examine() }

func (m *machine) examine() []Finding {
	return []Finding{m.versions(), m.processors(), m.launcher(), m.sharedMemory(), m.descriptors(), m.locked(), m.reading(), m.container(), m.ports()}
}

func (m *machine) versions() Finding {
	kernel, err := m.read("/proc/sys/kernel/osrelease")
	if err != nil {
		kernel = "unknown"
	}
	return Finding{"versions", Fine, fmt.Sprintf("switchyard %s, %s, %s/%s, Linux %s", switchyard.Version, runtime.Version(), runtime.GOOS, runtime.GOARCH, kernel), ""}
}

// processors compares the load with the cores. Ranks that wait for a busy core are slow, and nothing else tells why.
func (m *machine) processors() Finding {
	f := Finding{"processors", Fine, fmt.Sprintf("%d cores for this process", m.cores), ""}
	text, err := m.read("/proc/loadavg")
	if err != nil {
		return f
	}
	load, err := strconv.ParseFloat(strings.Fields(text + " ")[0], 64)
	if err != nil {
		return f
	}
	f.Says += fmt.Sprintf(", load %.1f", load)
	if load > float64(m.cores) {
		f.State, f.Cure = Note, "other programs use the cores: calls on the host take milliseconds in place of microseconds until they end"
	}
	return f
}

// launcher asks the environment who started this process.
func (m *machine) launcher() Finding {
	cfg, err := m.env()
	switch {
	case err != nil:
		return Finding{"launcher", Problem, err.Error(), "unset the variables that are left over, or have " + `"switchyard run" or torchrun start the ranks; docs/launchers.md lists what each launcher sets`}
	case cfg.Launcher == "":
		return Finding{"launcher", Fine, "no launcher has started this process, which would be a group of one", ""}
	}
	return Finding{"launcher", Fine, fmt.Sprintf("%s says that this is rank %d of %d, which meet at %s", cfg.Launcher, cfg.Rank, cfg.Size, cfg.Addr), ""}
}

func (m *machine) sharedMemory() Finding {
	if err := m.memory(); err != nil {
		return Finding{"memory", Problem, fmt.Sprintf("memory that ranks share cannot be made: memfd_create: %v", err), "use a kernel from 3.17 on, and allow memfd_create and ftruncate in the sandbox's system calls"}
	}
	says := "ranks can share memory, by memfd_create"
	if !m.exists("/dev/shm") {
		says += "; there is no /dev/shm, and none is needed"
	}
	return Finding{"memory", Fine, says, ""}
}

func (m *machine) descriptors() Finding {
	files, err := m.limit(unix.RLIMIT_NOFILE)
	if err != nil {
		return Finding{"descriptors", Note, fmt.Sprintf("the limit of file descriptors is unknown: %v", err), "ulimit -n says it"}
	}
	f := Finding{"descriptors", Fine, fmt.Sprintf("%s file descriptors for a process", amount(files)), ""}
	if files < enoughFiles {
		f.State, f.Cure = Note, fmt.Sprintf("ulimit -n %d: a rank has some for each other rank of its host", enoughFiles)
	}
	return f
}

// locked reports how much memory may be locked, which adapters of InfiniBand and RoCE ask for, and nothing else.
func (m *machine) locked() Finding {
	bytes, err := m.limit(unix.RLIMIT_MEMLOCK)
	if err != nil {
		return Finding{"memlock", Note, fmt.Sprintf("the limit of locked memory is unknown: %v", err), "ulimit -l says it"}
	}
	if bytes == unix.RLIM_INFINITY {
		return Finding{"memlock", Fine, "any amount of memory can be locked", ""}
	}
	if !m.exists("/sys/class/infiniband") {
		return Finding{"memlock", Fine, fmt.Sprintf("%d KiB of memory can be locked; without RDMA adapters nothing locks any", bytes>>10), ""}
	}
	return Finding{"memlock", Note, fmt.Sprintf("%d KiB of memory can be locked, and there are RDMA adapters, which lock what they send", bytes>>10), "ulimit -l unlimited, or LimitMEMLOCK=infinity of the service that starts the job"}
}

// reading says whether ranks of different processes can read each other's memory, which large messages from ordinary memory do.
func (m *machine) reading() Finding {
	scope, err := m.read("/proc/sys/kernel/yama/ptrace_scope")
	if err != nil || scope == "0" {
		return Finding{"ptrace", Fine, "ranks of different processes can read each other's memory", ""}
	}
	return Finding{"ptrace", Note, "kernel.yama.ptrace_scope is " + scope + ": large messages between processes take one copy more, unless they are in the symmetric heap",
		"sysctl kernel.yama.ptrace_scope=0, or allocate messages in the heap"}
}

func (m *machine) container() Finding {
	var in []string
	for _, c := range []struct{ file, name string }{{"/.dockerenv", "Docker"}, {"/run/.containerenv", "Podman"}, {"/var/run/secrets/kubernetes.io", "Kubernetes"}, {"/singularity", "Singularity"}} {
		if m.exists(c.file) {
			in = append(in, c.name)
		}
	}
	if len(in) == 0 {
		return Finding{"container", Fine, "no sign of a container", ""}
	}
	return Finding{"container", Note, "this is a container of " + strings.Join(in, " and "), "start all ranks of a group that are on one host in one container, or give theirs a folder for sockets (SWITCHYARD_SOCKETS); docs/containers.md " +
		"says what a container must have"}
}

func (m *machine) ports() Finding {
	if err := m.listen(); err != nil {
		return Finding{"ports", Problem, fmt.Sprintf("no port of the loopback interface can be had: %v", err), "bring the interface up: ip link set lo up"}
	}
	span, err := m.read("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return Finding{"ports", Fine, "ports of the loopback interface can be had", ""}
	}
	fields := strings.Fields(span)
	return Finding{"ports", Fine, fmt.Sprintf("ports of the loopback interface can be had; clients get those from %s", strings.Join(fields, " to ")), ""}
}

// amount is a limit for a person.
func amount(n uint64) string {
	if n == unix.RLIM_INFINITY {
		return "any number of"
	}
	return strconv.FormatUint(n, 10)
}
