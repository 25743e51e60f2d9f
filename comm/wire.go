package comm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
)

// Ranks send each other a stream of frames over the mesh, little endian:
//
//	 0  u32  payload bytes, at most maxFrame
//	 4  u8   kind
//	 5  u8   op, of kindData
//	 6  u8   flags
//	 7  u8   0
//	 8  u16  descriptors that come with the payload
//	10  u16  0
//	12  u32  frameMagic
//	16  u64  group
//	24  u64  call, round, number of an inquiry, or Mail (upper half) and topic
//	32       payload
//
// A message longer than a frame is sent as several in a row, all but the last
// with flagMore. Descriptors travel with the payload, which then is one zero
// byte for each.
const (
	frameHeader = 32
	frameMagic  = 0x44595753 // "SWYD"
	maxFrame    = 1 << 20
	maxMessage  = 1 << 30
	maxText     = 4 << 10 // of an error

	flagMore    = 1 << 0 // kindData, kindRelay
	flagPoison  = 1 << 1 // kindData: the payload is an error text
	flagDecided = 1 << 2 // kindShrink
)

// errMalformed is what decoders return for bytes no Switchyard would send.
var errMalformed = errors.New("malformed")

// A stranger says nothing, or something else, in place of a hello.
var (
	errNoHello  = errors.New("no hello")
	errNotHello = fmt.Errorf("%w hello", errMalformed)
)

type header struct {
	length int
	kind   kind
	op     opcode
	flags  uint8
	fds    int
	gid    uint64
	seq    uint64
}

func (h *header) encode(b *[frameHeader]byte) {
	binary.LittleEndian.PutUint32(b[0:], uint32(h.length))
	b[4], b[5], b[6], b[7] = byte(h.kind), byte(h.op), h.flags, 0
	binary.LittleEndian.PutUint16(b[8:], uint16(h.fds))
	binary.LittleEndian.PutUint16(b[10:], 0)
	binary.LittleEndian.PutUint32(b[12:], frameMagic)
	binary.LittleEndian.PutUint64(b[16:], h.gid)
	binary.LittleEndian.PutUint64(b[24:], h.seq)
}

// decodeHeader decodes a frame header and checks all that can be checked
// without the payload.
func decodeHeader(b *[frameHeader]byte) (header, error) {
	h := header{
		length: int(binary.LittleEndian.Uint32(b[0:])),
		kind:   kind(b[4]),
		op:     opcode(b[5]),
		flags:  b[6],
		fds:    int(binary.LittleEndian.Uint16(b[8:])),
		gid:    binary.LittleEndian.Uint64(b[16:]),
		seq:    binary.LittleEndian.Uint64(b[24:]),
	}
	bad := func(format string, args ...any) (header, error) {
		return header{}, fmt.Errorf("%w frame: %s", errMalformed, fmt.Sprintf(format, args...))
	}
	if binary.LittleEndian.Uint32(b[12:]) != frameMagic || b[7] != 0 || b[10] != 0 || b[11] != 0 {
		return bad("not a frame header")
	}
	if h.length > maxFrame {
		return bad("%d bytes, at most %d", h.length, maxFrame)
	}
	if h.kind != kindData && h.kind != kindPast && (h.op != opNone || h.fds != 0 && h.kind != kindWord) {
		return bad("kind %d with op %d and %d descriptors", h.kind, h.op, h.fds)
	}
	allowed := uint8(0)
	switch h.kind {
	case kindData, kindPast:
		allowed = flagMore | flagPoison
		if h.op == opNone || h.op > opLast {
			return bad("op %d", h.op)
		}
		if h.fds > 0 && (h.op != opExchangeFDs || h.flags != 0 || h.length != h.fds || h.fds > MaxFDs) {
			return bad("op %d, flags %#x, %d bytes with %d descriptors", h.op, h.flags, h.length, h.fds)
		}
		if h.flags&flagMore != 0 && (h.length == 0 || h.flags&flagPoison != 0) {
			return bad("flags %#x with %d bytes", h.flags, h.length)
		}
		if h.flags&flagPoison != 0 && h.length == 0 {
			return bad("an error without a text")
		}
	case kindShrink, kindAnswer:
		if h.kind == kindShrink {
			allowed = flagDecided
		}
		if h.length > MaxSize/8+1 {
			return bad("a set of %d bytes", h.length)
		}
	case kindFail, kindLost:
		if h.length > failHeader+2*maxText {
			return bad("a failure of %d bytes", h.length)
		}
	case kindReplace, kindReplaced:
		if h.length > maxReplacement {
			return bad("%d bytes about a process that takes a place", h.length)
		}
	case kindRelay:
		allowed = flagMore
		if h.flags&flagMore != 0 && h.length == 0 {
			return bad("flags %#x with %d bytes", h.flags, h.length)
		}
	case kindWord:
		if h.length == 0 || h.length > MaxWord || h.fds > 0 && (h.length != h.fds || h.fds > MaxFDs) {
			return bad("a word of %d bytes with %d descriptors", h.length, h.fds)
		}
	case kindRecalled:
		if h.length != 1 {
			return bad("an answer of %d bytes", h.length)
		}
	case kindLeave, kindBeat, kindBye, kindAsk, kindRecall:
		if h.length != 0 {
			return bad("kind %d with %d bytes", h.kind, h.length)
		}
	default:
		return bad("kind %d", h.kind)
	}
	if h.flags&^allowed != 0 {
		return bad("kind %d with flags %#x", h.kind, h.flags)
	}
	return h, nil
}

// readMessage reads the next message. takeFDs gives the descriptors that came
// with the bytes read so far, or why there are not that many.
func readMessage(r io.Reader, takeFDs func(n int) ([]int, error)) (message, error) {
	var (
		m     message
		b     [frameHeader]byte
		first header
	)
	for part := 0; ; part++ {
		if _, err := io.ReadFull(r, b[:]); err != nil {
			return message{}, err
		}
		h, err := decodeHeader(&b)
		if err != nil {
			return message{}, err
		}
		if part == 0 {
			first = h
			m = message{kind: h.kind, op: h.op, gid: h.gid, seq: h.seq}
		} else if h.kind != first.kind || h.op != first.op || h.gid != first.gid || h.seq != first.seq || h.flags&flagPoison != 0 || h.fds != 0 {
			return message{}, fmt.Errorf("%w frame: kind %d in the middle of a message", errMalformed, h.kind)
		}
		if len(m.data)+h.length > maxMessage+relayHead {
			return message{}, fmt.Errorf("%w message: more than %d bytes", errMalformed, maxMessage)
		}
		if m.data, err = readAppend(r, m.data, h.length); err != nil {
			return message{}, noEOF(err)
		}
		if h.flags&flagMore != 0 {
			continue
		}
		if h.fds > 0 {
			m.data = nil
			if m.fds, err = takeFDs(h.fds); err != nil {
				m.poison, m.untaken = err.Error(), true
			}
			return m, nil
		}
		if err = m.unframe(h); err != nil {
			return message{}, err
		}
		return m, nil
	}
}

// readAppend appends n bytes of r to buf. Memory follows what arrives, not
// what was announced.
func readAppend(r io.Reader, buf []byte, n int) ([]byte, error) {
	start := len(buf)
	buf = append(buf, make([]byte, n)...)
	_, err := io.ReadFull(r, buf[start:])
	return buf, err
}

func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// clip shortens a text to limit bytes.
func clip(s string, limit int) string {
	const dots = "..."
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit-len(dots)], "") + dots
}
