package plan

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/curve"
)

// ErrInvalid is the cause of every error of this package but those of files.
var ErrInvalid = comm.ErrInvalid

// The bounds of a plan.
const (
	MaxRanks      = 64
	MaxChunks     = 1024 // of one buffer
	MaxSemaphores = 64   // from one rank to another
	MaxSteps      = 1 << 14
)

// Collective is what a plan does, by the names of kernels.Collective.
type Collective string

// The collectives that plans can do.
const (
	AllReduce     Collective = "all-reduce"
	ReduceScatter Collective = "reduce-scatter"
	AllGather     Collective = "all-gather"
	AllToAll      Collective = "all-to-all"
)

// Reduces reports whether the collective combines elements.
func (c Collective) Reduces() bool { return c == AllReduce || c == ReduceScatter }

// blocks is how many blocks the input and the output have.
func (c Collective) blocks(ranks int) (input, output int, ok bool) {
	switch c {
	case AllReduce:
		return 1, 1, true
	case ReduceScatter:
		return ranks, 1, true
	case AllGather:
		return 1, ranks, true
	case AllToAll:
		return ranks, ranks, true
	}
	return 0, 0, false
}

// Kind is what a step does.
type Kind string

// The kinds of steps.
const (
	Put    Kind = "put"
	Copy   Kind = "copy"
	Reduce Kind = "reduce"
	Signal Kind = "signal"
	Wait   Kind = "wait"
)

// Buffer is one of a rank's buffers.
type Buffer uint8

// The buffers.
const (
	Input Buffer = iota
	Output
	Scratch
	Buffers // how many there are
)

// String is the buffer's name in files.
func (b Buffer) String() string { return [...]string{"input", "output", "scratch"}[b] }

// Place is one chunk of a buffer, of the rank of the step if Rank is negative.
type Place struct {
	Buffer Buffer
	Chunk  int
	Rank   int
}

// At is a place of the step's own rank.
func At(b Buffer, chunk int) Place { return Place{b, chunk, -1} }

// Of is the place at another rank.
func (p Place) Of(rank int) Place { p.Rank = rank; return p }

// String is the place as files have it.
func (p Place) String() string {
	if p.Rank < 0 {
		return fmt.Sprintf("%v:%d", p.Buffer, p.Chunk)
	}
	return fmt.Sprintf("%v:%d@%d", p.Buffer, p.Chunk, p.Rank)
}

// MarshalText is String.
func (p Place) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText is the inverse of MarshalText.
func (p *Place) UnmarshalText(text []byte) error {
	name, rest, ok := strings.Cut(string(text), ":")
	chunk, rank, remote := strings.Cut(rest, "@")
	*p = Place{Buffer: Buffers, Rank: -1}
	for b := range Buffers {
		if b.String() == name {
			p.Buffer = b
		}
	}
	var err error
	if p.Chunk, err = strconv.Atoi(chunk); ok && err == nil && remote {
		if p.Rank, err = strconv.Atoi(rank); p.Rank < 0 {
			ok = false
		}
	}
	if !ok || err != nil || p.Buffer == Buffers || p.Chunk < 0 {
		return invalid("place %q, want a buffer and a chunk as in input:0, scratch:3 or output:1@2", text)
	}
	return nil
}

// Step is one step of a rank.
type Step struct {
	Do   Kind    `json:"do"`
	From []Place `json:"from,omitempty"` // one, but two or more of a reduction, combined in this order
	To   *Place  `json:"to,omitempty"`
	// Peer and Semaphore are those of signals and waits.
	Peer      *int `json:"peer,omitempty"`
	Semaphore int  `json:"semaphore,omitempty"`
}

// String is the step in messages.
func (s Step) String() string {
	switch {
	case s.Peer != nil && s.Do == Signal:
		return fmt.Sprintf("signal to rank %d, semaphore %d", *s.Peer, s.Semaphore)
	case s.Peer != nil && s.Do == Wait:
		return fmt.Sprintf("wait for rank %d, semaphore %d", *s.Peer, s.Semaphore)
	case s.To == nil:
		return string(s.Do)
	}
	var from []string
	for _, p := range s.From {
		from = append(from, p.String())
	}
	return fmt.Sprintf("%s of %s to %v", s.Do, strings.Join(from, ", "), *s.To)
}

