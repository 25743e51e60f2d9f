package dispatch_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// maskedRounds are rounds of a dispatcher whose ranks can be masked. Each of 8 experts is on two ranks, and returns its rows as they are.
type maskedRounds struct {
	*rank
	d      *dispatch.Dispatcher
	tokens int
	round  int
}

const (
	maskedHidden = 32
	maskedTopK   = 3
)

func newMaskedRounds(r *rank, tokens int, o dispatch.Options) *maskedRounds {
	p := &dispatch.Placement{Ranks: make([][]int, 8)}
	for e := range p.Ranks {
		p.Ranks[e] = []int{e % r.Size(), (e + 1 + e/r.Size()) % r.Size()}
	}
	o.Experts, o.TopK, o.Hidden, o.MaxTokens, o.Placement = 8, maskedTopK, maskedHidden, tokens, p
	o.Masks, o.HostCounts, o.Sources, o.Timeout = true, true, true, time.Minute
	d, err := dispatch.New(r.Ctx, r.Heap, o)
	require.NoError(r, err)
	return &maskedRounds{rank: r, d: d, tokens: tokens}
}

// send is the first half of a round. Elements of a token are equal: small numbers that tell rank, token and round.
func (m *maskedRounds) send() (h *dispatch.Handle, x []float32, err error) {
	m.round++
	x = make([]float32, m.tokens*maskedHidden)
	idx := make([]int32, m.tokens*maskedTopK)
	for t := range m.tokens {
		for i := range maskedHidden {
			x[t*maskedHidden+i] = float32(1 + m.Rank.Rank()*4096 + t*16 + m.round%16)
		}
		for k := range maskedTopK {
			idx[t*maskedTopK+k] = int32((t + m.round + 3*k) % 8)
		}
	}
	if m.gpu != nil {
		m.gpu.reuse()
	}
	h, err = m.d.DispatchSend(nil, m.rank.tokens(m.up(shm.Bytes(x)), idx, nil))
	return h, x, err
}

// end is the rest of a round. Each token comes back as often as at least one of its choices had a rank, whole says as often as all.
func (m *maskedRounds) end(h *dispatch.Handle, x []float32, whole bool) error {
	if err := m.d.DispatchReceive(nil, h); err != nil {
		return err
	}
	c := m.counts(h)
	rows, sources := shm.View[float32](m.down(h.Rows())), shm.View[int32](m.down(h.Sources()))
	froms := shm.View[int32](m.down(h.RankCounts()))
	seen := make([]int32, len(froms))
	for i, n := range c.Counts {
		for row := c.Offsets[i]; row < c.Offsets[i]+n; row++ {
			src, token, got := sources[2*row], sources[2*row+1], rows[int(row)*maskedHidden:][:maskedHidden]
			want := float32(0)
			if src >= 0 {
				seen[src]++
				want = float32(1 + int(src)*4096 + int(token)*16 + m.round%16)
			}
			require.Equal(m, want, got[0], "row %d of rank %d", row, src)
			require.Equal(m, want, got[maskedHidden-1])
		}
	}
	require.Equal(m, froms, seen, "rows by rank")
	sums := m.up(make([]byte, 4*len(x)))
	if err := m.d.Combine(nil, sums, h.Rows(), h, dispatch.CombineOptions{Weighting: dispatch.Unweighted}); err != nil {
		return err
	}
	y := shm.View[float32](m.down(sums))
	for i := range y {
		times := y[i] / x[i]
		require.Contains(m, []float32{0, 1, 2, 3}, times, "token %d", i/maskedHidden)
		require.Equal(m, y[i/maskedHidden*maskedHidden], y[i])
		if whole {
			require.Equal(m, float32(maskedTopK), times, "token %d of round %d", i/maskedHidden, m.round)
		}
	}
	h.Release()
	return nil
}

func (m *maskedRounds) whole() {
	h, x, err := m.send()
	require.NoError(m, err)
	require.NoError(m, m.end(h, x, true))
}

func (m *maskedRounds) masked() []int {
	ranks, err := m.d.Masked()
	require.NoError(m, err)
	return ranks
}

