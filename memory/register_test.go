package memory

import (
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/shm"
)

// object is a shared memory object of n bytes.
func object(t require.TestingT, n int64) int {
	fd, err := shm.Create("test", n)
	require.NoError(t, err)
	return fd
}

func mapped(t require.TestingT, fd int, off, n int64) *Mapping {
	m, err := MapFile(fd, off, n)
	require.NoError(t, err)
	return m
}

func TestM7_RegisteredMemoryIsSymmetric(t *testing.T) { everywhere(t, 3, "register") }

func registerScenario(t *rankT, g *comm.Group) {
	h := heapOf(t, g, Options{SegmentBytes: 2 << 20, ReserveBytes: 16 << 20})
	sp := h.Space()
	page := pageSize()
	me := g.Rank()

	// parts of unequal length, at unequal places of their files; rank 2 brings nothing
	length := func(r int) int64 { return int64(2-r)*70_000 + int64(r%2)*123 }
	fd := object(t, 1<<20)
	m := mapped(t, fd, int64(me)*page, length(me))
	require.NoError(t, closeFD(fd), "the mapping holds the memory")
	for i := range m.Bytes() {
		m.Bytes()[i] = byte(i*7 + me)
	}
	v := m.View()
	if me == 2 {
		v = View{}
	}
	r, err := h.Register(t.ctx, v)
	require.NoError(t, err)
	require.Equal(t, length(me), r.View().Len())
	off, ok := r.View().Symmetric(h)
	require.True(t, ok)
	require.Equal(t, r.Offset(), off)
	for _, o := range gather(t, g, []int64{r.Offset()}) {
		require.Equal(t, r.Offset(), o[0])
	}
	require.Equal(t, m.Bytes(), r.View().Bytes(), "the same memory twice")
	for p := range g.Size() {
		require.Equal(t, length(p), r.PeerLen(p))
		for i, c := range sp.Range(p, r.Offset(), r.PeerLen(p)) {
			if c != byte(i*7+p) {
				require.Fail(t, "wrong byte", "rank %d byte %d", p, i)
			}
		}
	}
	require.NoError(t, g.Barrier(t.ctx))
	if p := (me + 1) % g.Size(); length(p) > 0 {
		sp.Range(p, r.Offset()+5, 1)[0] = byte(100 + me)
	}
	require.NoError(t, g.Barrier(t.ctx))
	if me < 2 {
		require.Equal(t, byte(100+(me+2)%3), m.Bytes()[5], "what a peer writes, the owner reads")
		off, ok = m.View().Slice(page, 10).Symmetric(h)
		require.True(t, ok, "the mapping itself is found by its identity")
		require.Equal(t, r.Offset()+page, off)
	}

	// what one rank cannot do is an error on all, and does no harm
	for _, bad := range []struct {
		view View
		is   error
		text string
	}{
		{Host(make([]byte, 100)), ErrUnsupported, "file descriptor"},
		{Device(0x1000, 100), ErrUnsupported, "device memory"},
		{r.View().Slice(0, min(1, r.View().Len())), ErrUnsupported, "already"},
		{m.View().Slice(min(1, m.View().Len()), min(1, max(0, m.View().Len()-1))), ErrInvalid, "multiple"},
	} {
		v := View{}
		if me == 0 {
			v = bad.view
		}
		_, err := h.Register(t.ctx, v)
		require.ErrorIs(t, err, bad.is)
		require.ErrorContains(t, err, bad.text)
		if me == 1 {
			require.ErrorContains(t, err, "rank 0")
		}
	}
	require.NoError(t, m.Close())
	require.NoError(t, m.Close())
	require.ErrorIs(t, m.View().Valid(), ErrFreed)
	_, ok = m.View().Symmetric(h)
	require.False(t, ok)
	dead := View{}
	if me == 1 {
		dead = m.View()
	}
	_, err = h.Register(t.ctx, dead)
	require.ErrorIs(t, err, ErrFreed)
	// the registration does not need the mapping
	if me == 0 {
		r.View().Bytes()[0] = 77
	}
	require.NoError(t, g.Barrier(t.ctx))
	require.Equal(t, byte(77), sp.Range(0, r.Offset(), 1)[0])

	// a second one has a place of its own, and the first one's place is used again
	require.NoError(t, g.Barrier(t.ctx))
	m2 := mapped(t, object(t, 1<<20), 0, 1<<20)
	r2, err := h.Register(t.ctx, m2.View())
	require.NoError(t, err)
	require.NotEqual(t, r.Offset(), r2.Offset())
	require.Equal(t, 2, h.Stats().Registrations)
	require.NoError(t, r.Deregister(t.ctx))
	require.ErrorIs(t, r.Deregister(t.ctx), ErrFreed)
	require.ErrorIs(t, r.View().Valid(), ErrFreed)
	_, ok = r.View().Symmetric(h)
	require.False(t, ok)
	r3, err := h.Register(t.ctx, m2.View().Slice(0, page))
	require.NoError(t, err)
	require.Equal(t, r.Offset(), r3.Offset())

	// more than fits is refused on all ranks
	big := mapped(t, object(t, 64<<20), 0, 64<<20)
	_, err = h.Register(t.ctx, big.View())
	require.ErrorIs(t, err, ErrOutOfMemory)
	require.NoError(t, big.Close())

	// ranks that deregister different things learn it
	which := r2
	if me == 1 {
		which = r3
	}
	err = which.Deregister(t.ctx)
	require.ErrorIs(t, err, comm.ErrMismatch)
	require.NoError(t, which.View().Valid())
	require.NoError(t, h.Verify(t.ctx))
	require.NoError(t, h.Close(t.ctx))
	require.NoError(t, r2.Deregister(t.ctx), "nothing left to do")
	require.NoError(t, m2.Close())
}

