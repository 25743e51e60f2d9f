package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/memory"
)

// masked is a process of maskSoak: a rank whose calls go on without those that are killed, or a fresh one in the place of one of those.
type masked struct {
	maskTask
	d     *dispatch.Dispatcher
	rng   *rand.Rand
	calls int
	whole int
	lost  []int // as it knows
	// Of the last round, until the next dispatch tells who took part in its combine at least: how many of each token's choices came back, and
	// which ranks it knew to be lost when it began.
	choices []int32
	times   []int
	without []int
}

const (
	maskedExperts = 8
	maskedTopK    = 3
	maskedTokens  = 96
	maskedAlone   = 20 // rounds of the last rank after it was told to end
)

func sayMasked(m maskWord) {
	if b, err := json.Marshal(m); err == nil {
		fmt.Println(string(b))
	}
}

// copies are the ranks of each expert.
func (m *masked) copies(expert int) []int {
	return []int{expert % m.Size, (expert + 1 + expert/m.Size) % m.Size}
}

// workMasked is the life of the process.
func workMasked(spec string) int {
	m := &masked{rng: rand.New(rand.NewPCG(rand.Uint64(), 1))}
	err := json.Unmarshal([]byte(spec), &m.maskTask)
	if err == nil {
		err = m.live()
	}
	if err != nil {
		sayMasked(maskWord{Say: "bad", Text: err.Error()})
		return 1
	}
	sayMasked(maskWord{Say: "bye", Calls: m.calls, Whole: m.whole})
	return 0
}

func (m *masked) live() error {
	ctx := context.Background()
	join, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	c := comm.Config{Addr: m.Addr, Rank: m.Rank, Size: m.Size, Secret: []byte("soak"), Name: "soak", Replaceable: true, Replaces: m.Fresh, JoinTimeout: patience}
	g, err := comm.Join(join, c)
	if err != nil {
		return err
	}
	defer g.Close()
	heap, err := memory.NewHeap(join, g, device.Host(), memory.Options{SegmentBytes: 16 << 20})
	if err != nil {
		return err
	}
	p := &dispatch.Placement{}
	for e := range maskedExperts {
		p.Ranks = append(p.Ranks, m.copies(e))
	}
	m.d, err = dispatch.New(join, heap, dispatch.Options{
		Experts: maskedExperts, TopK: maskedTopK, Hidden: hidden, MaxTokens: maskedTokens, Placement: p,
		Masks: true, HostCounts: true, Sources: true, Timeout: patience,
	})
	if err != nil {
		return err
	}
	var quit atomic.Bool
	go func() {
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			var rank int
			at := c
			if n, _ := fmt.Sscanf(in.Text(), "replace %d %s", &rank, &at.Addr); n < 2 {
				quit.Store(true)
			} else if err := g.Replace(ctx, rank, at); err != nil {
				sayMasked(maskWord{Say: "bad", Text: err.Error()})
			}
		}
		if !quit.Load() {
			os.Exit(0) // nobody is there any more
		}
	}()
	if m.Fresh {
		if _, err := m.d.Unmask(join); err != nil {
			return err
		}
		if m.lost, err = m.d.Masked(); err != nil {
			return err
		}
		if err := m.round(ctx); err != nil { // then all others know that it is in
			return fmt.Errorf("the first round: %w", err)
		}
	}
	sayMasked(maskWord{Say: "ready"})
	for left := maskedAlone; left > 0; {
		if err := m.round(ctx); err != nil {
			return fmt.Errorf("call %d, without ranks %v: %w", m.calls, m.lost, err)
		}
		if quit.Load() {
			left--
		}
	}
	if err := m.d.Close(ctx); len(m.lost) > 0 != errors.Is(err, comm.ErrPeerLost) {
		return fmt.Errorf("close: %v, and ranks %v were lost", err, m.lost)
	}
	return nil
}

// called counts a call that has ended, and tells of ranks that were lost during it.
func (m *masked) called() error {
	ended := time.Now()
	m.calls++
	lost, err := m.d.Masked()
	if err != nil {
		return err
	}
	for _, r := range lost {
		if !slices.Contains(m.lost, r) {
			sayMasked(maskWord{Say: "lost", Rank: r, At: ended.UnixNano()})
		}
	}
	m.lost = lost
	return nil
}