// A rank stops at several places of its rounds and is masked: the calls of the others end without it, later ones send its experts'
// tokens to replicas, and it comes back between two calls of the others.
func TestAMaskedRankIsLeftOutAndComesBack(t *testing.T) {
	for _, o := range []dispatch.Options{{}, {LowLatency: true, Layout: dispatch.Slab}, {Layout: dispatch.Padded, Landed: true}} {
		local(t, 4, func(r *rank) { isLeftOutAndComesBack(r, o) })
	}
}

func isLeftOutAndComesBack(r *rank, o dispatch.Options) {
	m := newMaskedRounds(r, 16, o)
	r.Barrier()
	for turn := range 12 {
		m.whole()
		victim, place, me := turn%4, turn%3, r.Group.Rank()
		if me != victim {
			h, x, err := m.send()
			require.NoError(r, err)
			require.NoError(r, m.end(h, x, false))
			for len(m.masked()) > 0 {
				h, x, err := m.send()
				require.NoError(r, err)
				require.NoError(r, m.end(h, x, len(m.masked()) > 0))
			}
			continue
		}
		var h *dispatch.Handle
		var err error
		switch place {
		case 0: // before the dispatch
			require.NoError(r, m.d.Mask(victim))
		case 1: // between its halves
			h, _, err = m.send()
			require.NoError(r, err)
			require.NoError(r, m.d.Mask(victim))
		case 2: // before the combine
			h, _, err = m.send()
			require.NoError(r, err)
			require.NoError(r, m.d.DispatchReceive(nil, h))
			require.NoError(r, m.d.Mask(victim))
		}
		if h != nil {
			h.Release()
		}
		require.Equal(r, []int{victim}, m.masked())
		_, _, err = m.send()
		var masked *kernels.MaskedError
		require.ErrorAs(r, err, &masked)
		require.Equal(r, victim, masked.Rank)
		calls, err := m.d.Unmask(r.Ctx)
		require.NoError(r, err)
		require.Zero(r, calls%2, "it comes back behind a combine")
		m.round = int(calls / 2)
		require.Empty(r, m.masked())
	}
	require.NoError(r, m.d.Close(r.Ctx))
	require.ErrorIs(r, m.d.Mask(0), comm.ErrClosed)
}

// Processes are killed one after the other, at any place of their calls, until one is left: the others go on, without a new group.
func TestProcessesThatAreKilledAreMasked(t *testing.T) {
	const ranks = 4
	if !proctest.Again() {
		ps := proctest.Ranks(t, ranks, loopback.Addr(), proctest.Spec{})
		for r, err := range proctest.Failures(ps) {
			if r == ranks-1 {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, "killed")
			}
		}
		return
	}
	processes(t, ranks, func(r *rank) { areKilledAndMasked(r, dispatch.Options{LowLatency: true}) })
}

// areKilledAndMasked kills all ranks but the last, and returns how long the longest round took in which a rank was lost.
func areKilledAndMasked(r *rank, o dispatch.Options) (longest time.Duration) {
	ranks := r.Size()
	m := newMaskedRounds(r, 256, o)
	r.Barrier()
	me := r.Group.Rank()
	for lost := 0; lost < ranks-1; {
		if lost == me && m.round >= 5*(lost+1) {
			spins := rand.IntN(200_000)
			go func() {
				for range spins {
					shm.Pause(1)
				}
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			}()
		}
		began := time.Now()
		h, x, err := m.send()
		require.NoError(r, err)
		require.NoError(r, m.end(h, x, false))
		if now := len(m.masked()); now != lost {
			lost, longest = now, max(longest, time.Since(began))
		}
	}
	require.Len(r, m.masked(), ranks-1)
	require.NoError(r, r.Group.Err())
	err := r.Group.Barrier(r.Ctx)
	require.True(r, errors.Is(err, comm.ErrPeerLost), "%v", err)
	require.NoError(r, m.d.Close(r.Ctx))
	return longest
}

