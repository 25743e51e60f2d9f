package cuda

import (
	"errors"
	"fmt"
	"sync"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/cuda/internal/fatbin"
)

// Engine launches the kernels of one rank on one symmetric heap of GPU memory. Its methods may be called from several
// goroutines. It is a kernels.Engine.
type Engine struct {
	ctx             *cuda.Context
	space           kernels.Space
	sharers         int
	why             func() error
	code            *fatbin.Older    // that the driver loads in place of the fatbins; nil: the fatbins
	flags           cuda.LaunchFlags // of every kernel
	cycles          float64          // of a multiprocessor in a nanosecond
	multiprocessors int
	maxShared       int       // dynamic shared memory that a block can ask for
	crossing        *Crossing // nil on one host

	mu      sync.Mutex
	modules []cuda.Module
	named   map[string]cuda.Module // those of the library, by name
	kernels []any                  // those of each family that loadOnce has loaded, of a type of their own

	streamsMu sync.Mutex
	streams   []cuda.Stream // that nobody has

	portsMu     sync.Mutex // never held while the driver is called
	ports       map[*port]bool
	interrupted bool
}

// New makes the engine of space.Rank on ctx's device. sharers is how many ranks of the heap run on the device, this one
// included: their kernels wait for each other, so all of them must fit on it at once. Each rank gets its share of the
// multiprocessors, and no kernel is set up before its predecessor has ended. why says for which reason the abort word was
// set. The heap and ctx outlive the engine; Close releases it.
func New(ctx *cuda.Context, space kernels.Space, sharers int, why func() error) (*Engine, error) {
	e := &Engine{ctx: ctx, space: space, sharers: max(sharers, 1), why: why, flags: cuda.RemoteDomain}
	var major, kilohertz int
	for _, a := range []struct {
		which cuda.Attribute
		value *int
	}{
		{cuda.ComputeMajor, &major}, {cuda.ClockRate, &kilohertz}, {cuda.Multiprocessors, &e.multiprocessors},
		{cuda.SharedBytesPerBlockOptIn, &e.maxShared},
	} {
		var err error
		if *a.value, err = ctx.Device().Attribute(a.which); err != nil {
			return nil, fmt.Errorf("kernels: cuda engine: %w", err)
		}
	}
	var err error
	if e.code, err = codeFor(ctx.Device()); err != nil {
		return nil, fmt.Errorf("kernels: cuda engine: %w", err)
	}
	e.cycles = float64(kilohertz) / 1e6
	if major >= 9 && e.sharers == 1 {
		e.flags |= cuda.Programmatic
	}
	return e, nil
}

// cyclesFor is in how many cycles bytes cross a link at a rate, in bytes a nanosecond.
func (e *Engine) cyclesFor(bytes int64, rate float64) uint32 {
	return uint32(min(float64(bytes)/rate*e.cycles, 1<<24))
}

// enter and leave keep the ports that Interrupt stops.
func (e *Engine) enter(p *port) {
	e.portsMu.Lock()
	defer e.portsMu.Unlock()
	if e.ports == nil {
		e.ports = make(map[*port]bool)
	}
	e.ports[p] = true
	if e.interrupted {
		p.stop()
	}
}

func (e *Engine) leave(p *port) {
	e.portsMu.Lock()
	defer e.portsMu.Unlock()
	delete(e.ports, p)
}

// Interrupt stops all ports, those that are opened later too.
func (e *Engine) Interrupt() {
	e.portsMu.Lock()
	defer e.portsMu.Unlock()
	e.interrupted = true
	for p := range e.ports {
		p.stop()
	}
}

// family is what the engine has for one communicator: the layout of its control block, and how its operations are put
// together.
type family interface {
	// defaults fills in what the bounds leave open, for a rank that has that many multiprocessors and may take free of them where nothing is said.
	defaults(multiprocessors, free int)
	// members is the number of ranks in the bounds.
	members() int
	// check says what else of the bounds the engine cannot do. The methods below come after it.
	check() error
	layout() kernels.Layout
	// controls are the places of the struct sw_controls that launches leave faults in; offset is that of the control block.
	controls(offset int64) []int64
	// fault is what a record that is the family's own says; me is this rank. nil where it is none.
	fault(f *faultWords, me int) error
	// hit is a fault that was found in the structs sw_control of these numbers.
	hit(err error, controls []int) error
	// add appends op to p's batch: stream 0 is the caller's, stream 1 the port's. p.mu is held. errForeign is the error of an operation of
	// another family.
	add(p *port, op kernels.Operation) error
	// load makes sure that the engine has the family's kernels. e.mu is held.
	load(e *Engine) error
}

// common is what most families share. A family embeds it, and has methods of its own where it differs.
type common struct{}

func (common) defaults(int, int)             {}
func (common) controls(offset int64) []int64 { return []int64{offset} }
func (common) hit(err error, _ []int) error  { return err }

var errForeign = errors.New("an operation of another family")