// Plan is a collective as steps.
type Plan struct {
	Name       string     `json:"name"`
	Collective Collective `json:"collective"`
	Ranks      int        `json:"ranks"`
	// Chunks is how many chunks a block has, Scratch how many of such chunks a rank has for what is neither input nor output.
	Chunks  int `json:"chunks"`
	Scratch int `json:"scratch,omitempty"`
	// Bytes and Microseconds are the time of calls by the length of a rank's input, ascending, by which the plan is compared with other
	// ways; between two sizes the time is interpolated, and beyond them it is that of the nearest size by its bytes. Without them the plan
	// runs only where it is asked for by name, or where nothing else does its collective.
	Bytes        []int64   `json:"bytes,omitempty"`
	Microseconds []float64 `json:"us,omitempty"`
	// Programs has the steps of each rank.
	Programs [][]Step `json:"programs"`
}

func invalid(format string, args ...any) error { return comm.Invalid("plan", format, args...) }

// Read reads a plan and checks it.
func Read(r io.Reader) (*Checked, error) {
	p := new(Plan)
	d := json.NewDecoder(r)
	d.DisallowUnknownFields()
	if err := d.Decode(p); err != nil {
		return nil, fmt.Errorf("plan: read: %w", err)
	}
	return Check(p)
}

// Load reads a plan from a file and checks it.
func Load(path string) (*Checked, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("plan: load: %w", err)
	}
	c, err := Read(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("%w (%s)", err, path)
	}
	return c, nil
}

