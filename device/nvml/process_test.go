//go:build cgo && linux && !nonvml

package nvml

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/stretchr/testify/require"
)

// The memory of a process is its own, whatever others have of the GPU.
func TestMemoryOfAProcessIsItsOwn(t *testing.T) {
	gpu := &mock.Device{GetComputeRunningProcessesFunc: func() ([]nvml.ProcessInfo, nvml.Return) {
		return []nvml.ProcessInfo{{Pid: 10, UsedGpuMemory: 3 << 30}, {Pid: 11, UsedGpuMemory: 5 << 20}, {Pid: 12, UsedGpuMemory: ^uint64(0)}}, nvml.SUCCESS
	}}
	lib := &mock.Interface{DeviceGetHandleByUUIDFunc: func(uuid string) (nvml.Device, nvml.Return) {
		if uuid != "GPU-0" {
			return nil, nvml.ERROR_NOT_FOUND
		}
		return gpu, nvml.SUCCESS
	}}
	for pid, want := range map[int]int64{10: 3 << 30, 11: 5 << 20, 12: Unknown, 13: Unknown} {
		got, err := processMemory(lib, "GPU-0", pid)
		require.NoError(t, err)
		require.Equal(t, want, got, pid)
	}
	_, err := processMemory(lib, "GPU-1", 10)
	require.ErrorIs(t, err, nvml.ERROR_NOT_FOUND)
}
