package cuda

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/env"
	"github.com/switchyard-moe/switchyard/kernels/cuda/internal/fatbin"
)

// codeFor is which machine code a GPU's driver loads: nil for the fatbins, which drivers from CUDA 13.0 on do.
func codeFor(v *cuda.Device) (*fatbin.Older, error) {
	wanted, err := env.OlderKernels()
	version := v.Driver().Version()
	if err != nil || version >= fatbin.FatbinDriver && !wanted {
		return nil, err
	}
	major, err := v.Attribute(cuda.ComputeMajor)
	if err != nil {
		return nil, err
	}
	for _, o := range fatbin.Olders() {
		if o.Major == major && o.Driver <= version {
			return &o, nil
		}
	}
	return nil, fmt.Errorf("%v of compute capability %d: no kernels for a driver that implements CUDA %d.%d: install NVIDIA's driver %s or newer",
		v, major, version/1000, version%1000/10, leastDriver(major))
}

// leastDriver is the driver that loads kernels for GPUs of this compute capability.
func leastDriver(major int) string {
	if major == 10 {
		return "570"
	}
	return "580"
}

// imageOf is the module of this name as the driver loads it.
func imageOf(code *fatbin.Older, name string) ([]byte, error) {
	file := name + ".fatbin"
	if code != nil {
		file = code.File(name)
	}
	b, err := images.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("%w: make kernels builds it", err)
	}
	if code == nil {
		return b, nil
	}
	z, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if b, err = io.ReadAll(z); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return b, nil
}
