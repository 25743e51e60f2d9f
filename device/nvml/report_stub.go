//go:build !cgo || !linux

package nvml

import "fmt"

// Report asks the management library. Here there is none: ErrUnavailable.
func Report() (*System, error) {
	return nil, fmt.Errorf("%w: built without cgo or not for linux", ErrUnavailable)
}