// A rank that is masked in a combine, while others are yet to make it, is taken in behind the same combine.
func TestARankIsTakenInBehindTheCombineInWhichItWasMasked(t *testing.T) {
	const victim, late = 0, 1
	begun, asked := make(chan struct{}), make(chan struct{})
	local(t, 4, func(r *rank) {
		m := newMaskedRounds(r, 16, dispatch.Options{})
		m.whole()
		h, x, err := m.send()
		require.NoError(r, err)
		require.NoError(r, m.d.DispatchReceive(nil, h))
		combine := func() error {
			return m.d.Combine(nil, numbers(make([]float32, len(x))), h.Rows(), h, dispatch.CombineOptions{Weighting: dispatch.Unweighted})
		}
		switch r.Group.Rank() {
		case victim:
			go func() {
				time.Sleep(20 * time.Millisecond)
				close(begun)
			}()
			var masked *kernels.MaskedError
			require.ErrorAs(r, combine(), &masked)
			go func() {
				time.Sleep(20 * time.Millisecond)
				close(asked)
			}()
			calls, err := m.d.Unmask(r.Ctx)
			require.NoError(r, err)
			m.round = int(calls / 2)
		case late:
			<-begun
			require.NoError(r, m.d.Mask(victim))
			<-asked
			require.NoError(r, combine())
		default:
			require.NoError(r, combine())
		}
		h.Release()
		for len(m.masked()) > 0 { // it asked later, on a busy machine
			h, x, err := m.send()
			require.NoError(r, err)
			require.NoError(r, m.end(h, x, false))
		}
		m.whole()
		require.NoError(r, m.d.Close(r.Ctx))
	})
}

// A rank is masked again and again by any other, also while it is being taken in: no rank waits for it then.
func TestARankIsMaskedWhileItIsTakenIn(t *testing.T) {
	const victim, rounds = 1, 1000
	local(t, 4, func(r *rank) {
		m := newMaskedRounds(r, 4, dispatch.Options{})
		r.Barrier()
		if r.Group.Rank() != victim {
			var masking sync.WaitGroup
			over, end := context.WithCancel(r.Ctx)
			defer masking.Wait() // also where the test fails
			defer end()
			masking.Go(func() {
				for over.Err() == nil {
					time.Sleep(rand.N(time.Millisecond))
					_ = m.d.Mask(victim) // the test may fail, and the dispatcher be closed
				}
			})
			for range rounds {
				h, x, err := m.send()
				require.NoError(r, err)
				require.NoError(r, m.end(h, x, false))
			}
			end()
			masking.Wait()
			require.NoError(r, m.d.Mask(victim)) // it may be in a call that the others do not make
		} else {
			for m.round < rounds {
				h, x, err := m.send()
				if err == nil {
					err = m.end(h, x, false)
				}
				if err == nil {
					continue
				}
				var masked *kernels.MaskedError
				require.ErrorAs(r, err, &masked)
				if h != nil {
					h.Release()
				}
				ctx, stop := context.WithTimeout(r.Ctx, time.Second) // the others may have made all of their calls
				calls, err := m.d.Unmask(ctx)
				stop()
				if errors.Is(err, context.DeadlineExceeded) {
					break
				}
				require.NoError(r, err)
				m.round = int(calls / 2)
			}
		}
		require.NoError(r, m.d.Close(r.Ctx))
	})
}

func TestWhatMasksLeaveOut(t *testing.T) {
	local(t, 4, func(r *rank) {
		m := newMaskedRounds(r, 4, dispatch.Options{})
		h, x, err := m.send()
		require.NoError(r, err)
		require.ErrorIs(r, m.d.Redispatch(nil, h, numbers(x), none), comm.ErrUnsupported)
		require.ErrorIs(r, m.d.CombineBackward(nil, none, none, none, none, h, plain), comm.ErrUnsupported)
		require.NoError(r, m.end(h, x, true))
		require.ErrorIs(r, m.d.Mask(4), comm.ErrInvalid)
		calls, err := m.d.Unmask(r.Ctx) // it is not masked
		require.NoError(r, err)
		require.EqualValues(r, 2, calls)
		require.NoError(r, m.d.Close(r.Ctx))
		d := r.dispatcher(small(dispatch.Options{}))
		require.ErrorIs(r, d.Mask(0), comm.ErrInvalid)
		require.NoError(r, d.Close(r.Ctx))
	})
}
