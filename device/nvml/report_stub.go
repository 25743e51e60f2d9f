//go:build !cgo || !linux

package nvml

import "fmt"

// ProcessMemory is how many bytes of a GPU a process has. Here that is not known: ErrUnavailable.
func ProcessMemory(uuid string, pid int) (int64, error) {
	_, err := Report()
	return Unknown, err
}

// Report asks the management library. Here there is none: ErrUnavailable.
func Report() (*System, error) {
	return nil, fmt.Errorf("%w: built without cgo or not for linux", ErrUnavailable)
}
