package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

const (
	hidden    = 24
	maxTokens = 64
)

// call makes the call that all ranks draw from the seed. Its error is that of the call; what must not be is r.wrong.
func (r *rank) call(seed uint64) error {
	rng := rand.New(rand.NewPCG(seed, 5)) // the same on every rank
	r.desk.used = 0
	if r.Only == onlyMessages {
		return r.talk(rng, seed)
	}
	switch n := rng.IntN(100); {
	case n < 30:
		return r.exchange(rng, seed)
	case n < 33:
		return r.refuse(rng)
	case n < 51:
		return r.reduce(rng, seed)
	case n < 65:
		return r.route(rng, seed)
	case n < 80:
		return r.talk(rng, seed)
	case n < 88:
		return r.allocate(rng)
	case n < 90:
		ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
		defer cancel()
		if r.s.Heap.Stats().Segments > 3 {
			return r.s.Heap.Verify(ctx)
		}
		return r.s.Heap.Grow(ctx, 2<<20)
	case n < 94:
		return r.split(rng)
	case n < 97:
		return r.giveUp(rng)
	case r.misfit:
		return r.exchange(rng, seed)
	default:
		return r.disagree(rng)
	}
}

func (r *rank) must(ok bool, format string, args ...any) {
	if !ok && r.wrong == nil {
		r.wrong = fmt.Errorf("call %d of process %d, rank %d of %d: %s", r.steps, r.ID, r.g.Rank(), r.g.Size(), fmt.Sprintf(format, args...))
	}
}

// sizes draws a message size: none, a few bytes, or many.
func sizes(rng *rand.Rand) int64 {
	switch rng.IntN(8) {
	case 0:
		return 0
	case 1, 2:
		return rng.Int64N(16)
	case 3, 4:
		return rng.Int64N(2 << 10)
	case 5, 6:
		return rng.Int64N(64 << 10)
	default:
		return rng.Int64N(1 << 20)
	}
}

// view is memory of n bytes, outside the heap or in it, where all ranks take as much as the one with most; and what frees it.
func (r *rank) view(inHeap bool, n, most int64) (memory.View, func()) {
	if inHeap {
		if b, err := r.s.Heap.Alloc(max(most, 1)); err == nil {
			return b.View().Slice(0, n), func() { b.Free() }
		}
	}
	return r.desk.take(n), func() {}
}

// exchange is an all-to-all. Sizes, and whether memory is in the heap, are drawn for all ranks by each. Some ranks have their splits in
// memory of the device.
func (r *rank) exchange(rng *rand.Rand, seed uint64) error {
	n, me := r.g.Size(), r.g.Rank()
	m := make([][]int64, n)
	small := rng.IntN(2) == 0
	for s := range m {
		m[s] = make([]int64, n)
		for d := range m[s] {
			if m[s][d] = sizes(rng); small {
				m[s][d] %= 1 << 10
			}
		}
	}
	inHeap := [2]bool{rng.IntN(2) == 0, rng.IntN(2) == 0}
	onStream := rng.IntN(4) == 0
	send, recv := m[me], make([]int64, n)
	outs, ins := make([]int64, n), make([]int64, n)
	for s := range n {
		for d := range n {
			outs[s] += m[s][d]
			ins[d] += m[s][d]
		}
		recv[s] = m[s][me]
	}
	out, in := outs[me], ins[me]
	src, freeSrc := r.view(inHeap[0], out, slices.Max(outs))
	defer freeSrc()
	dst, freeDst := r.view(inHeap[1], in, slices.Max(ins))
	defer freeDst()
	at, sent := int64(0), make([]byte, out)
	for p, k := range send {
		fill(sent[at:at+k], mix(seed, me, p))
		at += k
	}
	if err := r.desk.write(src, sent); err != nil {
		return err
	}
	got := make([]byte, in)
	fill(got, 0xbad)
	if err := r.desk.write(dst, got); err != nil {
		return err
	}
	sp := &alltoallv.Splits{Send: send, Recv: recv}
	var err error
	if rand.IntN(4) == 0 {
		if sp.Live, err = r.table(sp); err != nil {
			return err
		}
	}
	if onStream {
		var s device.Stream
		if s, err = r.desk.dev.NewStream(); err != nil {
			return err
		}
		if err = r.s.Exchanger.Exchange(s, dst, src, sp); err == nil {
			if err = s.Synchronize(); err == nil {
				err = r.s.Exchanger.Fault()
			}
		}
		s.Close()
	} else {
		err = r.s.Exchanger.Exchange(nil, dst, src, sp)
	}
	if err = r.told(err); err != nil {
		return err
	}
	if got, err = r.desk.read(dst); err != nil {
		return err
	}
	at = 0
	var want []byte
	for p, k := range recv {
		want = append(want[:0], make([]byte, k)...)
		fill(want, mix(seed, p, me))
		r.must(bytes.Equal(want, got[at:at+k]), "%d bytes of rank %d are wrong", k, p)
		at += k
	}
	r.bytes += in
	return nil
}

