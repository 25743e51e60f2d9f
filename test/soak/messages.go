package main

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/p2p"
)

// onlyMessages is the kind of calls of talk.
const onlyMessages = "messages"

// talk is calls between two ranks: messages, or puts and gets with signals. On GPUs and in a group of one there is an exchange instead.
func (r *rank) talk(rng *rand.Rand, seed uint64) error {
	switch n := rng.IntN(8); {
	case r.s.Endpoint == nil || r.g.Size() == 1:
		return r.exchange(rng, seed)
	case n < 4:
		return r.send(rng, seed)
	case n < 7:
		return r.put(rng, seed)
	default:
		return r.dispute(rng, seed)
	}
}

// tags is how many there are in a call.
const tags = 3

// letter is a message. All of one tag in a call are of one size, so a receive from any rank fits each.
type letter struct {
	tag int
	id  uint64 // what fills it is made of it
}

// send has every rank send messages to the others and receive theirs: in one batch, from a stream, or from any rank.
func (r *rank) send(rng *rand.Rand, seed uint64) error {
	n, me := r.g.Size(), r.g.Rank()
	var size [tags]int64
	for tag := range size {
		size[tag] = sizes(rng)
	}
	var letters [][][]letter // by sender and receiver
	for src := range n {
		letters = append(letters, make([][]letter, n))
		for dst := range n {
			for i := range rng.IntN(4) {
				if src != dst {
					letters[src][dst] = append(letters[src][dst], letter{rng.IntN(tags), mix(seed, src, dst, i)})
				}
			}
		}
	}
	out := make([]int64, n)
	for src := range n {
		for _, l := range slices.Concat(letters[src]...) {
			out[src] += size[l.tag]
		}
	}
	how, fromAny := rng.IntN(3), rng.IntN(3) == 0
	src, free := r.view(rng.IntN(2) == 0, out[me], slices.Max(out))
	defer free()
	var sends, receives []p2p.Message
	comes := make(map[[2]int][]uint64) // by rank and tag
	for _, peer := range rand.New(rand.NewPCG(seed, uint64(me))).Perm(n) {
		for _, l := range letters[me][peer] {
			k := size[l.tag]
			fill(src.Slice(0, k).Bytes(), l.id)
			sends = append(sends, p2p.Message{Peer: peer, Tag: uint64(l.tag), View: src.Slice(0, k)})
			src = src.Slice(k, src.Len()-k)
		}
		for _, l := range letters[peer][me] {
			comes[[2]int{peer, l.tag}] = append(comes[[2]int{peer, l.tag}], l.id)
			m := p2p.Message{Receive: true, Peer: peer, Tag: uint64(l.tag), View: memory.Host(make([]byte, size[l.tag]))}
			if fromAny {
				m.Peer = p2p.AnyRank
			}
			receives = append(receives, m)
		}
	}
	from := make([]int, len(receives))
	for i := range receives {
		receives[i].From = &from[i]
	}
	if err := r.deliver(how, sends, receives); err != nil {
		return err
	}
	for i, m := range receives {
		key := [2]int{from[i], int(m.Tag)}
		if len(comes[key]) == 0 {
			r.must(false, "a message of rank %d with tag %d, which has sent none, or fewer", from[i], m.Tag)
			return nil
		}
		want := make([]byte, m.View.Len())
		fill(want, comes[key][0])
		comes[key] = comes[key][1:]
		r.must(bytes.Equal(want, m.View.Bytes()), "a message of %d bytes of rank %d with tag %d is wrong", m.View.Len(), from[i], m.Tag)
		r.bytes += m.View.Len()
	}
	return nil
}

// deliver makes the calls, and overwrites what this rank has sent.
func (r *rank) deliver(how int, sends, receives []p2p.Message) (err error) {
	x := r.s.Endpoint
	var s device.Stream
	switch how {
	case 0:
		err = x.Batch(nil, append(slices.Clone(sends), receives...)...)
	default:
		if how == 1 {
			if s, err = r.desk.dev.NewStream(); err != nil {
				return err
			}
			defer func() { err = errors.Join(err, s.Close()) }()
		}
		for _, m := range sends {
			if err = x.Send(s, m.Peer, m.Tag, m.View); err != nil {
				break
			}
		}
		for _, m := range receives {
			if err == nil {
				err = x.Batch(nil, m)
			}
		}
		if s != nil {
			err = errors.Join(err, s.Synchronize())
		}
	}
	for _, m := range sends {
		clear(m.View.Bytes())
	}
	return err
}

