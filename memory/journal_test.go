package memory

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// record replays calls into a journal.
func record(calls ...call) *journal {
	j := new(journal)
	for _, c := range calls {
		j.add(c)
	}
	return j
}

func nthCall(k int) call {
	return call{kind: callAlloc, size: int64(k%7) * 100, off: int64(k) * alignment}
}

func nCalls(n int) []call {
	cs := make([]call, n)
	for k := range cs {
		cs[k] = nthCall(k)
	}
	return cs
}

// compareJournals sends the journals through their wire form.
func compareJournals(t testing.TB, js ...*journal) *DivergenceError {
	t.Helper()
	hs := make([]history, len(js))
	for r, j := range js {
		h, err := parseHistory(j.appendTo(nil))
		require.NoError(t, err)
		hs[r] = h
	}
	return diverged(hs)
}

func TestM3_FirstDifferentCallIsNamed(t *testing.T) {
	calls := nCalls(100)
	other := append([]call(nil), calls...)
	other[41].size = 4096
	same := record(calls...)

	require.Nil(t, compareJournals(t, same, same, same))
	require.Nil(t, compareJournals(t, record(), record()))

	e := compareJournals(t, same, record(other...), same)
	require.NotNil(t, e)
	require.True(t, e.Exact())
	require.Equal(t, int64(42), e.Call, "calls are counted from 1")
	require.Equal(t, []int{1}, e.Ranks)
	require.Equal(t, RankCall{Rank: 1, Kind: "alloc", Size: 4096, Offset: 41 * alignment}, e.Calls[1])
	require.Equal(t, RankCall{Rank: 2, Kind: "alloc", Size: 600, Offset: 41 * alignment}, e.Calls[2])
	require.ErrorIs(t, e, ErrDiverged)
	require.EqualError(t, e, "memory: ranks diverged at call 42 (rank 1 unlike the others): "+
		"ranks 0, 2: alloc of 600 bytes at segment 0 offset 10496; rank 1: alloc of 4096 bytes at segment 0 offset 10496")

	// a rank that left a call out, and one that left out the last
	e = compareJournals(t, same, same, record(append(append([]call(nil), calls[:10]...), calls[11:]...)...))
	require.Equal(t, []int{2}, e.Ranks)
	require.True(t, e.Exact())
	require.Equal(t, int64(11), e.Call)
	e = compareJournals(t, same, record(calls[:99]...))
	require.Equal(t, int64(100), e.Call)
	require.Equal(t, "none", e.Calls[1].Kind)
	require.Contains(t, e.Error(), "rank 1: no call")
	e = compareJournals(t, record(), record(calls[:1]...))
	require.Equal(t, int64(1), e.Call)

	// two ranks differ, in different places: the first place counts
	third := append([]call(nil), calls...)
	third[7] = call{kind: callFree, size: 256, off: 1}
	e = compareJournals(t, same, record(other...), record(third...), same)
	require.Equal(t, int64(8), e.Call)
	require.Equal(t, []int{2}, e.Ranks)
	oom := append([]call(nil), calls...)
	oom[0].off = -1
	require.Contains(t, compareJournals(t, same, record(oom...)).Error(), "out of memory")
}

func TestM3_DivergenceOlderThanTheLogIsBracketed(t *testing.T) {
	const n = 300_000
	for _, at := range []int{0, 1, 17, 1023, 150_000, n - recentCalls - 5, n - recentCalls, n - 1} {
		a, b := new(journal), new(journal)
		for k := range n {
			c := nthCall(k)
			a.add(c)
			if k == at {
				c.size++
			}
			b.add(c)
		}
		e := compareJournals(t, a, b)
		require.NotNil(t, e)
		require.Less(t, e.After, int64(at+1))
		require.GreaterOrEqual(t, e.Call, int64(at+1))
		if at > n-recentCalls { // the digest before the oldest call in the log is gone
			require.True(t, e.Exact(), at)
			require.Equal(t, int64(at+1), e.Call)
			continue
		}
		require.LessOrEqual(t, e.Call-e.After, 2*a.every, "the bracket is as narrow as the checkpoints")
		require.LessOrEqual(t, a.every, int64(2*n/markCount))
		require.Equal(t, []int{1}, e.Ranks)
		require.Nil(t, e.Calls)
		require.Contains(t, e.Error(), fmt.Sprintf("after call %d and before call %d", e.After, e.Call+1))
	}
}

func TestM3_BracketHoldsTheTruth(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 6))
	for range 300 {
		calls := nCalls(r.IntN(6000))
		made := make([][]call, 2+r.IntN(4))
		js := make([]*journal, len(made))
		for i := range made {
			made[i] = calls
			switch r.IntN(3) {
			case 0: // another call somewhere
				if len(calls) > 0 {
					made[i] = append([]call(nil), calls...)
					made[i][r.IntN(len(calls))].size = -7 - int64(i)
				}
			case 1: // some calls fewer at the end
				made[i] = calls[:r.IntN(len(calls)+1)]
			}
			js[i] = record(made[i]...)
		}
		truth := 1 << 30
		for i := range made {
			truth = min(truth, firstDifference(made[0], made[i]))
		}
		e := compareJournals(t, js...)
		if truth == 1<<30 {
			require.Nil(t, e)
			continue
		}
		require.NotNil(t, e)
		require.Less(t, e.After, int64(truth))
		require.GreaterOrEqual(t, e.Call, int64(truth))
		require.NotEmpty(t, e.Ranks)
		require.NotEmpty(t, e.Error())
	}
}

// firstDifference is the number of the first call in which a and b differ.
func firstDifference(a, b []call) int {
	for k := 0; k < len(a) || k < len(b); k++ {
		if k >= len(a) || k >= len(b) || a[k] != b[k] {
			return k + 1
		}
	}
	return 1 << 30
}

func FuzzHistory(f *testing.F) {
	f.Add(record().appendTo(nil))
	f.Add(record(nCalls(3)...).appendTo(nil))
	f.Add(record(nCalls(5000)...).appendTo(nil))
	base := record(nCalls(2000)...)
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := parseHistory(b)
		if err != nil {
			require.ErrorIs(t, err, errHistory)
			return
		}
		ours, err := parseHistory(base.appendTo(nil))
		require.NoError(t, err)
		if e := diverged([]history{ours, h}); e != nil {
			require.True(t, errors.Is(e, ErrDiverged))
			require.NotEmpty(t, e.Error())
			require.Less(t, e.After, e.Call)
		}
	})
}

func TestJournalAllocatesNothing(t *testing.T) {
	j := record(nCalls(5000)...)
	require.Zero(t, testing.AllocsPerRun(1000, func() { j.add(nthCall(1)) }))
}

func BenchmarkJournal(b *testing.B) {
	j := new(journal)
	b.ReportAllocs()
	for b.Loop() {
		j.add(nthCall(3))
	}
}
