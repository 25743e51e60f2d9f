package memory

import (
	"encoding/binary"
	"errors"
	"sort"

	"github.com/cespare/xxhash/v2"
)

type callKind uint8

const (
	callNone callKind = iota
	callAlloc
	callFree
	callGrow
	callRegister
	callDeregister
	callAllocRail
	callFreeRail
	callKinds
)

var callNames = [callKinds]string{"none", "alloc", "free", "grow", "register", "deregister", "alloc on the rail", "free on the rail"}

func (k callKind) String() string {
	if k < callKinds {
		return callNames[k]
	}
	return "unknown"
}

// call is one entry of the journal: what was asked and what came of it.
type call struct {
	kind callKind
	seg  int32
	size int64
	off  int64 // -1: out of memory
}

const callBytes = 1 + 4 + 8 + 8

func (c call) append(b []byte) []byte {
	b = append(b, byte(c.kind))
	b = binary.LittleEndian.AppendUint32(b, uint32(c.seg))
	b = binary.LittleEndian.AppendUint64(b, uint64(c.size))
	return binary.LittleEndian.AppendUint64(b, uint64(c.off))
}

func callFrom(b []byte) call {
	return call{
		kind: callKind(b[0]),
		seg:  int32(binary.LittleEndian.Uint32(b[1:])),
		size: int64(binary.LittleEndian.Uint64(b[5:])),
		off:  int64(binary.LittleEndian.Uint64(b[13:])),
	}
}

const (
	recentCalls = 1024 // calls the journal keeps in full
	markCount   = 1024 // checkpoints it keeps of all others
)

// journal is the running digest of a rank's calls (M3), with enough memory to say later where two
// ranks parted: the recent calls in full, and checkpoints of the digest over the whole past at a
// spacing that doubles whenever there are markCount of them. It is about 60 KiB however long the
// heap lives.
type journal struct {
	count  int64  // calls so far; calls are numbered from 1
	digest uint64 // after call count
	recent []seen // call k is at (k-1) % recentCalls
	every  int64  // spacing of marks, a power of two
	marks  []uint64
	buf    [8 + callBytes]byte
}

// seen is a call and the digest after it.
type seen struct {
	call
	digest uint64
}

// add counts a call.
func (j *journal) add(c call) {
	if j.every == 0 {
		j.every = 1
		j.recent = make([]seen, 0, 64)
	}
	j.digest = xxhash.Sum64(c.append(binary.LittleEndian.AppendUint64(j.buf[:0], j.digest)))
	if s := (seen{c, j.digest}); len(j.recent) < recentCalls {
		j.recent = append(j.recent, s)
	} else {
		j.recent[j.count%recentCalls] = s
	}
	j.count++
	if j.count%j.every != 0 {
		return
	}
	if len(j.marks) == markCount { // keep every second one
		for i := range j.marks[:markCount/2] {
			j.marks[i] = j.marks[2*i+1]
		}
		j.marks = j.marks[:markCount/2]
		j.every *= 2
		if j.count%j.every != 0 {
			return
		}
	}
	j.marks = append(j.marks, j.digest)
}

// appendTo appends the journal in the form that parseHistory reads.
func (j *journal) appendTo(b []byte) []byte {
	le := binary.LittleEndian
	b = le.AppendUint64(b, uint64(j.count))
	b = le.AppendUint64(b, j.digest)
	b = le.AppendUint64(b, uint64(j.every))
	b = le.AppendUint32(b, uint32(len(j.marks)))
	b = le.AppendUint32(b, uint32(len(j.recent)))
	for _, m := range j.marks {
		b = le.AppendUint64(b, m)
	}
	for k := j.count - int64(len(j.recent)); k < j.count; k++ {
		s := j.recent[k%recentCalls]
		b = le.AppendUint64(s.append(b), s.digest)
	}
	return b
}

// history is another rank's journal.
type history struct {
	count  int64
	digest uint64
	every  int64
	marks  []uint64 // marks[i] is the digest after call (i+1)*every
	first  int64    // number of recent[0]
	recent []seen
}

var errHistory = errors.New("malformed history")

