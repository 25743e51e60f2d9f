package cuda

import (
	"fmt"
	"unsafe"
)

// Attribute is a property of a device (CUdevice_attribute).
type Attribute int32

// The attributes that Switchyard asks for.
const (
	ClockRate                Attribute = 13 // of a multiprocessor, in kHz
	Multiprocessors          Attribute = 16
	CopyEngines              Attribute = 40
	UnifiedAddressing        Attribute = 41
	ComputeMajor             Attribute = 75
	CooperativeLaunch        Attribute = 95
	SharedBytesPerBlockOptIn Attribute = 97
	VirtualMemory            Attribute = 102
	PosixFileHandles         Attribute = 103
	StreamMemOps64           Attribute = 122
	FabricHandles            Attribute = 128
	MulticastObjects         Attribute = 132
)

// Device is one GPU of this process.
type Device struct {
	d       *Driver
	ordinal int
	handle  uint64
}

// DeviceCount is the number of GPUs that this process may use.
func (d *Driver) DeviceCount() (int, error) {
	var a args
	err := d.call(0, opDeviceGetCount, &a, nil)
	return int(a[0]), err
}

// Device is the GPU with an ordinal.
func (d *Driver) Device(ordinal int) (*Device, error) {
	if ordinal != int(int32(ordinal)) {
		return nil, fmt.Errorf("device %d: no int of C", ordinal)
	}
	a := args{uint64(ordinal)}
	if err := d.call(0, opDeviceGet, &a, nil); err != nil {
		return nil, fmt.Errorf("device %d: %w", ordinal, err)
	}
	return &Device{d: d, ordinal: ordinal, handle: a[0]}, nil
}

// Driver is the driver the device was got from.
func (v *Device) Driver() *Driver { return v.d }

// Ordinal is the device's number in this process.
func (v *Device) Ordinal() int { return v.ordinal }

// String is like "cuda:3".
func (v *Device) String() string { return fmt.Sprintf("cuda:%d", v.ordinal) }

// Name is the product's name.
func (v *Device) Name() (string, error) {
	b := make([]byte, 128)
	a := args{v.handle, uint64(len(b))}
	err := v.d.call(0, opDeviceGetName, &a, unsafe.Pointer(&b[0]))
	return text(b), err
}

// UUID identifies the GPU across processes, whatever CUDA_VISIBLE_DEVICES says.
func (v *Device) UUID() ([16]byte, error) {
	b := make([]byte, 16)
	a := args{v.handle}
	err := v.d.call(0, opDeviceGetUUID, &a, unsafe.Pointer(&b[0]))
	return [16]byte(b), err
}

// Attribute is the value of a property.
func (v *Device) Attribute(which Attribute) (int, error) {
	a := args{v.handle, uint64(which)}
	err := v.d.call(0, opDeviceGetAttribute, &a, nil)
	return int(int32(a[0])), err
}

// CanAccess reports whether kernels of v can read and write memory of peer.
func (v *Device) CanAccess(peer *Device) (bool, error) {
	if v.handle == peer.handle {
		return true, nil
	}
	a := args{v.handle, peer.handle}
	err := v.d.call(0, opDeviceCanAccessPeer, &a, nil)
	return err == nil && a[0] != 0, err
}