// round is a dispatch and a combine of rows as they are. All elements of a token are equal, and tell its rank and number.
func (m *masked) round(ctx context.Context) error {
	x, idx := make([]float32, hidden*maskedTokens), make([]int32, maskedTopK*maskedTokens)
	for t := range maskedTokens {
		for i := range hidden {
			x[t*hidden+i] = m.element(m.Rank, t)
		}
		for k, e := range m.rng.Perm(maskedExperts)[:maskedTopK] {
			idx[t*maskedTopK+k] = int32(e)
		}
	}
	without := m.lost
	h, err := m.d.Dispatch(nil, dispatch.Tokens{X: memory.Host(shm.Bytes(x)), Experts: memory.Host(shm.Bytes(idx))})
	if err != nil {
		return err
	}
	defer h.Release()
	if err := m.called(); err != nil {
		return err
	}
	c, err := h.HostCounts(ctx)
	if err != nil {
		return err
	}
	came, err := m.rows(h, c, without)
	if err != nil {
		return err
	}
	if err := m.last(came); err != nil {
		return err
	}
	sums := make([]float32, len(x))
	if err := m.d.Combine(nil, memory.Host(shm.Bytes(sums)), h.Rows(), h, dispatch.CombineOptions{Weighting: dispatch.Unweighted}); err != nil {
		return err
	}
	if err := m.called(); err != nil {
		return err
	}
	m.choices, m.times, m.without = idx, m.times[:0], without
	for t := range maskedTokens {
		times := sums[t*hidden] / x[t*hidden]
		if times != float32(int(times)) || times < 0 || times > maskedTopK {
			return fmt.Errorf("token %d came back %v times", t, times)
		}
		for i := range hidden {
			if sums[t*hidden+i] != sums[t*hidden] {
				return fmt.Errorf("element %d of token %d is %v, another %v", i, t, sums[t*hidden+i], sums[t*hidden])
			}
		}
		m.times = append(m.times, int(times))
	}
	return nil
}

func (m *masked) element(rank, token int) float32 { return float32(1 + rank*maskedTokens + token) }

// rows checks what has come, and returns from which ranks.
func (m *masked) rows(h *dispatch.Handle, c dispatch.HostCounts, without []int) (came []int, err error) {
	rows, sources := shm.View[float32](h.Rows().Bytes()), shm.View[int32](h.Sources().Bytes())
	seen := make([]int32, m.Size)
	for i, n := range c.Counts {
		for row := c.Offsets[i]; row < c.Offsets[i]+n; row++ {
			rank, token, want := sources[2*row], sources[2*row+1], float32(0)
			if rank >= 0 {
				seen[rank]++
				want = m.element(int(rank), int(token))
			}
			for _, got := range rows[int(row)*hidden:][:hidden] {
				if got != want {
					return nil, fmt.Errorf("row %d, token %d of rank %d, has %v, want %v", row, token, rank, got, want)
				}
			}
		}
	}
	told := shm.View[int32](h.RankCounts().Bytes())
	if !slices.Equal(seen, told) {
		return nil, fmt.Errorf("rows by rank are %v, told were %v", seen, told)
	}
	for r, n := range seen {
		switch {
		case n > 0 && slices.Contains(without, r):
			return nil, fmt.Errorf("%d rows came from rank %d, which was lost before", n, r)
		case n > 0:
			came = append(came, r)
		}
	}
	return came, nil
}

// last checks the last round, whose combine had at least the ranks that rows have come from since, but for one that was taken in behind it. If
// that leaves out none but those which were known to be lost when it began, each token came back from all of its experts that have a copy left.
func (m *masked) last(came []int) error {
	if len(m.without) == 0 {
		return nil
	}
	for r := range m.Size {
		if !slices.Contains(m.without, r) && !slices.Contains(came, r) {
			return nil
		}
	}
	m.whole++
	for t, times := range m.times {
		want := 0
		for _, e := range m.choices[t*maskedTopK:][:maskedTopK] {
			if slices.ContainsFunc(m.copies(int(e)), func(r int) bool { return !slices.Contains(m.without, r) }) {
				want++
			}
		}
		if times != want {
			return fmt.Errorf("token %d with experts %v came back %d times, want %d without ranks %v", t, m.choices[t*maskedTopK:][:maskedTopK], times, want, m.without)
		}
	}
	return nil
}
