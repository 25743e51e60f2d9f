package memory

import (
	"slices"

	"github.com/switchyard-moe/switchyard/device"
)

// fence says that memory is in use until an event of the stream that freed it.
type fence struct {
	stream device.Stream
	event  device.Event
	at     uint64 // grows with every free: of two fences of one stream the later covers both
}

// maxFences is the number of streams whose fences one piece carries. The next stream that frees into the
// piece waits for the others, so a heap does not remember every stream it has seen.
const maxFences = 16

// fences holds, for every piece of a pool, the events that its next user must wait for. The pool chooses
// pieces without a look at them (M1).
type fences struct {
	sets [][]fence // by piece
	last uint64
}

func (f *fences) room(i int32) {
	for int(i) >= len(f.sets) {
		f.sets = append(f.sets, nil)
	}
}

// split gives the piece that was cut off the fences of the whole.
func (f *fences) split(i, rest int32) {
	f.room(max(i, rest))
	if rest != 0 {
		f.sets[rest] = append(f.sets[rest][:0], f.sets[i]...)
	}
}

// clear forgets the fences of piece i.
func (f *fences) clear(i int32) {
	f.room(i)
	clear(f.sets[i])
	f.sets[i] = f.sets[i][:0]
}

// add makes the next user of piece i wait for e.
func (f *fences) add(i int32, s device.Stream, e device.Event) {
	f.room(i)
	f.last++
	f.put(i, fence{s, e, f.last})
}

func (f *fences) put(i int32, n fence) {
	for k := range f.sets[i] {
		if old := &f.sets[i][k]; old.stream == n.stream {
			if old.at < n.at {
				*old = n
			}
			return
		}
	}
	f.sets[i] = append(f.sets[i], n)
}

// join moves the fences of piece gone to piece i.
func (f *fences) join(i, gone int32) {
	f.room(max(i, gone))
	for _, n := range f.sets[gone] {
		f.put(i, n)
	}
	f.clear(gone)
}

// condense replaces the fences of piece i by one of s, once there are too many.
func (f *fences) condense(i int32, s device.Stream) error {
	if len(f.sets[i]) <= maxFences {
		return nil
	}
	if _, err := await(f.sets[i], s); err != nil {
		return err
	}
	e, err := s.Record()
	if err != nil {
		return err
	}
	f.clear(i)
	f.add(i, s, e)
	return nil
}

// await makes s, or the caller when s is nil, wait for the fences of other streams. It reports how
// many those were.
func await(set []fence, s device.Stream) (n int, err error) {
	for _, f := range set {
		switch {
		case s == nil:
			err = f.event.Wait()
		case f.stream != s:
			err = s.Wait(f.event)
		default:
			continue
		}
		if err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

// of is a copy of the fences of piece i.
func (f *fences) of(i int32) []fence {
	f.room(i)
	if len(f.sets[i]) == 0 {
		return nil
	}
	return slices.Clone(f.sets[i])
}