func TestM7_IdentityNotAddress(t *testing.T) {
	h := oneRank(t, Options{SegmentBytes: 1 << 20})
	page := pageSize()
	fd := object(t, 16*page)
	m := mapped(t, fd, 4*page, 8*page)
	r, err := h.Register(t.Context(), m.View())
	require.NoError(t, err)
	require.Equal(t, 1, h.Stats().Registrations)

	// the same address and the same bytes, but not that memory
	copyOf := Host(m.Bytes())
	_, ok := copyOf.Symmetric(h)
	require.False(t, ok)

	// another mapping of the same memory at another address is that memory
	again := mapped(t, fd, 0, 16*page)
	require.NotEqual(t, m.View().Ptr(), again.View().Ptr())
	off, ok := again.View().Slice(5*page, page).Symmetric(h)
	require.True(t, ok)
	require.Equal(t, r.Offset()+page, off)
	for _, s := range [][2]int64{{0, page}, {3 * page, 2 * page}, {4 * page, 9 * page}, {4*page - 1, 2}} {
		_, ok = again.View().Slice(s[0], s[1]).Symmetric(h)
		require.False(t, ok, "outside what is registered: %v", s)
	}

	// freed, and other memory comes to lie at the address: a miss
	address := m.View().Ptr()
	require.NoError(t, again.Close())
	require.NoError(t, m.Close())
	var other *Mapping
	for range 100 {
		fd2 := object(t, 16*page)
		other = mapped(t, fd2, 4*page, 8*page)
		if other.View().Ptr() == address {
			break
		}
	}
	require.Equal(t, address, other.View().Ptr(), "the kernel did not use the address again")
	_, ok = other.View().Symmetric(h)
	require.False(t, ok, "a freed and mapped address is a miss")
	r2, err := h.Register(t.Context(), other.View())
	require.NoError(t, err)
	require.NotEqual(t, r.Offset(), r2.Offset())
	off, ok = other.View().Symmetric(h)
	require.True(t, ok)
	require.Equal(t, r2.Offset(), off)
	r.View().Bytes()[0], r2.View().Bytes()[0] = 1, 2
	require.Equal(t, byte(1), r.View().Bytes()[0])
	require.Equal(t, byte(2), other.Bytes()[0])

	require.NoError(t, r2.Deregister(t.Context()))
	_, ok = other.View().Symmetric(h)
	require.False(t, ok)
	// the newest of two registrations of the same memory is found, then the other
	third := mapped(t, fd, 4*page, page)
	off, ok = third.View().Symmetric(h)
	require.True(t, ok)
	require.Equal(t, r.Offset(), off)
	r3, err := h.Register(t.Context(), third.View())
	require.NoError(t, err)
	off, _ = third.View().Symmetric(h)
	require.Equal(t, r3.Offset(), off)
	require.NoError(t, r3.Deregister(t.Context()))
	off, _ = third.View().Symmetric(h)
	require.Equal(t, r.Offset(), off)
	require.Zero(t, testing.AllocsPerRun(100, func() { third.View().Symmetric(h) }))
}