// Semaphores of put.
const (
	ready = iota // the buffer of the rank that signals may be written and read
	written
	taken
)

// put has every rank write into the buffer of the next, and read there what that rank has.
func (r *rank) put(rng *rand.Rand, seed uint64) error {
	n, me := r.g.Size(), r.g.Rank()
	next, last := (me+1)%n, (me+n-1)%n
	k := sizes(rng) + 1
	buffer, err := r.s.Heap.Alloc(2 * k)
	if errors.Is(err, memory.ErrOutOfMemory) {
		return nil // on all ranks
	}
	if err != nil {
		return err
	}
	defer buffer.Free()
	mine, theirs := buffer.View().Slice(0, k), buffer.View().Slice(k, k)
	fill(mine.Bytes(), mix(seed, me))
	fill(theirs.Bytes(), 0xbad)
	src, dst := make([]byte, k), make([]byte, k)
	fill(src, mix(seed, me, next))
	x := r.s.Endpoint
	for _, call := range []func() error{
		func() error { return x.Signal(nil, last, ready) },
		func() error { return x.Wait(nil, next, ready) },
		func() error { return x.Put(nil, next, theirs, memory.Host(src)) },
		func() error { return x.Signal(nil, next, written) },
		func() error { return x.Get(nil, next, memory.Host(dst), mine) },
		func() error { return x.Signal(nil, next, taken) },
		func() error { return x.Wait(nil, last, written) },
		func() error { return x.Wait(nil, last, taken) },
	} {
		if err := call(); err != nil {
			return err
		}
	}
	want := make([]byte, k)
	fill(want, mix(seed, next))
	r.must(bytes.Equal(want, dst), "%d bytes that were got of rank %d are wrong", k, next)
	fill(want, mix(seed, last, me))
	r.must(bytes.Equal(want, theirs.Bytes()), "%d bytes that rank %d has put are wrong", k, last)
	r.bytes += 2 * k
	return nil
}

// dispute has one rank send what another does not expect. Both get both sizes, the sender at the latest with its next message, which it then
// has not sent; and the message after that arrives.
func (r *rank) dispute(rng *rand.Rand, seed uint64) error {
	n, me := r.g.Size(), r.g.Rank()
	from := rng.IntN(n)
	to := (from + 1 + rng.IntN(n-1)) % n
	sent, expected := sizes(rng), sizes(rng)
	if sent == expected {
		expected++
	}
	const disputed, verdict, after = 1, 2, 3
	x := r.s.Endpoint
	told := func(err error) bool {
		var m *kernels.MessageMismatchError
		return errors.As(err, &m) && m.Src == from && m.Dst == to && m.Sent == uint64(sent) && m.Expected == uint64(expected)
	}
	b := make([]byte, 100)
	switch me {
	case from:
		err := x.Send(nil, to, disputed, memory.Host(make([]byte, sent)))
		if err != nil && !told(err) {
			return err
		}
		if err := x.Recv(nil, to, verdict, memory.Host(b[:1])); err != nil {
			return err
		}
		if err == nil {
			if err = x.Send(nil, to, after, memory.Host(b)); !told(err) {
				r.must(err != nil, "nobody has said that rank %d expected %d bytes and not %d", to, expected, sent)
				return err
			}
		}
		fill(b, seed)
		return x.Send(nil, to, after, memory.Host(b))
	case to:
		if err := x.Recv(nil, from, disputed, memory.Host(make([]byte, expected))); !told(err) {
			r.must(err != nil, "no error for a message of %d bytes instead of %d", sent, expected)
			return err
		}
		if err := errors.Join(x.Send(nil, from, verdict, memory.Host(b[:1])), x.Recv(nil, from, after, memory.Host(b))); err != nil {
			return err
		}
		want := make([]byte, len(b))
		fill(want, seed)
		r.must(bytes.Equal(want, b), "the message after one of another size is wrong")
	}
	return nil
}
