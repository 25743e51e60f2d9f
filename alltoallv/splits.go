package alltoallv

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/cespare/xxhash/v2"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/memory"
)

// Conditions that callers tell apart with errors.Is. They are those of package comm.
var (
	// ErrInvalid is the cause of every error about arguments. Nothing has been enqueued then.
	ErrInvalid = comm.ErrInvalid
	// ErrClosed is returned by calls on a closed Exchanger.
	ErrClosed = comm.ErrClosed
)

func invalid(format string, args ...any) error {
	return comm.Invalid("alltoallv", format, args...)
}

// Splits says how the rows of the two buffers are divided among the ranks. All slices have one entry a rank and count
// elements of ElemSize bytes. They are read during the call only.
type Splits struct {
	// Send[k] elements go to rank k; Recv[k] elements come from rank k.
	Send, Recv []int64
	// SendDispls[k] and RecvDispls[k] are the offsets at which these parts begin in their buffers, which empty parts lie in too. nil packs
	// them in rank order.
	SendDispls, RecvDispls []int64
	// PeerDispls[k] is the offset at which this rank's part begins in rank k's destination: RecvDispls[this rank] of rank k.
	// With it, and a destination at the same offset of the symmetric heap on every rank, a GPU's copy engines can do the
	// exchange. It must be right: if a receiver expects the part elsewhere, Fault reports that after the copies. nil means that
	// it is not known.
	PeerDispls []int64
	// ElemSize is the size of an element in bytes; 0 means 1.
	ElemSize int64
	// Live, if it is not empty, holds the splits in memory of the Exchanger's device. The exchange reads them when it runs, with
	// the values that the stream has written by then, so a captured CUDA graph can be replayed with other splits. It is four
	// arrays of 64-bit integers with one entry a rank, in bytes: send splits, send displacements, receive splits,
	// receive displacements (AppendLive makes them). It begins at a multiple of 8, and belongs to the exchange until that is
	// complete.
	//
	// Send and Recv are then only the estimate by which the algorithm is chosen; without both, the estimate is equal parts of
	// the buffers. Copy engines cannot do such an exchange, and PeerDispls must be nil. For the part that a rank sends to itself
	// its send split counts, and not the receive split. If a split does not fit the buffers, the exchange moves nothing on this
	// rank, and every rank gets a *kernels.SplitsError for this call, which names that rank. The next call works.
	Live memory.View
	// Limits hold for this call alone.
	Limits Limits

	wasLive bool // of a copy that does without the view
}

// Limits bound calls. Options has them for all calls of an Exchanger; a field of Splits.Limits that is not zero replaces that of Options.
// They are this rank's own: ranks need not agree.
type Limits struct {
	// Algorithm forces one by name.
	Algorithm string
	// MaxSMs bounds the multiprocessors of a GPU that send in a call above PacketBytes. In a call it is at most
	// Options.MaxSMs.
	MaxSMs int
	// CopySMs bounds the further multiprocessors that copy the output out of staging if peers cannot write it; negative for none. At
	// most as many send as copy then.
	CopySMs int
	// NoSMs takes no multiprocessors of a GPU for calls above PacketBytes: these go by its copy engines or are refused, under the
	// conditions of Algorithm "copy".
	NoSMs bool
}

// with is l with the fields of c that are not zero.
func (l Limits) with(c Limits) Limits {
	if c == (Limits{}) {
		return l
	}
	if c.Algorithm != "" || c.NoSMs {
		l.Algorithm, l.NoSMs = c.Algorithm, c.NoSMs
	}
	if c.MaxSMs > 0 {
		l.MaxSMs = min(l.MaxSMs, c.MaxSMs)
	}
	if c.CopySMs != 0 {
		l.CopySMs = c.CopySMs
	}
	return l
}

// LiveBytes is the length of Splits.Live for a group of size ranks.
func LiveBytes(ranks int) int64 { return 4 * 8 * int64(ranks) }

// AppendLive appends to b the content of Live for these splits, to be copied to the device. The error is ErrInvalid.
func (s *Splits) AppendLive(b []byte) ([]byte, error) {
	n := len(s.Send)
	for _, d := range [...]struct {
		side           string
		counts, displs []int64
	}{{"send", s.Send, s.SendDispls}, {"receive", s.Recv, s.RecvDispls}} {
		bytes, offsets := make([]int64, n), make([]int64, n)
		if _, err := layout(d.side, d.counts, d.displs, s.elem(), n, bytes, offsets); err != nil {
			return nil, err
		}
		for _, v := range [...][]int64{bytes, offsets} {
			for _, x := range v {
				b = binary.NativeEndian.AppendUint64(b, uint64(x))
			}
		}
	}
	return b, nil
}

