package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/device/nvml"
	"github.com/switchyard-moe/switchyard/memory"
)

// desk is where a rank works: its device, and memory of it that is not the heap's.
type desk struct {
	dev    device.Device
	stream device.Stream // of copies to and from a GPU, nil on the host
	addr   uintptr       // of deskBytes on a GPU,
	used   int64         // and how many of them the running call has
}

const (
	deskBytes = 64 << 20
	deskAlign = 256
)

// openDesk opens a GPU, or the host where ordinal is negative.
func openDesk(ordinal int) (*desk, error) {
	if ordinal < 0 {
		return &desk{dev: device.Host()}, nil
	}
	d, err := device.CUDA(ordinal)
	if err != nil {
		return nil, err
	}
	k := &desk{dev: d}
	if k.stream, err = d.NewStream(); err == nil {
		k.addr, err = d.Context().MemAlloc(deskBytes)
	}
	if err != nil {
		return nil, err
	}
	return k, nil
}

func (k *desk) onGPU() bool { return k.stream != nil }

// take is n bytes of the device outside the heap, until the next call.
func (k *desk) take(n int64) memory.View {
	if !k.onGPU() {
		return memory.Host(make([]byte, n))
	}
	at := k.used
	if k.used += (n + deskAlign - 1) / deskAlign * deskAlign; k.used > deskBytes {
		panic(fmt.Sprintf("a call takes more than %d bytes", deskBytes))
	}
	return memory.Device(k.addr+uintptr(at), n)
}

// with is memory of the device that holds b.
func (k *desk) with(b []byte) (memory.View, error) {
	v := k.take(int64(len(b)))
	return v, k.write(v, b)
}

func (k *desk) write(v memory.View, b []byte) error { return memory.Copy(k.stream, v, memory.Host(b)) }

func (k *desk) read(v memory.View) ([]byte, error) {
	b := make([]byte, v.Len())
	return b, memory.Copy(k.stream, memory.Host(b), v)
}

// usedKB is how much memory of the GPU this process has; 0 on the host, and where the driver does not list this process.
func (k *desk) usedKB() (int64, error) {
	d, ok := k.dev.(*device.CUDADevice)
	if !ok {
		return 0, nil
	}
	uuid, err := d.UUID()
	if err != nil {
		return 0, err
	}
	used, err := nvml.ProcessMemory(uuid, os.Getpid())
	return max(used, 0) >> 10, err
}

// gpus is how many GPUs there are, and an error if there are none.
func gpus() (int, error) {
	n, err := device.CUDACount()
	if err == nil && n == 0 {
		err = errors.New("the driver sees no GPU")
	}
	return n, err
}
