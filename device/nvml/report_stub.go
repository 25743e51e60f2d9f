//go:build !cgo || !linux || nonvml

package nvml

import "fmt"

// ProcessMemory is how many bytes of a GPU a process has. Here that is not known: ErrUnavailable.
func ProcessMemory(uuid string, pid int) (int64, error) {
	_, err := Report()
	return Unknown, err
}

// Report asks the management library. Here there is none: ErrUnavailable.
func Report() (*System, error) {
	return nil, fmt.Errorf("%w: built without cgo, without NVML or not for linux", ErrUnavailable)
}
