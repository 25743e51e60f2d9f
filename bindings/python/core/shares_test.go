package core

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/memory"
)

// brief is how callers ask once, and limited how they end.
var (
	brief   = Waits{For: time.Millisecond}
	limited = Waits{Limit: time.Millisecond, For: time.Minute}
	patient = Waits{For: time.Minute}
)

// The peer's shared file is reached by puts and gets, and only as long as it is open.
func TestMemoryOfAFileIsShared(t *testing.T) {
	each(t, 2, func(c *Comm) error {
		me, _, err := c.Rank()
		require.NoError(t, err)
		peer, page := 1-me, int64(os.Getpagesize())
		fd, err := shm.Create("core", 2*page)
		require.NoError(t, err)
		seen, err := memory.MapFile(fd, 0, 2*page)
		require.NoError(t, err)
		copy(seen.Bytes()[page+10:], []byte{byte(me), 1, 2, 3})

		o, err := c.OpenShared(peer, brief)
		require.Nil(t, o)
		require.NoError(t, err, "ask again")
		o, err = c.OpenShared(peer, limited)
		require.Nil(t, o)
		require.ErrorIs(t, err, comm.ErrTimeout)
		_, err = c.OpenShared(peer, Waits{Limit: time.Second, Waited: time.Hour, For: time.Minute})
		require.ErrorIs(t, err, comm.ErrTimeout)
		for _, bad := range []struct{ bytes, offset int64 }{{0, 0}, {4, -1}, {4, 2*page - 1}} {
			_, err = c.Share(peer, Buffer{Bytes: bad.bytes}, fd, bad.offset)
			invalid(t, err)
		}
		meet(t, c)
		s, err := c.Share(peer, Buffer{Bytes: 4}, fd, page+10)
		require.NoError(t, err)
		o, err = c.OpenShared(peer, patient)
		require.NoError(t, err)
		over, err := s.Close(brief)
		require.False(t, over)
		require.NoError(t, err, "ask again")

		at := o.Memory()
		require.EqualValues(t, 4, at.Bytes)
		mine := []byte{7, byte(10 * me)}
		_, err = c.Transfer(0, &TransferCall{Kind: PutTransfer, Mine: buf(mine), At: Buffer{at.Addr + 1, 2}, Peer: int64(peer)})
		require.NoError(t, err)
		meet(t, c)
		require.Equal(t, []byte{byte(me), 7, byte(10 * peer), 3}, seen.Bytes()[page+10:page+14])
		got := make([]byte, 4)
		_, err = c.Transfer(0, &TransferCall{Kind: GetTransfer, Mine: buf(got), At: at, Peer: int64(peer)})
		require.NoError(t, err)
		require.Equal(t, []byte{byte(peer), 7, byte(10 * me), 3}, got)
		_, err = c.Transfer(0, &TransferCall{Kind: GetTransfer, Mine: buf(got), At: Buffer{at.Addr + 1, 4}, Peer: int64(peer)})
		invalid(t, err) // more than was shared

		meet(t, c)
		s2, err := c.Share(peer, Buffer{Bytes: 4}, fd, page+10)
		require.NoError(t, err)
		over, err = s2.Close(brief)
		require.False(t, over, "it can still be opened")
		require.NoError(t, err)
		over, err = s2.Close(limited)
		require.True(t, over)
		require.NoError(t, err, "the peer has not opened it, and cannot")
		meet(t, c)
		_, err = c.OpenShared(peer, patient)
		code, rank := Classify(err)
		require.Equal(t, Freed, code, "%v", err)
		require.Equal(t, -1, rank)

		require.NoError(t, o.Close())
		require.NoError(t, o.Close())
		_, err = c.Transfer(0, &TransferCall{Kind: GetTransfer, Mine: Buffer{at.Addr, 4}, At: at, Peer: int64(peer)})
		invalid(t, err)
		over, err = s.Close(patient)
		require.True(t, over)
		require.NoError(t, err)
		return errors.Join(seen.Close(), os.NewFile(uintptr(fd), "").Close())
	})
}

func invalid(t *testing.T, err error) {
	t.Helper()
	code, _ := Classify(err)
	require.Equal(t, Invalid, code, "%v", err)
}

// meet waits for the other ranks.
func meet(t *testing.T, c *Comm) {
	ticket, err := c.Barrier()
	_, err = await(c, ticket, err)
	require.NoError(t, err)
}

func TestMemoryOfAGPUIsShared(t *testing.T) {
	if !emulated.Kernels(t, "../../../kernels/cuda") {
		return
	}
	eachWith(t, 2, Options{TimeoutSeconds: 60}, func(c *Comm) error {
		g, err := openGPU(c, GPUOptions{Device: ownGPU(c), MaxSMs: 2})
		if err != nil {
			return err
		}
		me, _, err := c.Rank()
		require.NoError(t, err)
		s, err := g.dev.NewStream()
		require.NoError(t, err)
		cuda, handle, peer := g.dev.Context(), s.(*device.CUDAStream).Handle(), 1-me
		at, err := cuda.MemAlloc(64)
		require.NoError(t, err)
		require.NoError(t, cuda.Write(0, at, []byte{1, 2, 3, byte(me)}))
		_, err = g.Share(peer, Buffer{}, -1, 0)
		invalid(t, err)
		lent, err := g.Share(peer, Buffer{at, 32}, -1, 0)
		require.NoError(t, err)
		o, err := g.OpenShared(peer, patient)
		require.NoError(t, err)
		theirs := o.Memory()
		_, err = g.Transfer(handle, &TransferCall{Kind: GetTransfer, Mine: Buffer{at + 32, 4}, At: Buffer{theirs.Addr, 4}, Peer: int64(peer)})
		require.NoError(t, err)
		require.NoError(t, s.Synchronize())
		got := make([]byte, 4)
		require.NoError(t, cuda.Read(0, got, at+32))
		require.Equal(t, []byte{1, 2, 3, byte(peer)}, got)
		over, err := lent.Close(limited)
		require.True(t, over)
		require.ErrorIs(t, err, comm.ErrTimeout)
		meet(t, c)
		require.NoError(t, o.Close())
		over, err = lent.Close(patient)
		require.True(t, over)
		require.NoError(t, err)
		require.NoError(t, s.Close())
		require.NoError(t, cuda.MemFree(at))
		ticket, err := c.Close(false)
		_, err = await(c, ticket, err)
		return err
	})
}