// Write writes the plan as JSON, a line a step.
func (p *Plan) Write(w io.Writer) error {
	head := *p
	head.Programs = nil
	text, err := json.MarshalIndent(head, "", "  ")
	if err != nil {
		return fmt.Errorf("plan: write: %w", err)
	}
	var b bytes.Buffer
	b.Write(bytes.TrimSuffix(text, []byte("null\n}")))
	b.WriteString("[")
	for rank, steps := range p.Programs {
		b.WriteString([]string{",\n    [", "\n    ["}[btoi(rank == 0)])
		for i, s := range steps {
			line, err := json.Marshal(s)
			if err != nil {
				return fmt.Errorf("plan: write: %w", err)
			}
			b.WriteString([]string{",\n      ", "\n      "}[btoi(i == 0)])
			b.Write(line)
		}
		b.WriteString("\n    ]")
	}
	b.WriteString("\n  ]\n}\n")
	if _, err = w.Write(b.Bytes()); err != nil {
		return fmt.Errorf("plan: write: %w", err)
	}
	return nil
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// chunks is how many chunks a buffer of a rank has.
func (p *Plan) chunks(b Buffer) int {
	in, out, _ := p.Collective.blocks(p.Ranks)
	return [...]int{in * p.Chunks, out * p.Chunks, p.Scratch}[b]
}

// digest tells plans apart.
func (p *Plan) digest() (uint64, error) {
	text, err := json.Marshal(p)
	if err != nil {
		return 0, fmt.Errorf("plan: %w", err)
	}
	return xxhash.Sum64(text), nil
}

// Estimate is the time of a call whose ranks have an input of n bytes each, in microseconds; +Inf without figures.
func (p *Plan) Estimate(n int64) float64 {
	if len(p.Bytes) == 0 {
		return math.Inf(1)
	}
	return curve.Between(p.Bytes, p.Microseconds, n)
}

// Validate checks all that can be said of each step alone. Check does that, too.
func (p *Plan) Validate() error {
	if _, _, ok := p.Collective.blocks(p.Ranks); !ok {
		return invalid("%q: collective %q, want %q, %q, %q or %q", p.Name, p.Collective, AllReduce, ReduceScatter, AllGather, AllToAll)
	}
	switch {
	case p.Name == "":
		return invalid("the plan has no name")
	case p.Ranks < 2 || p.Ranks > MaxRanks:
		return invalid("%q: %d ranks, want 2 to %d", p.Name, p.Ranks, MaxRanks)
	case len(p.Programs) != p.Ranks:
		return invalid("%q: %d programs for %d ranks", p.Name, len(p.Programs), p.Ranks)
	case len(p.Bytes) != len(p.Microseconds):
		return invalid("%q: %d sizes and %d times", p.Name, len(p.Bytes), len(p.Microseconds))
	case p.Chunks < 1 || p.Chunks > MaxChunks:
		return invalid("%q: %d chunks, want 1 to %d", p.Name, p.Chunks, MaxChunks)
	}
	for b := range Buffers {
		if n := p.chunks(b); n < 0 || n > MaxChunks {
			return invalid("%q: %d chunks of %v, want 0 to %d", p.Name, n, b, MaxChunks)
		}
	}
	for i, n := range p.Bytes {
		if us := p.Microseconds[i]; n <= 0 || i > 0 && n <= p.Bytes[i-1] || !(us > 0) || math.IsInf(us, 1) {
			return invalid("%q: %v us for %d bytes at place %d", p.Name, us, n, i)
		}
	}
	for rank, steps := range p.Programs {
		if len(steps) > MaxSteps {
			return invalid("%q: rank %d has %d steps, want at most %d", p.Name, rank, len(steps), MaxSteps)
		}
		for i, s := range steps {
			if err := p.step(rank, s); err != nil {
				return fmt.Errorf("%w (plan %q, rank %d, step %d)", err, p.Name, rank, i)
			}
		}
	}
	return nil
}

// step checks one step.
func (p *Plan) step(rank int, s Step) error {
	switch s.Do {
	case Signal, Wait:
		switch {
		case s.Peer == nil || len(s.From) > 0 || s.To != nil:
			return invalid("a %s has a peer and no places", s.Do)
		case *s.Peer < 0 || *s.Peer >= p.Ranks || *s.Peer == rank:
			return invalid("a %s of rank %d has peer %d, want another of %d ranks", s.Do, rank, *s.Peer, p.Ranks)
		case s.Semaphore < 0 || s.Semaphore >= MaxSemaphores:
			return invalid("semaphore %d, want 0 to %d", s.Semaphore, MaxSemaphores-1)
		}
		return nil
	case Put, Copy, Reduce:
	default:
		return invalid("a step that does %q, want put, copy, reduce, signal or wait", s.Do)
	}
	switch {
	case s.Peer != nil || s.To == nil || s.Semaphore != 0:
		return invalid("a %s has places and neither peer nor semaphore", s.Do)
	case s.Do == Reduce && len(s.From) < 2 || s.Do != Reduce && len(s.From) != 1:
		return invalid("a %s from %d places", s.Do, len(s.From))
	case s.Do == Reduce && !p.Collective.Reduces():
		return invalid("a reduce in an %s", p.Collective)
	case s.To.Buffer == Input:
		return invalid("a %s writes %v, and nothing writes an input", s.Do, *s.To)
	case s.Do == Put && s.To.Rank < 0, s.Do != Put && s.To.Rank >= 0:
		return invalid("a %s to %v: puts write another rank, copies and reductions their own", s.Do, *s.To)
	}
	for i, at := range append(slices.Clip(s.From), *s.To) {
		switch {
		case at.Buffer >= Buffers || at.Chunk < 0 || at.Chunk >= p.chunks(at.Buffer):
			return invalid("a %s with %v, of which there are %d chunks", s.Do, at, p.chunks(at.Buffer))
		case at.Rank >= p.Ranks || at.Rank == rank:
			return invalid("a %s of rank %d with %v, want another of %d ranks behind the @", s.Do, rank, at, p.Ranks)
		case s.Do == Put && i == 0 && at.Rank >= 0:
			return invalid("a put from %v: it reads its own rank", at)
		}
	}
	return nil
}
