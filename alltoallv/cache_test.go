package alltoallv

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func splitsOf(n int64) *Splits { return &Splits{Send: []int64{n, 1}, Recv: []int64{n, 2}} }

func TestCacheForgetsTheLeastRecentlyUsed(t *testing.T) {
	c := newCache(2)
	add := func(n int64) {
		p, h := c.get(splitsOf(n))
		require.Nil(t, p)
		p = c.blank()
		require.NoError(t, p.build(splitsOf(n), 0, 2))
		c.put(h, p)
	}
	hit := func(n int64) bool { p, _ := c.get(splitsOf(n)); return p != nil }
	add(1)
	add(2)
	require.True(t, hit(1))
	add(3) // 2 has not been used for longest
	require.False(t, hit(2))
	require.True(t, hit(1))
	require.True(t, hit(3))
	require.Len(t, c.plans, 2)
}

func TestCacheChecksEqualityOnAHit(t *testing.T) {
	c := newCache(4)
	p := c.blank()
	require.NoError(t, p.build(splitsOf(1), 0, 2))
	c.put(splitsOf(2).hash(), p) // as if both had one hash
	got, h := c.get(&Splits{Send: []int64{2, 1}, Recv: []int64{2, 2}})
	require.Nil(t, got)
	other := c.blank()
	require.NoError(t, other.build(splitsOf(2), 0, 2))
	c.put(h, other)
	got, _ = c.get(splitsOf(2))
	require.Same(t, other, got)
	require.Len(t, c.plans, 1)
}

func TestCacheKeepsPlansThatLaunchesRead(t *testing.T) {
	c := newCache(1)
	p := c.blank()
	require.NoError(t, p.build(splitsOf(1), 0, 2))
	c.put(splitsOf(1).hash(), p)
	p.users.Add(1)
	require.NotSame(t, p, c.blank())
	q := c.blank()
	require.NoError(t, q.build(splitsOf(2), 0, 2))
	c.put(splitsOf(2).hash(), q)
	require.Same(t, q, c.blank())
}

func TestSplitsThatLookAlikeDiffer(t *testing.T) {
	base := &Splits{Send: []int64{1, 2}, Recv: []int64{3, 4}}
	for _, other := range []*Splits{
		{Send: []int64{1, 2}, Recv: []int64{3, 4}, ElemSize: 2},
		{Send: []int64{3, 4}, Recv: []int64{1, 2}},
		{Send: []int64{1, 2}, Recv: []int64{3, 4}, SendDispls: []int64{0, 1}},
		{Send: []int64{1, 2}, Recv: []int64{3, 4}, RecvDispls: []int64{0, 3}},
		{Send: []int64{1, 3}, Recv: []int64{3, 4}},
	} {
		require.False(t, base.equal(other), "%+v", other)
		require.NotEqual(t, base.hash(), other.hash(), "%+v", other)
	}
	require.True(t, base.equal(&Splits{Send: []int64{1, 2}, Recv: []int64{3, 4}, ElemSize: 1}))
}