func parseHistory(b []byte) (history, error) {
	const head, entry = 32, callBytes + 8
	le := binary.LittleEndian
	if len(b) < head {
		return history{}, errHistory
	}
	h := history{
		count:  int64(le.Uint64(b)),
		digest: le.Uint64(b[8:]),
		every:  int64(le.Uint64(b[16:])),
	}
	marks, recent := int64(le.Uint32(b[24:])), int64(le.Uint32(b[28:]))
	b = b[head:]
	switch {
	case h.count < 0, marks > markCount, recent > recentCalls, recent > h.count,
		int64(len(b)) != 8*marks+entry*recent,
		marks > 0 && (h.every <= 0 || h.every > h.count/marks):
		return history{}, errHistory
	}
	for range marks {
		h.marks = append(h.marks, le.Uint64(b))
		b = b[8:]
	}
	h.first = h.count - recent + 1
	for range recent {
		h.recent = append(h.recent, seen{callFrom(b), le.Uint64(b[callBytes:])})
		b = b[entry:]
	}
	return h, nil
}

// at is the digest after call k, if the history still has it.
func (h *history) at(k int64) (digest uint64, ok bool) {
	switch {
	case k == 0:
		return 0, true
	case k == h.count:
		return h.digest, true
	case k >= h.first && k < h.count:
		return h.recent[k-h.first].digest, true
	case k > 0 && k < h.count && h.every > 0 && k%h.every == 0 && k/h.every <= int64(len(h.marks)):
		return h.marks[k/h.every-1], true
	}
	return 0, false
}

// call is call k in full, if the history still has it.
func (h *history) call(k int64) (call, bool) {
	switch {
	case k > h.count:
		return call{}, true
	case k >= h.first:
		return h.recent[k-h.first].call, true
	}
	return call{}, false
}

// diverged finds where the histories, one a rank, part. It returns nil when they are the same.
func diverged(hs []history) *DivergenceError {
	// The digest after call k covers all calls up to k, so ranks agree up to some call and
	// never again after it. Look at those k for which every rank still has the digest.
	shortest, longest := hs[0].count, hs[0].count
	for _, h := range hs {
		shortest, longest = min(shortest, h.count), max(longest, h.count)
	}
	known := make(map[int64]bool)
	for i := range hs {
		h := &hs[i]
		for k := h.first; k <= min(h.count, shortest); k++ {
			known[k] = true
		}
		for i := range h.marks {
			if k := int64(i+1) * h.every; k <= shortest {
				known[k] = true
			}
		}
		known[h.count] = true
	}
	first, same := shortest+1, int64(0)
	var agreed []int64
	for k := range known {
		if all, equal := compareAt(hs, k); all && equal {
			agreed = append(agreed, k)
		} else if all {
			first = min(first, k)
		}
	}
	for _, k := range agreed {
		if k < first {
			same = max(same, k)
		}
	}
	if first > shortest && shortest == longest {
		return nil
	}

	e := &DivergenceError{Call: first, After: same, Ranks: minority(hs, first)}
	if e.Exact() {
		for r := range hs {
			c, ok := hs[r].call(first)
			if !ok {
				e.Calls = nil
				break
			}
			e.Calls = append(e.Calls, RankCall{
				Rank: r, Kind: c.kind.String(), Size: c.size, Segment: int(c.seg), Offset: c.off,
			})
		}
	}
	return e
}

// compareAt reports whether every history has the digest after call k, and whether they are equal.
func compareAt(hs []history, k int64) (all, equal bool) {
	want, ok := hs[0].at(k)
	equal = true
	for i := range hs {
		d, has := hs[i].at(k)
		ok = ok && has
		equal = equal && d == want
	}
	return ok, equal
}

// minority returns the ranks that do not share the most common history up to call k; of equally
// common ones that of the lowest rank counts.
func minority(hs []history, k int64) []int {
	type past struct {
		count  int64
		digest uint64
	}
	members := make(map[past][]int)
	for r := range hs {
		p := past{digest: hs[r].digest, count: hs[r].count} // where call k is forgotten
		if d, ok := hs[r].at(k); ok {
			p = past{digest: d, count: k}
		}
		members[p] = append(members[p], r)
	}
	var common []int
	for _, m := range members {
		if len(m) > len(common) || len(m) == len(common) && m[0] < common[0] {
			common = m
		}
	}
	var rest []int
	for _, m := range members {
		if m[0] != common[0] {
			rest = append(rest, m...)
		}
	}
	sort.Ints(rest)
	return rest
}
