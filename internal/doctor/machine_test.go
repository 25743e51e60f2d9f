package doctor

import (
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
)

// healthy is a machine on which nothing is to be said.
func healthy(files map[string]string) *machine {
	limits := map[int]uint64{unix.RLIMIT_NOFILE: 65536, unix.RLIMIT_MEMLOCK: 8 << 20}
	return &machine{
		read: func(file string) (string, error) {
			if text, ok := files[file]; ok {
				return text, nil
			}
			return "", os.ErrNotExist
		},
		exists: func(file string) bool { _, ok := files[file]; return ok },
		limit:  func(resource int) (uint64, error) { return limits[resource], nil },
		cores:  4,
		env:    func() (comm.Config, error) { return comm.Config{Size: 1}, nil },
		memory: func() error { return nil },
		listen: func() error { return nil },
	}
}

func TestDoctorHasNothingToSayOfAHealthyMachine(t *testing.T) {
	m := healthy(map[string]string{"/proc/loadavg": "0.50 1 1 1/1 1", "/proc/sys/kernel/yama/ptrace_scope": "0"})
	for _, f := range m.examine() {
		require.Equal(t, Fine, f.State, "%+v", f)
		require.NotEmpty(t, f.Says)
		require.Empty(t, f.Cure)
	}
}

// Every trouble has its check, its value in the text, and a cure; the other checks stay as they are.
func TestDoctorNamesATrouble(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		spoil func(m *machine)
		check string
		state State
		says  string
	}{
		"busy cores": {files: map[string]string{"/proc/loadavg": "9.25 1 1 1/1 1"}, check: "processors", state: Note, says: "4 cores for this process, load 9.2"},
		"half a world": {spoil: func(m *machine) {
			m.env = func() (comm.Config, error) { return comm.Config{}, errors.New("RANK without WORLD_SIZE") }
		}, check: "launcher", state: Problem, says: "RANK without WORLD_SIZE"},
		"sealed":      {spoil: func(m *machine) { m.memory = func() error { return unix.EPERM } }, check: "memory", state: Problem, says: "memfd_create: operation not permitted"},
		"few files":   {spoil: func(m *machine) { m.limit = func(int) (uint64, error) { return 256, nil } }, check: "descriptors", state: Note, says: "256 file descriptors"},
		"locked":      {files: map[string]string{"/sys/class/infiniband": ""}, check: "memlock", state: Note, says: "8192 KiB of memory can be locked"},
		"ptrace":      {files: map[string]string{"/proc/sys/kernel/yama/ptrace_scope": "1"}, check: "ptrace", state: Note, says: "ptrace_scope is 1"},
		"container":   {files: map[string]string{"/.dockerenv": ""}, check: "container", state: Note, says: "a container of Docker"},
		"no loopback": {spoil: func(m *machine) { m.listen = func() error { return unix.EADDRNOTAVAIL } }, check: "ports", state: Problem, says: "cannot assign requested address"},
	} {
		t.Run(name, func(t *testing.T) {
			m := healthy(c.files)
			if c.spoil != nil {
				c.spoil(m)
			}
			for _, f := range m.examine() {
				if f.Check != c.check {
					require.Equal(t, Fine, f.State, "%+v", f)
					continue
				}
				require.Equal(t, c.state, f.State)
				require.Contains(t, f.Says, c.says)
				require.NotEmpty(t, f.Cure)
			}
		})
	}
}

// A rank that fails ends the other, which would wait for it, and its words are told.
func TestARankThatFailsEndsTheExchange(t *testing.T) {
	f := Exchange([]string{"/bin/sh", "-c", `[ "$SWITCHYARD_RANK" = 1 ] && { echo no core left for rank 1 on "$0" >&2; exit 3; }; exec sleep 1000`}, "host")
	require.Equal(t, Problem, f.State)
	require.Equal(t, "2 processes did not exchange bytes on host: rank 1: exit status 3: no core left for rank 1 on host", f.Says)
	require.NotEmpty(t, f.Cure)
	f = Exchange([]string{"/no/such/program"}, "host")
	require.Contains(t, f.Says, "/no/such/program")
	_, err := Trial("moon")
	require.ErrorContains(t, err, "moon")
}

func TestADriverIsJudged(t *testing.T) {
	require.Equal(t, Note, Driver(0, device.ErrUnavailable, nil).State)
	require.Equal(t, Problem, Driver(0, errors.New("CUDA_ERROR_UNKNOWN"), nil).State)
	require.Contains(t, Driver(2, nil, errors.New("not asked")).Says, "2 GPUs for this process; links are unknown: not asked")
}
