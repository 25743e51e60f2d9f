package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/device/nvml"
	"github.com/switchyard-moe/switchyard/internal/doctor"
	"github.com/switchyard-moe/switchyard/internal/proctest"
)

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
			require.Equal(t, f.State == doctor.Fine, f.Cure == "", "%+v", f)
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
	require.Contains(t, says(0, errors.New("cuda: init: CUDA_ERROR_STUB_LIBRARY"), old, nil), "problem driver: driver 550.54 implements CUDA 12.4, and cannot be used: cuda: init")
	require.Contains(t, says(2, nil, old, nil), "note driver: driver 550.54 implements CUDA 12.4; 2 of 2 GPUs are for this process; drivers older than 580 load kernels that have not run")
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
	states := map[string]doctor.Finding{}
	for line := range strings.Lines(out) {
		var f doctor.Finding
		require.NoError(t, json.Unmarshal([]byte(line), &f), line)
		states[f.Check] = f
	}
	require.Equal(t, doctor.Fine, states["exchange"].State, out)
	require.Contains(t, states["exchange"].Says, "2 processes exchanged 1024 KiB each in ")
	require.Zero(t, code, out)
}

// What is left over of a launcher is a problem of its own, and ranks exchange bytes all the same.
func TestDoctorExchangesBesideOldVariables(t *testing.T) {
	p := proctest.Start(t, proctest.Spec{Part: "command", Args: []string{"doctor", "-json"}, Env: []string{"RANK=1", "LOCAL_RANK=5", "SWITCHYARD_PORT=77", "SWITCHYARD_ADDR=nowhere:1"}})
	require.Equal(t, 1, p.Wait())
	out, _ := p.Output()
	require.Contains(t, out, `{"check":"launcher","state":"problem"`)
	require.Contains(t, out, `{"check":"exchange","state":"ok"`)
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
