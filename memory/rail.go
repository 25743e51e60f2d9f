package memory

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/rails/ucx"
)

// openRail makes a rank's end of a rail: ucx.Open but in tests.
type openRail func(rails.Config) (rails.Rail, error)

// ringer is an engine whose waits a goroutine of the process can end.
type ringer interface{ Ring() }

// Rail carries bytes to all ranks of other hosts. It knows ranks by their numbers in the group, and its places are offsets in the heap's pool: registrations are not open to puts. A put that has landed wakes this rank's engine. It is nil on
// one host. It belongs to the heap, which closes it.
func (h *Heap) Rail() rails.Rail { return h.rail }

// joinRail makes this rank's end of the heap's rail and connects it, together with all ranks. The pool's first extent is committed.
func (h *Heap) joinRail(ctx context.Context, open openRail) error {
	g, t := h.group, h.group.Topology()
	if t.Hosts == 1 {
		return nil
	}
	// The key is made of what all ranks have drawn.
	var drawn [8]byte
	_, err := rand.Read(drawn[:])
	claims, err := agree.On(ctx, g, agree.Claim{Op: "key of the rail", Info: []int64{int64(binary.LittleEndian.Uint64(drawn[:]))}}, err)
	if err != nil {
		return err
	}
	var key uint64
	for _, c := range claims {
		key ^= uint64(c.Info[0])
	}

	claim := agree.Claim{Op: "open the rail"}
	h.rail, err = open(rails.Config{
		Rank: g.Rank(), Size: g.Size(), Key: key, Segment: h.space.Segment(h.space.Rank), Ring: h.engine.(ringer).Ring,
	})
	switch {
	case errors.Is(err, ucx.ErrUnavailable):
		err = fmt.Errorf("%w: a heap on %d hosts: %w", ErrUnsupported, t.Hosts, err)
	case err == nil:
		claim.Own = base64.StdEncoding.EncodeToString(h.rail.Address())
		err = h.rail.Open(0, h.extents[0].n)
	}
	if claims, err = agree.On(ctx, g, claim, err); err != nil {
		return err
	}

	for peer := range g.Size() {
		if t.HostOf(peer) != t.Host && err == nil {
			var address []byte
			if address, err = base64.StdEncoding.DecodeString(claims[peer].Own); err == nil {
				err = h.rail.Connect(peer, address)
			}
		}
	}
	_, err = agree.On(ctx, g, agree.Claim{Op: "connect the rail"}, err)
	return err
}

// extendRail opens an extent of the pool to puts, on all ranks before any of them returns.
func (h *Heap) extendRail(ctx context.Context, e extent) error {
	if h.rail == nil {
		return nil
	}
	_, err := agree.On(ctx, h.group, agree.Claim{Op: "grow: rail"}, h.rail.Open(e.off, e.n))
	return err
}