// families is the table of families, one line each: a function that makes a family of bounds, nil if they belong to another.
func families() []func(f kernels.Family, offset int64) family {
	return []func(f kernels.Family, offset int64) family{
		of(openExchanges),
		of(newReductions),
		of(newDispatches),
		of(newPoints),
		of(newDevices),
	}
}

func of[B kernels.Family, F family](open func(bounds B, offset int64) F) func(kernels.Family, int64) family {
	return func(f kernels.Family, offset int64) family {
		if b, ok := f.(B); ok {
			return open(b, offset)
		}
		return nil
	}
}

// familyOf is the engine's family of the bounds f, nil if it has none. offset is that of the control block.
func familyOf(f kernels.Family, offset int64) family {
	for _, open := range families() {
		if x := open(f, offset); x != nil {
			return x
		}
	}
	return nil
}

// checked is the family of bounds that the engine can do.
func (e *Engine) checked(f kernels.Family, offset int64) (family, error) {
	x := familyOf(f, offset)
	switch {
	case x == nil:
		return nil, fmt.Errorf("kernels: the CUDA engine has no %s", f.Family())
	case e.space.Size > maxRanks:
		return nil, fmt.Errorf("kernels: %d ranks: the CUDA engine serves 1 to %d", e.space.Size, maxRanks)
	case x.members() != e.space.Size:
		return nil, fmt.Errorf("kernels: %s: bounds of %d ranks on a heap of %d", f.Family(), x.members(), e.space.Size)
	}
	return x, x.check()
}

// Defaults are those of GPUs. An Engine that is not open has them too.
func (e *Engine) Defaults(f kernels.Family) {
	if x := familyOf(f, 0); x != nil {
		x.defaults(e.multiprocessors/max(e.sharers, 1), e.free())
	}
}

// forOthers are the multiprocessors that a call leaves to others, unless its caller says how many it takes: kernels that wait for each
// other's peers have to run at the same time, in whatever order each rank began them (X10). NCCL's kernels take up to 32 blocks, each most
// of a multiprocessor; on 2 H200 an all-reduce took 24.
const forOthers = 36

// free is how many multiprocessors a call takes at most where nothing is said. Ranks that share a GPU have as many each.
func (e *Engine) free() int { return max((e.multiprocessors-forOthers)/max(e.sharers, 1), 1) }

// Layout tells the size of a communicator's control block.
func (e *Engine) Layout(f kernels.Family) (kernels.Layout, error) {
	x, err := e.checked(f, 0)
	if err != nil {
		return kernels.Layout{}, err
	}
	return x.layout(), nil
}

// Open makes a port. It loads the family's kernels, which can wait for running ones.
func (e *Engine) Open(f kernels.Family, offset int64) (kernels.Port, error) {
	x, err := e.checked(f, offset)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	err = x.load(e)
	e.mu.Unlock()
	if err != nil {
		return nil, fmt.Errorf("kernels: load %s: %w", f.Family(), err)
	}
	p, err := newPort(e, x, f.Family(), offset)
	if err != nil {
		return nil, err
	}
	if o, ok := x.(interface {
		opened(p *port) (kernels.Port, error)
	}); ok {
		return o.opened(p)
	}
	return p, nil
}

// Close unloads the kernels and ends the streams. Nothing of the engine may be running. It is idempotent.
func (e *Engine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := e.closeStreams()
	for _, m := range e.modules {
		err = errors.Join(err, e.ctx.UnloadModule(m))
	}
	e.modules, e.named, e.kernels = nil, nil, nil
	return err
}

// loadOnce is the kernels of type K, which are loaded for the first family that wants them. e.mu is held.
func loadOnce[K any, P interface {
	*K
	load(e *Engine) error
}](e *Engine) (P, error) {
	for _, held := range e.kernels {
		if k, ok := held.(P); ok {
			return k, nil
		}
	}
	k := P(new(K))
	if err := k.load(e); err != nil {
		return nil, err
	}
	e.kernels = append(e.kernels, k)
	return k, nil
}

// entry is a kernel of a module, by its name.
type entry struct {
	name string
	f    *cuda.Function
}

// loadModule finds kernels in the module of this name, which it loads once. e.mu is held.
func (e *Engine) loadModule(name string, kernels ...entry) (err error) {
	m, ok := e.named[name]
	if !ok {
		image, err := imageOf(e.code, name)
		if err != nil {
			return err
		}
		if m, err = e.ctx.LoadModule(image); err != nil {
			return err
		}
		if e.named == nil {
			e.named = make(map[string]cuda.Module)
		}
		e.modules, e.named[name] = append(e.modules, m), m
	}
	for _, k := range kernels {
		if *k.f, err = e.ctx.Function(m, k.name); err != nil {
			return err
		}
	}
	return nil
}

// blocks is how many blocks of f this rank can have running at once.
func (e *Engine) blocks(f cuda.Function, threads, shared int) (int, error) {
	n, err := e.ctx.BlocksPerMultiprocessor(f, threads, shared)
	if err != nil {
		return 0, err
	}
	if n = n * e.multiprocessors / e.sharers; n == 0 {
		return 0, fmt.Errorf("%d ranks do not fit on %v", e.sharers, e.ctx.Device())
	}
	return n, nil
}
