package shm

import (
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestCopyStreamAnyLengthAndAlignment(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	src := make([]byte, 5000)
	for i := range src {
		src[i] = byte(rnd.Uint32())
	}
	for range 2000 {
		n, from, to := rnd.IntN(4000), rnd.IntN(200), rnd.IntN(200)
		dst := make([]byte, 5000)
		CopyStream(dst[to:to+n], src[from:from+n])
		Fence()
		want := make([]byte, 5000)
		copy(want[to:], src[from:from+n])
		require.Equal(t, want, dst, "%d bytes from %d to %d", n, from, to)
	}
}

func TestRangeMapsSharesAndUnmaps(t *testing.T) {
	page := int64(os.Getpagesize())
	r, err := Reserve(8 * page)
	require.NoError(t, err)
	fd, err := Create("shm-test", 2*page)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, r.MapFD(page, fd, 0, 2*page))
	require.NoError(t, r.MapFD(5*page, fd, page, page))
	r.Bytes()[2*page+3] = 77
	require.EqualValues(t, 77, r.Bytes()[5*page+3], "two mappings of one page")
	Word(r.Bytes(), page).Store(1 << 40)
	require.EqualValues(t, 1<<8, View[uint32](r.Bytes()[page : page+8])[1])
	require.Error(t, r.MapFD(7*page, fd, 0, 2*page))
	require.Error(t, r.UnmapRange(-page, page))
	require.NoError(t, r.UnmapRange(page, 2*page))
	require.NoError(t, r.Close())
	require.NoError(t, r.Close())
}

func TestIdentityTellsObjectsApart(t *testing.T) {
	a, err := Create("a", 4096)
	require.NoError(t, err)
	defer unix.Close(a)
	b, err := Create("b", 4096)
	require.NoError(t, err)
	defer unix.Close(b)
	ia, err := Identify(a)
	require.NoError(t, err)
	ib, err := Identify(b)
	require.NoError(t, err)
	require.NotEqual(t, ia, ib)
	require.NoError(t, unix.Ftruncate(a, 8192))
	grown, err := Identify(a)
	require.NoError(t, err)
	require.Equal(t, ia.Ino, grown.Ino)
	require.EqualValues(t, 8192, grown.Size)
}

func TestFutexWakesAndTimesOut(t *testing.T) {
	word := Word32(make([]byte, 8), 0)
	start := time.Now()
	FutexWait(word, 0, 5*time.Millisecond)
	require.GreaterOrEqual(t, time.Since(start), 4*time.Millisecond)
	FutexWait(word, 1, time.Hour) // has another value already
	go func() {
		time.Sleep(5 * time.Millisecond)
		word.Store(1)
		FutexWake(word)
	}()
	for word.Load() == 0 {
		FutexWait(word, 0, time.Second)
	}
}

func TestMoveToRunsThere(t *testing.T) {
	for _, c := range Cores() {
		MoveTo(c)
	}
	require.Contains(t, Cores(), Core())
}

func TestSleepLastsAsLongAsItIsAsked(t *testing.T) {
	for _, d := range []time.Duration{20 * time.Microsecond, time.Millisecond} {
		began := time.Now()
		Sleep(d)
		require.GreaterOrEqual(t, time.Since(began), d)
	}
}