func (s *Splits) live() bool { return s.wasLive || s.Live.Len() > 0 }

func (s *Splits) elem() int64 {
	if s.ElemSize == 0 {
		return 1
	}
	return s.ElemSize
}

// hash is a digest of the split vectors. Slices of different lengths are kept apart by plan equality, not by the hash.
func (s *Splits) hash() uint64 {
	const prime = 0x9e3779b97f4a7c15
	h := uint64(s.elem())
	if s.live() {
		h = ^h
	}
	if l := &s.Limits; *l != (Limits{}) {
		h = bits.RotateLeft64(h^xxhash.Sum64String(l.Algorithm), 7)*prime + uint64(l.MaxSMs)<<32 + uint64(l.CopySMs)
	}
	for _, v := range [...][]int64{s.Send, s.Recv, s.SendDispls, s.RecvDispls, s.PeerDispls} {
		h = bits.RotateLeft64(h*prime, 31) ^ xxhash.Sum64(shm.Bytes(v))
	}
	return h
}

func (s *Splits) equal(t *Splits) bool {
	return s.elem() == t.elem() && s.live() == t.live() && s.Limits == t.Limits && slices.Equal(s.Send, t.Send) && slices.Equal(s.Recv, t.Recv) &&
		sameDispls(s.SendDispls, t.SendDispls) && sameDispls(s.RecvDispls, t.RecvDispls) &&
		sameDispls(s.PeerDispls, t.PeerDispls)
}

func sameDispls(a, b []int64) bool { return (a == nil) == (b == nil) && slices.Equal(a, b) }

// assign makes s a copy of t, except for the view, that shares nothing with it. It reuses the memory of s.
func (s *Splits) assign(t *Splits) {
	s.ElemSize, s.wasLive, s.Limits = t.ElemSize, t.live(), t.Limits
	s.Send, s.Recv = append(s.Send[:0], t.Send...), append(s.Recv[:0], t.Recv...)
	s.SendDispls, s.RecvDispls = assignDispls(s.SendDispls, t.SendDispls), assignDispls(s.RecvDispls, t.RecvDispls)
	s.PeerDispls = assignDispls(s.PeerDispls, t.PeerDispls)
}

func assignDispls(dst, src []int64) []int64 {
	if src == nil {
		return nil
	}
	return append(dst[:0], src...)
}

// placed is splits and, where they are given, displacements in words.
func placed(counts, displs []int64) string {
	if displs == nil {
		return fmt.Sprint(counts)
	}
	return fmt.Sprintf("%v at %v", counts, displs)
}

// layout turns counts and displacements of one direction into bytes and offsets, and returns the length that the buffer must
// have. side is "send" or "receive" in messages.
func layout(side string, counts, displs []int64, elem int64, ranks int, bytes, offsets []int64) (int64, error) {
	if len(counts) != ranks {
		return 0, invalid("%d %s splits for %d ranks", len(counts), side, ranks)
	}
	if displs != nil && len(displs) != ranks {
		return 0, invalid("%d %s displacements for %d ranks", len(displs), side, ranks)
	}
	var next, extent int64
	for k, n := range counts {
		if n < 0 {
			return 0, invalid("%s split %d for rank %d is negative (splits %v)", side, n, k, counts)
		}
		at := next
		if displs != nil {
			if at = displs[k]; at < 0 {
				return 0, invalid("%s displacement %d for rank %d is negative (displacements %v)", side, at, k, displs)
			}
		}
		if at > math.MaxInt64-n || at+n > math.MaxInt64/elem {
			return 0, invalid("%s split %d at %d of %d-byte elements for rank %d overflows", side, n, at, elem, k)
		}
		bytes[k], offsets[k] = n*elem, at*elem
		next = at + n
		extent = max(extent, next*elem)
	}
	return extent, nil
}

// overlapping returns two ranks whose parts of the receive buffer share a byte.
func overlapping(bytes, offsets []int64) (a, b int, found bool) {
	order := make([]int, 0, len(bytes))
	for k, n := range bytes {
		if n > 0 {
			order = append(order, k)
		}
	}
	slices.SortFunc(order, func(i, j int) int { return int(min(max(offsets[i]-offsets[j], -1), 1)) })
	for i := 1; i < len(order); i++ {
		if p, q := order[i-1], order[i]; offsets[p]+bytes[p] > offsets[q] {
			return p, q, true
		}
	}
	return 0, 0, false
}
