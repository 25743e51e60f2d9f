//go:build cgo && linux && !nonvml

package nvml

import (
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// ProcessMemory is how many bytes of a GPU a process has, as the driver counts them: with its context and its code. The GPU is named as
// device.CUDADevice.UUID does. Unknown is what a process has that the driver does not list, which counts processes as the host does, not as a
// container does. The error is ErrUnavailable where there is no library or no driver.
func ProcessMemory(uuid string, pid int) (bytes int64, err error) {
	lib, err := open()
	if err != nil {
		return Unknown, err
	}
	bytes, err = processMemory(lib, uuid, pid)
	if r := lib.Shutdown(); r != nvml.SUCCESS {
		err = errors.Join(err, r)
	}
	if err != nil {
		return Unknown, fmt.Errorf("nvml: memory of process %d on %s: %w", pid, uuid, err)
	}
	return bytes, nil
}

func processMemory(lib nvml.Interface, uuid string, pid int) (int64, error) {
	d, ret := lib.DeviceGetHandleByUUID(uuid)
	if ret != nvml.SUCCESS {
		return Unknown, ret
	}
	processes, ret := d.GetComputeRunningProcesses()
	if ret != nvml.SUCCESS {
		return Unknown, ret
	}
	const notAvailable = ^uint64(0) // NVML_VALUE_NOT_AVAILABLE
	for _, p := range processes {
		if int(p.Pid) == pid && p.UsedGpuMemory != notAvailable {
			return int64(p.UsedGpuMemory), nil
		}
	}
	return Unknown, nil
}