// table is splits in memory of the device.
func (r *rank) table(sp *alltoallv.Splits) (memory.View, error) {
	table, err := sp.AppendLive(nil)
	if err != nil {
		return memory.View{}, err
	}
	return r.desk.with(table)
}

// refuse has one rank find splits in memory of the device that do not fit. It is an error of all, which names the rank.
func (r *rank) refuse(rng *rand.Rand) error {
	n, me := r.g.Size(), r.g.Rank()
	one, k := rng.IntN(n), sizes(rng)
	sp := &alltoallv.Splits{Send: slices.Repeat([]int64{k}, n), Recv: slices.Repeat([]int64{k}, n)}
	src, dst := r.desk.take(int64(n)*k), r.desk.take(int64(n)*k)
	if me == one {
		wrong := *sp
		wrong.Send = slices.Clone(sp.Send)
		wrong.Send[rng.IntN(n)]++ // the last part does not fit any more
		var err error
		if sp.Live, err = r.table(&wrong); err != nil {
			return err
		}
	}
	err := r.s.Exchanger.Exchange(nil, dst, src, sp)
	var refused *kernels.SplitsError
	if !errors.As(err, &refused) {
		if err == nil {
			r.must(false, "no error of splits that rank %d refuses", one)
		}
		return err
	}
	r.must(refused.Rank == one && refused.Send && refused.Limit == int64(n)*k, "rank %d refuses its splits: %v", one, err)
	return nil
}

// told takes the news that an earlier message of this rank was not what its receiver expected, which says nothing of this call.
func (r *rank) told(err error) error {
	var late *kernels.CountMismatchError
	if r.unsure {
		if errors.As(err, &late) && late.Src == r.g.Rank() {
			err = nil
		} else {
			r.must(err != nil, "nobody has said that message sizes differed")
		}
	}
	r.misfit, r.unsure = false, false
	return err
}

// reduce is an all-reduce of integers, whose sums are exact.
func (r *rank) reduce(rng *rand.Rand, seed uint64) error {
	count := sizes(rng)/4 + 1
	b, free := r.view(rng.IntN(2) == 0, 4*count, 4*count)
	defer free()
	mine := make([]byte, 4*count)
	want := make([]uint32, count)
	part := make([]byte, 4*count)
	for p := range r.g.Size() {
		fill(part, mix(seed, p))
		for i := range want {
			want[i] += binary.LittleEndian.Uint32(part[4*i:])
		}
		if p == r.g.Rank() {
			copy(mine, part)
		}
	}
	if err := r.desk.write(b, mine); err != nil {
		return err
	}
	if err := r.s.Reducer.AllReduce(nil, b, b, kernels.Int32, kernels.Sum); err != nil {
		return err
	}
	mine, err := r.desk.read(b)
	if err != nil {
		return err
	}
	for i := range want {
		if got := binary.LittleEndian.Uint32(mine[4*i:]); got != want[i] {
			r.must(false, "element %d of %d of the sum is %d, want %d", i, count, got, want[i])
			break
		}
	}
	r.bytes += 4 * count
	return nil
}

