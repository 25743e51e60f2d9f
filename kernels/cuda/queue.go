package cuda

import (
	"sync/atomic"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/internal/shm"
)

// Queue is a rank's end, on the host, of a queue by which its kernels have bytes put to ranks of other hosts. One goroutine reads it.
type Queue struct {
	mem   []byte
	slots uint64
	read  uint64

	launched atomic.Uint64
	replays  atomic.Bool
}

// Put is what a kernel has asked for: bytes of this rank's segment of the rail, in which Source is their place, for a place of another rank,
// and the word there that counts them.
type Put struct {
	Peer                         int
	Place, Source, Bytes, Signal int64
}

// QueueBytes is the memory of a queue with room for that many descriptors.
func QueueBytes(slots int) int64 { return queueHeadBytes + int64(slots)*putBytes }

// NewQueue is the queue in mem, QueueBytes(slots) of pinned memory that kernels reach, at a multiple of 64 and zero.
func NewQueue(mem []byte, slots int) *Queue {
	return &Queue{mem: mem[:QueueBytes(slots)], slots: uint64(slots)}
}

// Next is the next put, if there is one.
func (q *Queue) Next() (p Put, ok bool) {
	at := queueHeadBytes + int64(q.read%q.slots)*putBytes
	if shm.Word(q.mem, at+putNumber).Load() != q.read+1 {
		return Put{}, false
	}
	q.read++
	d := cuda.StructOf[putWords](q.mem[at : at+putBytes])
	return Put{Peer: int(d.peer), Place: d.place, Source: d.source, Bytes: d.bytes, Signal: d.signal}, true
}

// Read is how many puts Next has returned.
func (q *Queue) Read() uint64 { return q.read }

// Done tells kernels that the bytes of that many puts, from the first on, may be written again.
func (q *Queue) Done(puts uint64) { shm.Word(q.mem, queueDone).Store(puts) }

// Launched says that a kernel has been launched that may ask for puts.
func (q *Queue) Launched() { q.launched.Add(1) }

// Captured says that such a kernel is in a graph, of whose launches nobody tells.
func (q *Queue) Captured() { q.replays.Store(true) }

// Busy reports whether a kernel may ask for puts now.
func (q *Queue) Busy() bool {
	return q.replays.Load() || shm.Word(q.mem, queueRan).Load() < q.launched.Load()
}
