package nvml

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/observe"
)

func TestReportOfThisMachine(t *testing.T) {
	s, err := Report()
	if errors.Is(err, ErrUnavailable) {
		require.NotEqual(t, ErrUnavailable.Error(), err.Error(), "the reason is missing")
		t.Skipf("needs a GPU: %v", err)
	}
	require.NoError(t, err)
	require.NotEmpty(t, s.Driver)
	require.NotEmpty(t, s.CUDA)
	require.NotEmpty(t, s.GPUs)
	for _, g := range s.GPUs {
		require.NotEmpty(t, g.Name)
		require.True(t, strings.HasPrefix(g.UUID, "GPU-"), g.UUID)
		require.Regexp(t, "^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}.[0-9a-f]$", g.PCI)
		require.Positive(t, g.MemoryTotal)
		require.Len(t, g.Peers, len(s.GPUs)-1)
	}
	t.Logf("\n%v", s)
	again, err := Report()
	require.NoError(t, err)
	require.Len(t, again.GPUs, len(s.GPUs))
}

func TestReportIsReadable(t *testing.T) {
	links := []Link{{0, true, "switch", "0000:c1:00.0", 26.5}, {1, true, "switch", "0000:c1:00.0", 26.5}, {2, false, "", "", Unknown}}
	s := &System{Driver: "580.1", NVML: "13.580", CUDA: "13.0", GPUs: []GPU{
		{
			Index: 0, Name: "NVIDIA H200", UUID: "GPU-0", PCI: "0000:19:00.0", MemoryTotal: 143771 << 20, MemoryUsed: 5 << 20,
			Temperature: 30, TemperatureLimit: 87, MemoryTemperature: 41, Power: 76.4, PowerLimit: 700, Clock: 345, Busy: 0,
			ECC: ECC{Enabled: true, Corrected: 2, RemappedCorrected: 1}, Fabric: "completed", Links: links[:2],
			Peers: []Peer{{Index: 1, NVLinks: 2, Switch: true, Path: "system"}},
		},
		{
			Index: 1, Name: "NVIDIA H200", UUID: "GPU-1", PCI: "0000:3b:00.0", MemoryTotal: Unknown, MemoryUsed: Unknown,
			Temperature: Unknown, TemperatureLimit: Unknown, MemoryTemperature: Unknown, Power: Unknown, PowerLimit: Unknown,
			Clock: Unknown, Busy: Unknown, Slowed: []string{"the hardware has halved the clock"},
			ECC: ECC{Enabled: true, Corrected: Unknown, Uncorrected: 3, RemapPending: true}, Fabric: "in progress", Links: links,
			Peers: []Peer{{Index: 0, Access: errors.New("the topology does not support it")}},
		},
	}}
	require.Equal(t, `driver 580.1, CUDA 13.0, NVML 13.580, 2 GPUs
GPU 0: NVIDIA H200  0000:19:00.0  GPU-0
  memory 5 of 143771 MiB used, ECC on, 2 corrected, 0 uncorrected, 1 rows replaced
  30 C (slows down at 87 C), memory 41 C, 76 of 700 W, 345 MHz, 0% busy
  NVLink: 2 of 2 up, 53 GB/s a direction, fabric completed
GPU 1: NVIDIA H200  0000:3b:00.0  GPU-1
  memory ? of ? MiB used, ECC on, ? corrected, 3 uncorrected
  ? C (slows down at ? C), memory ? C, ? of ? W, ? MHz, ?% busy
  NVLink: 2 of 3 up, 53 GB/s a direction, fabric in progress
  problem: 3 uncorrected memory errors
  problem: memory rows wait for a reset to be replaced
  problem: the hardware has halved the clock
  problem: 1 of 3 NVLinks are down
  problem: the NVSwitch fabric is in progress
  problem: no access to GPU 0: the topology does not support it
      0            1
0     -            2 to switch
1     no access    -
`, s.String())
	require.Empty(t, s.GPUs[0].Problems())
	n, speed := s.GPUs[1].ActiveLinks()
	require.Equal(t, 2, n)
	require.InDelta(t, 53, speed, 0.01)
	o := s.Observed()
	require.Equal(t, observe.GPU{
		Name: "NVIDIA H200", MemoryUsedBytes: 5 << 20, MemoryTotalBytes: 143771 << 20, TemperatureCelsius: 30, PowerWatts: 76.4, Links: 2, LinkGigabytesPerSecond: 53,
		Peers: []observe.GPUPeer{{Index: 1, Links: 2, Path: "system"}},
	}, o[0])
	require.Equal(t, []any{2, 1, -1}, []any{o[1].Links, o[1].LinksDown, o[1].BusyPercent})
	require.Equal(t, s.GPUs[1].Problems(), o[1].Problems)
	require.Equal(t, []observe.GPUPeer{{Index: 0, Refused: "the topology does not support it"}}, o[1].Peers)
}