// route sends tokens to two experts, each of which multiplies by its number plus one, and back.
func (r *rank) route(rng *rand.Rand, seed uint64) error {
	own := rand.New(rand.NewPCG(seed, uint64(100+r.g.Rank())))
	tokens := own.IntN(maxTokens + 1)
	x, y := make([]byte, 4*hidden*tokens), make([]byte, 4*hidden*tokens)
	idx, weights := make([]int32, 2*tokens), make([]float32, 2*tokens)
	for t := range tokens {
		idx[2*t] = int32(own.IntN(12))
		idx[2*t+1] = (idx[2*t] + 1 + int32(own.IntN(11))) % 12
		weights[2*t], weights[2*t+1] = 0.5, 0.25
	}
	for i := range hidden * tokens {
		binary.LittleEndian.PutUint32(x[4*i:], math.Float32bits(float32(own.IntN(1000))))
	}
	var in dispatch.Tokens
	var err error
	for v, b := range map[*memory.View][]byte{&in.X: x, &in.Experts: shm.Bytes(idx), &in.Weights: shm.Bytes(weights)} {
		if *v, err = r.desk.with(b); err != nil {
			return err
		}
	}
	h, err := r.s.Dispatcher.Dispatch(nil, in)
	if err != nil {
		return err
	}
	defer h.Release()
	var what [3][]byte
	for i, v := range []memory.View{h.Counts(), h.Offsets(), h.Rows()} {
		if what[i], err = r.desk.read(v); err != nil {
			return err
		}
	}
	counts, offsets, rows := shm.View[int32](what[0]), shm.View[int32](what[1]), what[2]
	for i, e := range h.LocalExperts() {
		first := int(offsets[i])
		for at := first * hidden; at < (first+int(counts[i]))*hidden; at++ {
			v := math.Float32frombits(binary.LittleEndian.Uint32(rows[4*at:]))
			binary.LittleEndian.PutUint32(rows[4*at:], math.Float32bits(v*float32(e+1)))
		}
	}
	if err := r.desk.write(h.Rows(), rows); err != nil {
		return err
	}
	sums := r.desk.take(int64(len(y)))
	if err := r.s.Dispatcher.Combine(nil, sums, h.Rows(), h, dispatch.CombineOptions{}); err != nil {
		return err
	}
	if y, err = r.desk.read(sums); err != nil {
		return err
	}
	for t := range tokens {
		scale := 0.5*float32(idx[2*t]+1) + 0.25*float32(idx[2*t+1]+1)
		for i := t * hidden; i < (t+1)*hidden; i++ {
			want := scale * math.Float32frombits(binary.LittleEndian.Uint32(x[4*i:]))
			if got := math.Float32frombits(binary.LittleEndian.Uint32(y[4*i:])); got != want {
				r.must(false, "element %d of token %d is %v, want %v", i-t*hidden, t, got, want)
				return nil
			}
		}
	}
	r.bytes += int64(len(y))
	return nil
}

// allocate takes and gives back memory in the same order on every rank, and has that verified.
func (r *rank) allocate(rng *rand.Rand) error {
	for range 8 {
		if len(r.held) > 0 && rng.IntN(2) == 0 {
			i := rng.IntN(len(r.held))
			if err := r.held[i].Free(); err != nil {
				return err
			}
			r.held = append(r.held[:i], r.held[i+1:]...)
			continue
		}
		b, err := r.s.Heap.Alloc(1 + rng.Int64N(256<<10))
		if errors.Is(err, memory.ErrOutOfMemory) {
			continue
		}
		if err != nil {
			return err
		}
		r.held = append(r.held, b)
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	err := r.s.Heap.Verify(ctx)
	var diverged *memory.DivergenceError
	r.must(!errors.As(err, &diverged), "%v", err)
	return err
}

// split meets in a part of the group.
func (r *rank) split(rng *rand.Rand) error {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	colour := rng.IntN(1<<r.g.Size()) >> r.g.Rank() & 1
	sub, err := r.g.Split(ctx, colour, 0)
	if err != nil {
		return err
	}
	defer sub.Close()
	all, err := sub.AllGather(ctx, []byte{byte(r.g.Rank())})
	if err != nil {
		return err
	}
	for i, b := range all {
		r.must(len(b) == 1 && (i == 0 || b[0] > all[i-1][0]), "rank %d of the part is %v", i, b)
	}
	return nil
}

// giveUp has one rank not wait for the others in a call of the control plane.
func (r *rank) giveUp(rng *rand.Rand) error {
	one := rng.IntN(r.g.Size())
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	if r.g.Rank() == one {
		cancel()
	}
	defer cancel()
	err := r.g.Barrier(ctx)
	if r.g.Rank() == one && errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// disagree has one rank send what another does not expect. It is an error of the two alone, and the next exchange works.
func (r *rank) disagree(rng *rand.Rand) error {
	n, me := r.g.Size(), r.g.Rank()
	from, to := rng.IntN(n), rng.IntN(n)
	if from == to {
		return nil
	}
	sent, expected := sizes(rng), sizes(rng)
	if sent == expected {
		return nil
	}
	send, recv := make([]int64, n), make([]int64, n)
	if me == from {
		send[to] = sent
	}
	if me == to {
		recv[from] = expected
	}
	err := r.s.Exchanger.Exchange(nil, r.desk.take(expected), r.desk.take(sent), &alltoallv.Splits{Send: send, Recv: recv})
	var mismatch *kernels.CountMismatchError
	found := errors.As(err, &mismatch)
	if err != nil && !found {
		return err
	}
	r.misfit = true
	switch me {
	case to:
		r.must(found, "no error for %d bytes instead of %d", sent, expected)
	case from:
		r.unsure = !found && !r.desk.onGPU() // where it may never know
	default:
		r.must(!found, "an error of two others: %v", err)
	}
	return nil
}
