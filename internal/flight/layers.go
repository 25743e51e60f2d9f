package flight

import "slices"

// Layer is what dispatches of one layer have routed. Ranks are those of the group that met.
type Layer struct {
	// Name is empty for dispatchers that have none: together they are one layer, without Tokens.
	Name string
	// Tokens counts the choices of this rank's tokens, by expert.
	Tokens []uint64
	// Owners are the ranks that have each expert now.
	Owners [][]int
	// Routed are the choices by the rank that had the expert; copies of an expert share them. Nil where nobody has looked.
	Routed []float64
	// Overflows counts the dispatches that did not fit, by the rank that had no room.
	Overflows []uint64
}

// add adds what another dispatcher of the layer has routed.
func (l *Layer) add(m *Layer) {
	l.Tokens, l.Routed, l.Overflows = sum(l.Tokens, m.Tokens), sum(l.Routed, m.Routed), sum(l.Overflows, m.Overflows)
	if len(m.Owners) > 0 {
		l.Owners = m.Owners
	}
}

// sum adds b to a, element by element, and returns a, which is longer then if b was.
func sum[N uint64 | float64](a, b []N) []N {
	if more := len(b) - len(a); more > 0 {
		a = append(a, make([]N, more)...)
	}
	for i, n := range b {
		a[i] += n
	}
	return a
}

// layer adds m to the layer of its name among all.
func layer(all []Layer, m *Layer) []Layer {
	at := slices.IndexFunc(all, func(l Layer) bool { return l.Name == m.Name })
	if at < 0 {
		at, all = len(all), append(all, Layer{Name: m.Name})
	}
	all[at].add(m)
	return all
}

// Staging is a reason why messages of a call go through staging, though they are so large that another way would be faster.
type Staging uint8

// The reasons. NotStaged is none.
const (
	NotStaged Staging = iota
	StagedInput
	StagedOutput
	StagedUnreadable
	StagedAlgorithm
	stagings
)

// String is the name of the reason, which is the value of a label.
func (s Staging) String() string {
	return [...]string{"", "input", "output", "unreadable", "algorithm"}[s]
}

// Stagings say in words what the names mean.
var Stagings = map[string]string{
	StagedInput.String():      "the input is not in the symmetric heap",
	StagedOutput.String():     "the output is not in the symmetric heap",
	StagedUnreadable.String(): "the output is not in the symmetric heap, and this process cannot read the memory of another",
	StagedAlgorithm.String():  "the algorithm stages its input or output",
}

// Staged are the calls of a kind that went through staging, by reason.
func (k *Kind) Staged() map[string]uint64 {
	var by map[string]uint64
	for s, n := range k.staged {
		if n > 0 {
			if by == nil {
				by = map[string]uint64{}
			}
			by[Staging(s).String()] = n
		}
	}
	return by
}

// Stage notes a reason that an engine finds in a call.
func (t Ticket) Stage(why Staging) {
	if t.u == nil {
		return
	}
	r := t.u.c.r
	r.mu.Lock()
	t.u.k.staged[why]++
	r.mu.Unlock()
}

// Of is a layer of a group, whose ranks are members of a group of size ranks that met, with the numbers of those.
func (l Layer) Of(members []int, size int) Layer {
	routed, overflows := make([]float64, size), make([]uint64, size)
	for p, n := range l.Routed {
		routed[members[p]] = n
	}
	for p, n := range l.Overflows {
		overflows[members[p]] = n
	}
	owners := make([][]int, len(l.Owners))
	for e, at := range l.Owners {
		for _, p := range at {
			owners[e] = append(owners[e], members[p])
		}
	}
	if l.Owners = owners; l.Routed != nil {
		l.Routed = routed
	}
	if l.Overflows != nil {
		l.Overflows = overflows
	}
	return l
}

// On notes the GPU that the rank works on, such as cuda:0.
func (r *Rank) On(gpu string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.gpu = gpu
}
