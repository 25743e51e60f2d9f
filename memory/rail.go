package memory

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/agree"
	"github.com/switchyard-moe/switchyard/internal/rails"
	"github.com/switchyard-moe/switchyard/internal/rails/proxy"
	"github.com/switchyard-moe/switchyard/internal/rails/ucx"
	"github.com/switchyard-moe/switchyard/kernels"
	kernelscuda "github.com/switchyard-moe/switchyard/kernels/cuda"
)

// openRail makes a rank's end of a rail: ucx.Open but in tests.
type openRail func(rails.Config) (rails.Rail, error)

// ringer is an engine whose waits a goroutine of the process can end. After Leave it does so for its own rank alone.
type ringer interface {
	Ring()
	Leave()
}

// Rail carries bytes to all ranks of other hosts. It knows ranks by their numbers in the group. On the host its places are offsets in the
// heap's pool: registrations are not open to puts, and a put that has landed wakes this rank's engine. On GPUs they are those of AllocRail.
// It is nil on one host. It belongs to the heap, which closes it.
func (h *Heap) Rail() rails.Rail { return h.rail }

// Hosts is what launches of ranks on several hosts need, nil on one host.
func (h *Heap) Hosts() *kernels.Hosts {
	if h.rail == nil {
		return nil
	}
	t := h.group.Topology()
	host := make([]int, h.group.Size())
	for r := range host {
		host[r] = t.HostOf(r)
	}
	limit := h.limit
	if h.across != nil {
		limit = h.RailBytes()
	}
	return &kernels.Hosts{Rank: h.group.Rank(), Ranks: h.space.Ranks, Host: host, Limit: limit, Rail: h.rail}
}

// joinRail makes this rank's end of the heap's rail and connects it, together with all ranks. The pool's first extent is committed.
func (h *Heap) joinRail(ctx context.Context, open openRail) error {
	g, t := h.group, h.group.Topology()
	if t.Hosts == 1 {
		return nil
	}
	// The key is made of what all ranks have drawn.
	var drawn [8]byte
	_, err := rand.Read(drawn[:])
	door := g.Door()
	claim := agree.Claim{Op: "key of the rail", Info: []int64{int64(binary.LittleEndian.Uint64(drawn[:]))}}
	if door.IsValid() {
		claim.Own = addresses(door)
	}
	claims, err := agree.On(ctx, g, claim, err)
	if err != nil {
		return err
	}
	var key uint64
	for _, c := range claims {
		key ^= uint64(c.Info[0])
	}

	claim = agree.Claim{Op: "open the rail"}
	cfg, first := rails.Config{Rank: g.Rank(), Size: g.Size(), Key: key, Interface: door, From: othersAddresses(claims.Owns(), &t)}, h.extents[0].n
	if h.gpu == nil {
		cfg.Segment, cfg.Ring = h.space.Segment(h.space.Rank), h.engine.(ringer).Ring
	} else if h.across, err = h.pinRail(); err == nil {
		cfg.Segment, cfg.Ring, first = h.across.segment.Bytes(), func() {}, h.RailBytes() // kernels look themselves
	}
	if err == nil {
		h.rail, err = open(cfg)
	}
	switch {
	case errors.Is(err, ucx.ErrUnavailable):
		err = fmt.Errorf("%w: a heap on %d hosts: %w", ErrUnsupported, t.Hosts, err)
	case err == nil:
		claim.Own = base64.StdEncoding.EncodeToString(h.rail.Address())
		err = h.rail.Open(0, first)
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
	if err == nil {
		err = h.meet(ctx)
	}
	if _, err = agree.On(ctx, g, agree.Claim{Op: "connect the rail"}, err); err == nil && h.across != nil {
		s := h.across.segment
		h.across.proxy = proxy.New(h.rail, s.Bytes())
		h.engine.(*kernelscuda.Engine).Cross(kernelscuda.Crossing{Segment: s.Bytes(), Address: s.Addr(), Proxy: h.across.proxy})
	}
	return err
}

// meet waits until the rail has connected all, for no longer than a rank may be silent.
func (h *Heap) meet(ctx context.Context) error {
	within := h.group.PeerTimeout()
	ctx, cancel := context.WithTimeoutCause(ctx, within, fmt.Errorf("%w after %v", comm.ErrTimeout, within))
	defer cancel()
	err := h.rail.Meet(ctx)
	var peer *comm.PeerError
	if t := h.group.Topology(); errors.As(err, &peer) {
		return &comm.PeerError{Rank: peer.Rank, Op: "connect the rail", Err: fmt.Errorf("on host %d: %w", t.HostOf(peer.Rank), peer.Err)}
	}
	return err
}

// addresses are those of this host, the one of the control plane first, for its ranks to be known by.
func addresses(door netip.Addr) string {
	list := []string{door.String()}
	all, err := net.InterfaceAddrs()
	if err != nil {
		return list[0]
	}
	for _, a := range all {
		p, err := netip.ParsePrefix(a.String())
		if ip := p.Addr().Unmap(); err == nil && !ip.IsLoopback() && !ip.IsLinkLocalUnicast() && ip != door {
			list = append(list, ip.String())
		}
	}
	return strings.Join(list, " ")
}

// othersAddresses are those that ranks of other hosts have told, without those that this host has too, but for their first.
func othersAddresses(told []string, t *comm.Topology) (from []netip.Addr) {
	own := map[netip.Addr]bool{}
	for r, text := range told {
		for _, a := range strings.Fields(text) {
			if ip, err := netip.ParseAddr(a); err == nil && t.HostOf(r) == t.Host {
				own[ip.WithZone("")] = true
			}
		}
	}
	for r, text := range told {
		for i, a := range strings.Fields(text) {
			ip, err := netip.ParseAddr(a)
			if ip = ip.WithZone(""); err == nil && t.HostOf(r) != t.Host && (i == 0 || !own[ip]) && !slices.Contains(from, ip) {
				from = append(from, ip)
			}
		}
	}
	return from
}

// extendRail opens an extent of the pool to puts, on all ranks before any of them returns. Those between GPUs do not go to the pool.
func (h *Heap) extendRail(ctx context.Context, e extent) error {
	if h.rail == nil || h.gpu != nil {
		return nil
	}
	_, err := agree.On(ctx, h.group, agree.Claim{Op: "grow: rail"}, h.rail.Open(e.off, e.n))
	return err
}