func TestShortFilesAreNotMapped(t *testing.T) {
	h := oneRank(t, Options{SegmentBytes: 1 << 20})
	fd := object(t, 4*pageSize())
	defer closeFD(fd)
	m := mapped(t, fd, 0, 4*pageSize())
	defer m.Close()
	require.NoError(t, os.Truncate(fmt.Sprintf("/proc/self/fd/%d", fd), pageSize()))
	_, err := h.Register(t.Context(), m.View())
	require.ErrorIs(t, err, ErrInvalid)
	require.Zero(t, h.Stats().Registrations)
	_, err = h.Register(t.Context(), m.View().Slice(0, pageSize()))
	require.NoError(t, err)
}

func TestMapFileRefusals(t *testing.T) {
	page := pageSize()
	fd := object(t, 3*page+10)
	defer closeFD(fd)
	for _, c := range [][2]int64{{0, 3*page + 11}, {page, 3 * page}, {4 * page, 0}, {-page, page}, {0, -1}, {1, page}} {
		_, err := MapFile(fd, c[0], c[1])
		require.ErrorIs(t, err, ErrInvalid, c)
	}
	_, err := MapFile(-1, 0, 1)
	require.Error(t, err)
	m := mapped(t, fd, page, 2*page+10)
	require.Len(t, m.Bytes(), int(2*page+10))
	require.NoError(t, m.Close())
	m = mapped(t, fd, 0, 0)
	require.Empty(t, m.Bytes())
	require.NoError(t, m.Close())

	// a file on a disk works as well
	f, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteString("hello, file")
	require.NoError(t, err)
	m = mapped(t, int(f.Fd()), 0, 11)
	defer m.Close()
	require.Equal(t, "hello, file", string(m.Bytes()))
}

func TestM5_RegistrationsLeaveNothing(t *testing.T) {
	for kind, groups := range map[string]func(testing.TB, int) []*comm.Group{"local": localRanks, "sockets": socketRanks} {
		t.Run(kind, func(t *testing.T) {
			runRanks(t, groups(t, 2), func(t *rankT, g *comm.Group) {
				h := heapOf(t, g, Options{})
				fd := object(t, 1<<20)
				defer closeFD(fd)
				one := func(int) {
					m := mapped(t, fd, 0, 1<<20)
					r, err := h.Register(t.ctx, m.View())
					require.NoError(t, err)
					require.NoError(t, r.Deregister(t.ctx))
					require.NoError(t, m.Close())
				}
				var before, after string
				look := func(s *string) {
					require.NoError(t, g.Barrier(t.ctx))
					d, err := os.ReadDir("/proc/self/fd")
					require.NoError(t, err)
					*s = fmt.Sprint(len(d))
					require.NoError(t, g.Barrier(t.ctx))
				}
				one(0)
				if g.Rank() == 0 {
					look(&before)
				} else {
					look(new(string))
				}
				for i := range 200 {
					one(i)
				}
				if g.Rank() == 0 {
					maps := mappings()
					look(&after)
					require.Equal(t, len(before), len(after))
					require.Less(t, maps, 500)
				} else {
					look(new(string))
				}
				require.NoError(t, h.Close(t.ctx))
			})
		})
	}
}
