//go:build cgo && linux

package ucx

/*
#include "swucx.h"
#include <stdlib.h>
*/
import "C"

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/rails"
)

// maxAddress is the most bytes that a worker's address has.
const maxAddress = 16 << 10

// Open opens UCX and makes a rank's end of a rail.
func Open(cfg rails.Config) (rails.Rail, error) {
	why := make([]byte, 1024)
	r, port, guard, err := open(&cfg, why)
	if err != nil {
		return nil, err
	}
	var major, minor C.unsigned
	C.swu_version(r, &major, &minor)
	address := make([]byte, maxAddress)
	var n C.size_t
	if C.swu_address(r, unsafe.Pointer(&address[0]), C.size_t(len(address)), &n, (*C.char)(unsafe.Pointer(&why[0])), C.size_t(len(why))) != 0 {
		end(r, guard)
		return nil, fmt.Errorf("ucx: %w: %s", ErrUnavailable, text(why))
	}
	bell, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC|unix.EFD_SEMAPHORE)
	if err != nil {
		end(r, guard)
		return nil, fmt.Errorf("ucx: eventfd: %w", err)
	}
	version := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, uint32(major)), uint32(minor))
	version = binary.LittleEndian.AppendUint32(version, uint32(port))
	rail := &Rail{cfg: cfg, r: r, address: append(version, address[:n]...), ended: make(chan struct{}),
		back: make(chan struct{}, 1), efd: int32(C.swu_efd(r)), bell: bell, port: port, guard: guard, quit: func() { end(r, guard) }, grace: settleGrace, cutGrace: cutGrace}
	go rail.attend()
	return rail, nil
}

// end ends UCX, and then takes the guard away.
func end(r *C.swu_rail, g guard) {
	C.swu_close(r)
	g.close()
}

// opening is held while UCX reads the environment.
var opening sync.Mutex

// open makes the end at a port that is free, and shuts it to all but the ranks of other hosts.
func open(cfg *rails.Config, why []byte) (r *C.swu_rail, port int, g guard, err error) {
	devices, err := devicesOf(cfg.Interface)
	if err != nil {
		return nil, 0, nil, err
	}
	var names *C.char
	if devices != "" {
		names = C.CString(devices)
		defer C.free(unsafe.Pointer(names))
	}
	opening.Lock()
	defer opening.Unlock()
	for range portTries {
		if port, err = freePort(); err != nil {
			return nil, 0, nil, err
		}
		code := C.swu_open(&r, C.uint32_t(cfg.Rank), C.uint32_t(cfg.Size), C.uint64_t(cfg.Key), unsafe.Pointer(unsafe.SliceData(cfg.Segment)),
			C.int64_t(len(cfg.Segment)), names, C.unsigned(port), (*C.char)(unsafe.Pointer(&why[0])), C.size_t(len(why)))
		if code != 0 {
			err = fmt.Errorf("ucx: %w: %s", ErrUnavailable, text(why))
		}
		switch code {
		case 0:
		case -2: // somebody else may have taken the port meanwhile
			continue
		default:
			return nil, 0, nil, err
		}
		g, strangers, err := shut(port, cfg)
		if err == nil && !strangers {
			return r, port, g, nil
		}
		end(r, g)
		if err != nil {
			return nil, 0, nil, err
		}
	}
	if err == nil {
		err = fmt.Errorf("ucx: %w: strangers connect with each port before it is shut to them", ErrUnavailable)
	}
	return nil, 0, nil, err
}

func text(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// head is what is in front of a worker's address.
const head = 12

// Address is the version of UCX, the port at which it listens for TCP, and the worker's address.
func (r *Rail) Address() []byte {
	r.told.Store(true)
	return bytes.Clone(r.address)
}

func version(address []byte) string {
	if len(address) <= head {
		return "no version"
	}
	return fmt.Sprintf("%d.%d", binary.LittleEndian.Uint32(address), binary.LittleEndian.Uint32(address[4:]))
}

// Connect refuses a peer with another minor version: UCX does not promise that they understand each other.
func (r *Rail) Connect(peer int, address []byte) error {
	if ours, theirs := version(r.address), version(address); ours != theirs {
		return fmt.Errorf("ucx: %w: rank %d has UCX %s, rank %d has UCX %s", comm.ErrMismatch, r.cfg.Rank, ours, peer, theirs)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.usable(peer); err != nil {
		return err
	}
	why := make([]byte, 256)
	r.theirs = append(r.theirs, int(binary.LittleEndian.Uint32(address[8:])))
	if C.swu_connect(r.r, C.uint32_t(peer), unsafe.Pointer(&address[head]), (*C.char)(unsafe.Pointer(&why[0])), C.size_t(len(why))) != 0 {
		return fmt.Errorf("ucx: connect to rank %d: %s", peer, text(why))
	}
	return nil
}

// Meet looks at once, and then again and again.
func (r *Rail) Meet(ctx context.Context) error {
	began := time.Now()
	for {
		over := ctx.Err() != nil // before the last look
		r.mu.Lock()
		err, missing := r.usable(-1), -1
		if r.closed || r.interrupted.Load() {
			r.mu.Unlock()
			return err
		}
		for peer := range r.cfg.Size {
			if C.swu_met(r.r, C.uint32_t(peer)) != 0 {
				continue
			}
			if missing < 0 {
				missing = peer
			}
			if how := C.swu_failed(r.r, C.uint32_t(peer)); how != nil {
				err := fmt.Errorf("%w: no connection over UCX: %s", comm.ErrPeerLost, C.GoString(how))
				r.mu.Unlock()
				return fmt.Errorf("ucx: meet: %w", &comm.PeerError{Rank: peer, Err: err})
			}
		}
		r.mu.Unlock()
		switch {
		case missing < 0:
			return nil
		case over:
			err := context.Cause(ctx)
			if !errors.Is(err, comm.ErrTimeout) && errors.Is(err, context.DeadlineExceeded) {
				err = fmt.Errorf("%w: %w", comm.ErrTimeout, err)
			}
			err = fmt.Errorf("%w: no connection over UCX, which listens at port %d here%s", err, r.port, admits(&r.cfg))
			r.mu.Lock()
			r.grace = max(0, settleGrace-time.Since(began))
			r.mu.Unlock()
			return fmt.Errorf("ucx: meet: %w", &comm.PeerError{Rank: missing, Err: err})
		}
		if !r.Progress() {
			select {
			case <-ctx.Done():
			case <-time.After(meetPoll):
			}
		}
	}
}

// usable returns why there is nothing to be done with a peer. The caller holds mu.
func (r *Rail) usable(peer int) error {
	switch {
	case r.closed:
		return fmt.Errorf("ucx: %w", comm.ErrClosed)
	case r.interrupted.Load():
		return fmt.Errorf("ucx: %w", comm.ErrAborted)
	case peer < 0 || peer >= r.cfg.Size || peer == r.cfg.Rank:
		return comm.Invalid("ucx", "rank %d, want another than %d of %d", peer, r.cfg.Rank, r.cfg.Size)
	}
	return nil
}
