package comm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"time"
)

// failCode is the kind of a failure. The values are part of the protocol.
type failCode uint8

const (
	failLost     failCode = 1 // culprit died or was cut off
	failLeft     failCode = 2 // culprit closed its end while it was needed
	failAborted  failCode = 3 // culprit called Abort
	failMismatch failCode = 4 // culprit called something else
	failAbsent   failCode = 5 // culprit did not come in time, to a join
	failLast              = failAbsent
)

// failure is why a group or a join failed: the same news on every rank, in terms
// of world ranks, which each rank translates into the numbers of its group. Code
// decides by its fields; its text is for people.
type failure struct {
	code    failCode
	culprit int           // world rank
	detail  string        // more words, may be empty
	waited  time.Duration // failAbsent: how long, 0 if that is not known
	cause   error         // failAborted: what Abort was given

	// severed says that this rank concluded it from the end of a connection. It
	// does not cross the wire: the others are told of a loss.
	severed bool
	// ended says that the culprit's process has closed its connection, as one that ends does. It does not cross the wire.
	ended bool
	// before says that the culprit was lost before this process took a place in the group. It does not cross the wire.
	before bool
}

// unknownRank is the culprit of a failure that stays on its rank.
const unknownRank = -1

// condition is what errors.Is finds of a failure.
func (f *failure) condition() error {
	switch f.code {
	case failLost, failLeft:
		return ErrPeerLost
	case failMismatch:
		return ErrMismatch
	case failAbsent:
		return ErrTimeout
	default:
		return ErrAborted
	}
}

// reason is a failure as an error, without its rank.
type reason struct{ *failure }

func (r reason) Error() string {
	switch {
	case r.code == failAborted:
		return fmt.Sprintf("%v: %v", ErrAborted, r.cause)
	case r.code == failAbsent:
		return fmt.Sprintf("%v %s", ErrTimeout, r.detail)
	case r.detail == "":
		return r.condition().Error()
	}
	return fmt.Sprintf("%v: %s", r.condition(), r.detail)
}

func (r reason) Unwrap() []error {
	if r.cause == nil {
		return []error{r.condition()}
	}
	return []error{r.condition(), r.cause}
}

// absent is the error of a rank whose ctx ended while it waited for others to
// join. Nobody may be known to be missing. That ctx ended for another reason than
// its time is no news of anybody.
func absent(ctx context.Context, cfg *Config, began time.Time, missing []int, what string) error {
	err := ctxErr(ctx)
	if !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%s: %w", what, err)
	}
	f := &failure{code: failAbsent, culprit: unknownRank, waited: cfg.JoinTimeout, cause: err}
	if !errors.Is(err, ErrTimeout) { // the caller's deadline was earlier
		f.waited = time.Since(began).Round(time.Millisecond)
	}
	f.detail = fmt.Sprintf("after %v: %s", f.waited, what)
	if len(missing) > 0 {
		f.culprit = missing[0]
	}
	return joinFailed(f)
}

// mismatched is the error of ranks that differ.
func mismatched(format string, args ...any) error {
	return reason{&failure{code: failMismatch, culprit: unknownRank, detail: fmt.Sprintf(format, args...)}}
}

// joinFailed is a failure as the error of a join.
func joinFailed(f *failure) error {
	if f.code == failMismatch || f.culprit == unknownRank {
		return reason{f} // a mismatch names the ranks in its text
	}
	return &PeerError{Rank: f.culprit, Err: reason{f}}
}

// failureOf is what the other ranks are told of an error of this rank's join. A
// rank that is lost or absent is to blame for that; for all else this one is.
func failureOf(err error, rank int) *failure {
	var why reason
	known := errors.As(err, &why)
	var pe *PeerError
	blames := errors.As(err, &pe) && pe.Rank >= 0
	switch {
	case known && why.code == failAbsent:
		f := &failure{code: failAbsent, culprit: rank, detail: why.detail, waited: why.waited}
		if blames {
			f.culprit = pe.Rank
		}
		return f
	case blames && errors.Is(err, ErrPeerLost):
		f := &failure{code: failLost, culprit: pe.Rank, detail: pe.Err.Error()}
		if known && why.condition() == ErrPeerLost {
			f.detail = why.detail
		}
		return f
	case blames && errors.Is(err, ErrTimeout):
		return &failure{code: failAbsent, culprit: pe.Rank, detail: pe.Err.Error()}
	case known && why.code == failMismatch:
		return &failure{code: failMismatch, culprit: rank, detail: why.detail}
	}
	return &failure{code: failAborted, culprit: rank, cause: err}
}

// errorOf puts a failure into the numbers of this group. The caller holds n.mu.
func (g *Group) errorOf(f *failure) error {
	rank, ok := g.rankOf[f.culprit]
	if !ok {
		rank = -1
	}
	if f.code == failLeft && f.detail == "" {
		left := *f
		left.detail = "it has closed its end of group " + g.name + " or ended its process"
		f = &left
	}
	if t := &g.topology; ok && t.Hosts > 1 && f.condition() == ErrPeerLost {
		where := *f
		where.detail = strings.TrimSuffix(fmt.Sprintf("on host %d: %s", t.HostOf(rank), f.detail), ": ")
		f = &where
	}
	return &PeerError{Rank: rank, Err: reason{f}}
}

// A failure is, on the wire, its culprit (u32), code (u8), the conditions of its
// cause (u32), the length of its detail (u16), its detail, and what follows the
// detail: of failAborted the cause's text, of failAbsent how long the ranks were
// waited for. A version that does not know what follows ignores it.
const failHeader = 11

func encodeFail(f *failure) []byte {
	detail, rest, bits := clip(f.detail, maxText), "", uint32(0)
	switch {
	case f.code == failAborted && f.cause != nil:
		rest, bits = clip(f.cause.Error(), maxText), conditionBits(f.cause)
	case f.code == failAbsent && f.waited > 0:
		rest = f.waited.String()
	}
	b := binary.LittleEndian.AppendUint32(nil, uint32(f.culprit))
	b = append(b, byte(f.code))
	b = binary.LittleEndian.AppendUint32(b, bits)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(detail)))
	b = append(b, detail...)
	return append(b, rest...)
}

func decodeFail(b []byte) (*failure, error) {
	if len(b) < failHeader {
		return nil, fmt.Errorf("%w failure: %d bytes", errMalformed, len(b))
	}
	f := &failure{
		culprit: int(binary.LittleEndian.Uint32(b[0:])),
		code:    failCode(b[4]),
	}
	bits := binary.LittleEndian.Uint32(b[5:])
	detail := int(binary.LittleEndian.Uint16(b[9:]))
	b = b[failHeader:]
	if f.culprit >= MaxSize || f.code < failLost || f.code > failLast || detail > len(b) ||
		detail > maxText || len(b)-detail > maxText || bits >= 1<<len(conditions) {
		return nil, fmt.Errorf("%w failure: rank %d, code %d, conditions %#x, %d of %d bytes of detail",
			errMalformed, f.culprit, f.code, bits, detail, len(b))
	}
	f.detail = string(b[:detail])
	switch rest := string(b[detail:]); {
	case f.code == failAborted:
		f.cause = &remoteError{text: rest, bits: bits}
	case f.code == failAbsent && rest != "":
		waited, err := time.ParseDuration(rest)
		if err != nil || waited <= 0 {
			return nil, fmt.Errorf("%w failure: ranks were waited for %q", errMalformed, rest)
		}
		f.waited = waited
	}
	return f, nil
}
