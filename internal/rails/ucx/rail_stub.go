//go:build !cgo || !linux

package ucx

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/internal/rails"
)

// Open has no UCX to open in this build.
func Open(rails.Config) (rails.Rail, error) {
	return nil, fmt.Errorf("ucx: %w: built without cgo or not for linux", ErrUnavailable)
}
