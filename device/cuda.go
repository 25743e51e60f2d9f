package device

import (
	"errors"
	"fmt"
	"sync"

	"github.com/switchyard-moe/switchyard/internal/cuda"
)

var (
	// ErrUnavailable is returned by CUDA if there is no driver, no GPU that it can talk to, or no cgo.
	ErrUnavailable = cuda.ErrUnavailable
	// ErrCapturing is returned by calls that a stream refuses while its work is captured into a graph, and for a mark of
	// a capture that has ended.
	ErrCapturing = errors.New("device: stream is being captured into a graph")
)

// CUDADevice is one GPU of this process. It holds the GPU's primary context, which torch and others share.
type CUDADevice struct {
	drv *cuda.Driver
	ctx *cuda.Context

	once sync.Once
	err  error
}

// CUDA opens the GPU with an ordinal, counted as CUDA_VISIBLE_DEVICES has it. The caller closes it, after everything that
// was made with it. A GPU may be opened any number of times, for example by several ranks that share it. The error is
// ErrUnavailable if there is no usable driver.
func CUDA(ordinal int) (*CUDADevice, error) {
	d := new(CUDADevice)
	if err := d.open(ordinal); err != nil {
		return nil, errors.Join(fmt.Errorf("device: cuda:%d: %w", ordinal, err), d.drv.Close())
	}
	return d, nil
}

func (d *CUDADevice) open(ordinal int) (err error) {
	if d.drv, err = cuda.Open(); err != nil {
		return err
	}
	v, err := d.drv.Device(ordinal)
	if err != nil {
		if n, cerr := d.drv.DeviceCount(); cerr == nil {
			return fmt.Errorf("of %d: %w", n, err)
		}
		return err
	}
	d.ctx, err = v.Primary()
	return err
}

// CUDACount is the number of GPUs that this process may use. The error is ErrUnavailable as in CUDA.
func CUDACount() (int, error) {
	drv, err := cuda.Open()
	if err != nil {
		return 0, fmt.Errorf("device: count GPUs: %w", err)
	}
	n, err := drv.DeviceCount()
	if err = errors.Join(err, drv.Close()); err != nil {
		return 0, fmt.Errorf("device: count GPUs: %w", err)
	}
	return n, nil
}

// Context is the primary context, for this module's engines. It is the device's: Close releases it.
func (d *CUDADevice) Context() *cuda.Context { return d.ctx }

// Kind is CUDAKind.
func (*CUDADevice) Kind() Kind { return CUDAKind }

// Index is the ordinal.
func (d *CUDADevice) Index() int { return d.ctx.Device().Ordinal() }

// String is like "cuda:3".
func (d *CUDADevice) String() string { return d.ctx.Device().String() }

// Name is the product's name.
func (d *CUDADevice) Name() (string, error) { return d.ctx.Device().Name() }

// UUID identifies the GPU across processes and in tools, as in "GPU-4d1f9a3c-...".
func (d *CUDADevice) UUID() (string, error) {
	u, err := d.ctx.Device().UUID()
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:]), nil
}

// NewStream makes a stream that neither waits for the legacy default stream nor makes it wait.
func (d *CUDADevice) NewStream() (Stream, error) {
	h, err := d.ctx.NewStream(0)
	if err != nil {
		return nil, fmt.Errorf("device: new stream on %v: %w", d, err)
	}
	return &CUDAStream{dev: d, h: h, owned: true}, nil
}

// WrapStream wraps a CUstream or cudaStream_t of another library, such as torch's current stream, which outlives the wrapper;
// 0 is the legacy default stream. Close waits for the marks that Record made and leaves the stream alone. A later call that is
// ordered behind a closed wrapper, such as a communicator's next call on another stream, waits for the stream, which must
// still exist. A caller that uses a stream often keeps its wrapper. A stream of another GPU is an error, and so is the
// per-thread default stream.
func (d *CUDADevice) WrapStream(handle uintptr) (*CUDAStream, error) {
	const perThread = 2 // CU_STREAM_PER_THREAD
	c, err := d.ctx.StreamContext(cuda.Stream(handle))
	switch {
	case handle == perThread:
		err = errors.New("the per-thread default stream is another one on every thread")
	case err == nil && c != d.ctx.Handle():
		err = errors.New("it belongs to another device or context")
	}
	if err != nil {
		return nil, fmt.Errorf("device: wrap stream %#x on %v: %w", handle, d, err)
	}
	return &CUDAStream{dev: d, h: cuda.Stream(handle)}, nil
}

// Close gives up the context. Streams, heaps and engines of the device are closed before. It is idempotent.
func (d *CUDADevice) Close() error {
	d.once.Do(func() {
		if err := errors.Join(d.ctx.Close(), d.drv.Close()); err != nil {
			d.err = fmt.Errorf("device: close cuda: %w", err)
		}
	})
	return d.err
}
