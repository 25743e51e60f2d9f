package cuda

import (
	"errors"
	"fmt"
	"strings"
)

// Features is what a device offers to share memory with.
type Features struct {
	VirtualMemory     bool // address ranges and mappings of one's own (cuMemCreate)
	PosixFiles        bool // allocations exported as file descriptors
	Fabric            bool // allocations exported as fabric handles
	CooperativeLaunch bool // grids whose blocks all run at once
	StreamMemOps      bool // 64-bit waits and writes by the stream itself
	UnifiedAddressing bool
	Multicast         bool // memory of several devices written, and reduced, by one instruction
}

// Features asks the device.
func (v *Device) Features() (Features, error) {
	var f Features
	for _, q := range []struct {
		which Attribute
		to    *bool
	}{
		{VirtualMemory, &f.VirtualMemory}, {PosixFileHandles, &f.PosixFiles}, {FabricHandles, &f.Fabric},
		{CooperativeLaunch, &f.CooperativeLaunch}, {StreamMemOps64, &f.StreamMemOps}, {UnifiedAddressing, &f.UnifiedAddressing},
		{MulticastObjects, &f.Multicast},
	} {
		n, err := v.Attribute(q.which)
		switch {
		case errors.Is(err, InvalidValue): // an attribute the driver does not know is a feature it does not have
		case err != nil:
			return Features{}, err
		default:
			*q.to = n != 0
		}
	}
	return f, nil
}

// FeatureError says which device lacks what. errors.Is(err, ErrUnsupported) holds.
type FeatureError struct {
	Feature string // "virtual memory management"
	Device  int    // ordinal
}

// Error names the device.
func (e *FeatureError) Error() string {
	return fmt.Sprintf("cuda: device %d lacks %s", e.Device, e.Feature)
}

// Unwrap returns ErrUnsupported.
func (e *FeatureError) Unwrap() error { return ErrUnsupported }

// PeerError says which devices cannot reach which. errors.Is(err, ErrUnsupported) holds.
type PeerError struct {
	Pairs [][2]int // ordinals: kernels of the first cannot read and write memory of the second
}

// Error is one sentence that names up to 4 pairs and the cure.
func (e *PeerError) Error() string {
	var pairs []string
	for i, p := range e.Pairs {
		if i == 4 {
			pairs = append(pairs, fmt.Sprintf("%d more", len(e.Pairs)-i))
			break
		}
		pairs = append(pairs, fmt.Sprintf("%d to %d", p[0], p[1]))
	}
	return fmt.Sprintf("cuda: no peer access from device %s: take GPUs that reach each other, by CUDA_VISIBLE_DEVICES; switch MIG and, on PCIe bridges, ACS off",
		strings.Join(pairs, ", "))
}

// Unwrap returns ErrUnsupported.
func (e *PeerError) Unwrap() error { return ErrUnsupported }

// Requirements is what CheckDevices insists on. The zero value asks for peer access alone.
type Requirements struct {
	VirtualMemory, PosixFiles, Fabric bool
	CooperativeLaunch                 bool
}

// CheckDevices tests every device, and every ordered pair for peer access. The error joins one FeatureError for each
// thing missing, and one PeerError.
func CheckDevices(devices []*Device, need Requirements) error {
	var missing []error
	var apart PeerError
	for _, v := range devices {
		f, err := v.Features()
		if err != nil {
			return fmt.Errorf("probe %v: %w", v, err)
		}
		for _, q := range []struct {
			need, have bool
			what       string
		}{
			{true, f.UnifiedAddressing, "unified addressing"},
			{need.VirtualMemory, f.VirtualMemory, "virtual memory management"},
			{need.PosixFiles, f.PosixFiles, "file descriptor handles"},
			{need.Fabric, f.Fabric, "fabric handles"},
			{need.CooperativeLaunch, f.CooperativeLaunch, "cooperative launch"},
		} {
			if q.need && !q.have {
				missing = append(missing, &FeatureError{Feature: q.what, Device: v.ordinal})
			}
		}
		for _, w := range devices {
			ok, err := v.CanAccess(w)
			if err != nil {
				return fmt.Errorf("probe %v to %v: %w", v, w, err)
			}
			if !ok {
				apart.Pairs = append(apart.Pairs, [2]int{v.ordinal, w.ordinal})
			}
		}
	}
	if len(apart.Pairs) > 0 {
		missing = append(missing, &apart)
	}
	return errors.Join(missing...)
}
