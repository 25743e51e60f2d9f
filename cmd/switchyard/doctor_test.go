package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/device/nvml"
	"github.com/switchyard-moe/switchyard/internal/proctest"
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
		require.Equal(t, fine, f.State, "%+v", f)
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
		state state
		says  string
	}{
		"busy cores": {files: map[string]string{"/proc/loadavg": "9.25 1 1 1/1 1"}, check: "processors", state: note, says: "4 cores for this process, load 9.2"},
		"half a world": {spoil: func(m *machine) {
			m.env = func() (comm.Config, error) { return comm.Config{}, errors.New("RANK without WORLD_SIZE") }
		}, check: "launcher", state: problem, says: "RANK without WORLD_SIZE"},
		"sealed":      {spoil: func(m *machine) { m.memory = func() error { return unix.EPERM } }, check: "memory", state: problem, says: "memfd_create: operation not permitted"},
		"few files":   {spoil: func(m *machine) { m.limit = func(int) (uint64, error) { return 256, nil } }, check: "descriptors", state: note, says: "256 file descriptors"},
		"locked":      {files: map[string]string{"/sys/class/infiniband": ""}, check: "memlock", state: note, says: "8192 KiB of memory can be locked"},
		"ptrace":      {files: map[string]string{"/proc/sys/kernel/yama/ptrace_scope": "1"}, check: "ptrace", state: note, says: "ptrace_scope is 1"},
		"container":   {files: map[string]string{"/.dockerenv": ""}, check: "container", state: note, says: "a container of Docker"},
		"no loopback": {spoil: func(m *machine) { m.listen = func() error { return unix.EADDRNOTAVAIL } }, check: "ports", state: problem, says: "cannot assign requested address"},
	} {
		t.Run(name, func(t *testing.T) {
			m := healthy(c.files)
			if c.spoil != nil {
				c.spoil(m)
			}
			for _, f := range m.examine() {
				if f.Check != c.check {
					require.Equal(t, fine, f.State, "%+v", f)
					continue
				}
				require.Equal(t, c.state, f.State)
				require.Contains(t, f.Says, c.says)
				require.NotEmpty(t, f.Cure)
			}
		})
	}
}

func TestDoctorJudgesGPUs(t *testing.T) {
	two := func(change func(a, b *nvml.GPU)) *nvml.System {
		gpus := make([]nvml.GPU, 2)
		for i := range gpus {
			gpus[i] = nvml.GPU{Index: i, Name: "NVIDIA H200", PCI: fmt.Sprintf("0000:%d9:00.0", i), MemoryTotal: 141 << 30, MemoryUsed: 1 << 30, Temperature: nvml.Unknown,
				Links: []nvml.Link{{Number: 0, Active: true, Speed: 25}, {Number: 1, Active: true, Speed: 25}}, Peers: []nvml.Peer{{Index: 1 - i, NVLinks: 2}}}
		}
		if change != nil {
			change(&gpus[0], &gpus[1])
		}
		return &nvml.System{Driver: "580.159.04", CUDA: "13.0", GPUs: gpus}
	}
	says := func(count int, err error, report *nvml.System, asked error) string {
		var b strings.Builder
		for _, f := range judgeGPUs(count, err, report, asked) {
			require.Equal(t, f.State == fine, f.Cure == "", "%+v", f)
			fmt.Fprintf(&b, "%s %s: %s\n", f.State, f.Check, f.Says)
		}
		return b.String()
	}
	require.Equal(t, `ok driver: driver 580.159.04 implements CUDA 13.0; 1 of 2 GPUs are for this process
ok gpu: GPU 0 is NVIDIA H200 at 0000:09:00.0, 1024 of 144384 MiB in use, 2 NVLinks of 50 GB/s a direction together
ok gpu: GPU 1 is NVIDIA H200 at 0000:19:00.0, 1024 of 144384 MiB in use, 2 NVLinks of 50 GB/s a direction together
ok peers: all 2 pairs of GPUs reach each other over NVLink
`, says(1, nil, two(nil), nil))
	require.Contains(t, says(2, nil, two(func(a, b *nvml.GPU) { a.Peers[0].NVLinks, a.Peers[0].Path = 0, "host bridge" }), nil), "note peers: PCIe and not NVLink leads from GPU 0 to 1 (host bridge)")
	require.Contains(t, says(2, nil, two(func(a, b *nvml.GPU) { b.Peers[0].Access = errors.New("no chipset") }), nil), "problem peers: kernels cannot reach the memory of GPU 1 to 0 (no chipset)")
	require.Contains(t, says(2, nil, two(func(a, b *nvml.GPU) { a.ECC.Enabled, a.ECC.RemapFailed = true, true }), nil), "note gpu: GPU 0")
	old := two(nil)
	old.Driver, old.CUDA = "550.54", "12.4"
	require.Contains(t, says(0, errors.New("cuda: init: CUDA_ERROR_STUB_LIBRARY"), old, nil), "problem driver: driver 550.54 implements CUDA 12.4, and its library does not open")
	require.Contains(t, says(0, device.ErrUnavailable, nil, nvml.ErrUnavailable), "note driver: ")
	require.Contains(t, says(0, errors.New("CUDA_ERROR_UNKNOWN"), nil, nvml.ErrUnavailable), "problem driver: CUDA_ERROR_UNKNOWN")
	require.Contains(t, says(2, nil, nil, nvml.ErrUnavailable), "ok driver: 2 GPUs for this process; links are unknown")
}

// The command as a person runs it: two processes exchange bytes.
func TestDoctorExchanges(t *testing.T) {
	p := proctest.Start(t, proctest.Spec{Part: "command", Args: []string{"doctor", "-json"}})
	code := p.Wait()
	out, errs := p.Output()
	require.Empty(t, errs)
	states := map[string]finding{}
	for line := range strings.Lines(out) {
		var f finding
		require.NoError(t, json.Unmarshal([]byte(line), &f), line)
		states[f.Check] = f
	}
	require.Equal(t, fine, states["exchange"].State, out)
	require.Contains(t, states["exchange"].Says, "2 processes exchanged 1024 KiB each in ")
	require.Zero(t, code, out)
}

// A rank that cannot join ends the command with a problem and the rank's own words.
func TestDoctorTellsWhyRanksDoNotExchange(t *testing.T) {
	p := proctest.Start(t, proctest.Spec{Part: "command", Args: []string{"doctor"}, Env: []string{"SWITCHYARD_JOIN_TIMEOUT=soon"}})
	require.Equal(t, 1, p.Wait())
	out, _ := p.Output()
	require.Regexp(t, `problem +exchange`, out)
	require.Contains(t, strings.Join(strings.Fields(out), " "), "SWITCHYARD_JOIN_TIMEOUT")
}

func TestDoctorRefusesWhatItDoesNotKnow(t *testing.T) {
	var out, errs strings.Builder
	require.Equal(t, 2, command([]string{"doctor", "now"}, &out, &errs))
	require.Contains(t, errs.String(), `["now"] is too much`)
	require.Zero(t, command([]string{"doctor", "-h"}, &out, &errs))
	require.Contains(t, errs.String(), "usage: switchyard doctor [-json]")
	require.Equal(t, 1, command([]string{"doctor", "-trial", "moon"}, &out, &errs))
}
