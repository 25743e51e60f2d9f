package cuda

import (
	"structs"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// RingTrial is the argument of the kernel of rings.cu, for a rank that sends to one other.
type RingTrial struct {
	_ structs.HostLayout

	world        worldWords
	rail         railWords
	Peers        uint64
	Chunks, Seed uint64
	Wrong        uint64
	out, in      [trialRings]ringWords
}

const trialRings = 8

// RingPlan is how two ranks trade chunks: each has the words and slots of all blocks' rings at equal places.
type RingPlan struct {
	Blocks, Slots, Gives int
	SlotBytes            int64
}

const ringWordsBytes = 4096 // in front of a segment of the rail

// Segment is how much of a segment of the rail the plan takes.
func (p RingPlan) Segment() int64 {
	return ringWordsBytes + 2*int64(p.Blocks*p.Slots)*p.SlotBytes
}

// RingMemory is the memory of a rank, as the kernel has it.
type RingMemory struct {
	Control, State, Queue, Next, Segment, Fault, Wrong uintptr
	Slots                                              int // of the queue
}

// NewRingTrial is what a rank launches. Both of them name each other and themselves by these numbers.
func (p RingPlan) NewRingTrial(rank, peer int, m RingMemory, chunks int, timeout time.Duration) *RingTrial {
	space := kernels.Space{Base: m.Control, Rank: rank, Size: 1}
	t := &RingTrial{world: worldOf(&space, kernels.HeaderBytes, m.Fault, timeout), Peers: 1, Chunks: uint64(chunks), Wrong: uint64(m.Wrong)}
	t.rail = railWords{queue: queueWords{head: uint64(m.Queue), next: uint64(m.Next), slots: uint64(m.Slots)}, segment: uint64(m.Segment)}
	for b := range p.Blocks {
		slots := ringWordsBytes + int64(b*p.Slots)*p.SlotBytes
		r := ringWords{
			slots: slots, sources: slots + int64(p.Blocks*p.Slots)*p.SlotBytes, landed: int64(64 * b), given: int64(64 * (trialRings + b)),
			state: uint64(m.State) + uint64(8*b), slotBytes: p.SlotBytes, slotCount: uint64(p.Slots), gives: uint64(p.Gives), peer: uint64(peer), name: uint64(peer),
		}
		t.out[b] = r
		r.state += 8 * trialRings
		t.in[b] = r
	}
	return t
}

// Args are the bytes of the argument.
func (t *RingTrial) Args() []byte { return cuda.BytesOf(t) }

// FaultOf is the kind and the peer of a fault record, and Stop has kernels give up.
func FaultOf(b []byte) (kind, peer uint32) {
	return atomic.LoadUint32(&record(b).kind), record(b).peer
}

// Stop is what Interrupt does to the record of a port.
func Stop(b []byte) { atomic.StoreUint64(&record(b).stop, 1) }

// Kinds of a fault.
const (
	FaultTimeout = faultTimeout
	FaultAborted = faultAborted
)

// RingImage is the code of rings.cu for a device.
func RingImage(d *cuda.Device) ([]byte, error) {
	code, err := codeFor(d)
	if err != nil {
		return nil, err
	}
	return imageOf(code, "rings")
}
