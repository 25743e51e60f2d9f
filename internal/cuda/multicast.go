package cuda

import "fmt"

// A multicast object has memory of several devices at the same places. It is mapped like memory, as a whole and from its beginning;
// kernels then reach all devices' memory at once by the multimem instructions, and by no others. Its handle is a MemHandle. The order is:
// create, export and import, MulticastAddDevice of every device, then binds and mappings; and back: unmap, unbind, release.

// MulticastGranularity is what sizes of objects and binds, their offsets and the addresses of mappings are multiples of: the recommended
// size, or the smallest.
func (c *Context) MulticastGranularity(devices int, t HandleType, recommended bool) (int64, error) {
	a := args{uint64(devices), 0, uint64(t), 0}
	if recommended {
		a[3] = 1
	}
	err := c.call(opMulticastGranularity, &a, nil)
	return int64(a[0]), err
}

// MulticastCreate makes an object of n bytes for this number of devices, which leaves the process as t says.
func (c *Context) MulticastCreate(devices int, n int64, t HandleType) (MemHandle, error) {
	a := args{uint64(devices), uint64(n), uint64(t)}
	if err := c.call(opMulticastCreate, &a, nil); err != nil {
		return 0, fmt.Errorf("%d bytes for %d devices: %w", n, devices, err)
	}
	return MemHandle(a[0]), nil
}

// MulticastAddDevice makes the context's device one of the object's.
func (c *Context) MulticastAddDevice(h MemHandle) error {
	a := args{uint64(h), c.dev.handle}
	return c.call(opMulticastAddDevice, &a, nil)
}

// MulticastBind puts n bytes of mem, from offset from on, at offset at of the object. mem is memory of the context's device, which the
// object holds until MulticastUnbind. While a device is still to be added the driver waits for that.
func (c *Context) MulticastBind(h MemHandle, at int64, mem MemHandle, from, n int64) error {
	a := args{uint64(h), uint64(at), uint64(mem), uint64(from), uint64(n)}
	return c.call(opMulticastBind, &a, nil)
}

// MulticastUnbind undoes a bind of the context's device, of the same place and size.
func (c *Context) MulticastUnbind(h MemHandle, at, n int64) error {
	a := args{uint64(h), c.dev.handle, uint64(at), uint64(n)}
	return c.call(opMulticastUnbind, &a, nil)
}
