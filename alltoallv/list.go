package alltoallv

import (
	"encoding/json"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/curve"
)

// List is an Algorithm as data, for programs that have numbers where Go has functions. It is for groups of as many ranks as there are
// orders.
type List struct {
	Name string
	// Orders has the order of each rank, as Algorithm.Order.
	Orders [][]int
	// Window, Staged and ChunkBytes are those of every Schedule.
	Window     int
	Staged     bool
	ChunkBytes int64
	// Bytes and Microseconds are the time of exchanges by the bytes that a rank sends or receives, whichever are more, its own part included.
	// Between two sizes the time is interpolated, and beyond them it is that of the nearest size by its bytes.
	Bytes        []int64
	Microseconds []float64
}

// Check says what is wrong with the list. New does that, too.
func (l *List) Check() error {
	if err := l.validate(); err != nil {
		return err
	}
	_, err := newRegistry(&Options{Algorithms: []Algorithm{l.Algorithm()}}, 0, len(l.Orders), device.HostKind)
	return err
}

// Algorithm is the list as an algorithm. The list is not changed any more.
func (l *List) Algorithm() Algorithm { return listed{l} }

func (l *List) validate() error {
	times := curve.Measured{Sizes: l.Bytes, Microseconds: l.Microseconds}
	switch err := times.Validate("bytes"); {
	case len(l.Orders) < 2:
		return invalid("algorithm %q has orders of %d ranks, want at least 2", l.Name, len(l.Orders))
	case l.Window < 0 || l.Window >= len(l.Orders):
		return invalid("algorithm %q has a window of %d peers, want 0 to %d", l.Name, l.Window, len(l.Orders)-1)
	case l.ChunkBytes < 0:
		return invalid("algorithm %q has chunks of %d bytes, want 0 or more", l.Name, l.ChunkBytes)
	case err != nil:
		return invalid("algorithm %q: %v", l.Name, err)
	}
	return nil
}

// listed makes a list an Algorithm, whose names would be those of the fields.
type listed struct{ list *List }

func (a listed) Name() string { return a.list.Name }

func (a listed) Order(rank, size int) []int {
	if size != len(a.list.Orders) {
		return nil
	}
	return a.list.Orders[rank]
}

func (a listed) Schedule(*Traffic) Schedule {
	return Schedule{Window: a.list.Window, Staged: a.list.Staged, ChunkBytes: a.list.ChunkBytes}
}

func (a listed) Cost(t *Traffic) (us float64, why string) {
	var sent, received int64
	for r := range t.SendBytes {
		sent, received = sent+t.SendBytes[r], received+t.RecvBytes[r]
	}
	return curve.Between(a.list.Bytes, a.list.Microseconds, max(sent, received)), "the time that its list has"
}

// digested is what two ranks' algorithms of one name have to have in common: the orders of all ranks, and all of a list.
func digested(a Algorithm, size int) ([]byte, error) {
	if l, ok := a.(listed); ok {
		return json.Marshal(l.list)
	}
	orders := make([][]int, size)
	for rank := range orders {
		orders[rank] = a.Order(rank, size)
	}
	return json.Marshal(orders)
}
