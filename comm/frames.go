package comm

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"sync"
)

// After the hellos (see handshake.go) a connection carries frames: a type (u8),
// the length of the body (u32), the body and, if there is a secret, a signature.
// frameType is what a frame says. The values are part of the protocol.
type frameType byte

const (
	frameProof   frameType = 'P'
	frameAccept  frameType = 'A'
	frameReject  frameType = 'R' // a text
	framePresent frameType = 'H' // are you still there, and yes
	frameTable   frameType = 'T' // the socket addresses of all ranks
	frameFail    frameType = 'F' // the join has failed: a failure
	frameDone    frameType = 'D' // the sender has joined
	frameStream  frameType = 'S' // bytes of a connection between hosts
)

// session is a connection after the hellos.
type session struct {
	conn   net.Conn
	secret []byte // nil: nothing is proven
	hellos []byte
	server bool
	peer   hello
	limit  int    // of the body of a frame that is received
	in     []byte // of the frame that is being received

	sendMu sync.Mutex
	sent   uint64
	got    uint64
}

// reject tells the other side why it is refused. That it may not be there any
// more to hear it changes nothing.
func (s *session) reject(text string) { _ = s.send(frameReject, []byte(clip(text, maxUnproven))) }

// send sends a frame.
func (s *session) send(kind frameType, body []byte) error {
	if slow, ok := s.conn.(*slowConn); ok {
		slow.delay() // before the frame has its place among others
	}
	s.sendMu.Lock()
	defer s.sendMu.Unlock()
	b := make([]byte, 0, sealedHead+len(body)+macSize)
	b = append(b, byte(kind))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(body)))
	b = append(b, body...)
	if s.secret != nil {
		b = append(b, s.seal(s.server, s.sent, b)...)
	}
	s.sent++
	_, err := s.conn.Write(b)
	return err
}

// seal signs a frame. Direction and counter keep it in its place.
func (s *session) seal(fromServer bool, count uint64, b []byte) []byte {
	label := "note from client"
	if fromServer {
		label = "note from server"
	}
	var n [8]byte
	binary.LittleEndian.PutUint64(n[:], count)
	return s.mac(s.secret, label, n[:], b)
}

// recv receives a frame. After a deadline in the middle of one, the next call
// goes on with it.
func (s *session) recv() (frameType, []byte, error) {
	if err := s.fill(sealedHead); err != nil {
		return 0, nil, err
	}
	switch frameType(s.in[0]) {
	case frameProof, frameAccept, frameReject, framePresent, frameTable, frameFail, frameDone, frameStream:
	default:
		return 0, nil, fmt.Errorf("%w frame: type %q", errMalformed, s.in[0])
	}
	n := binary.LittleEndian.Uint32(s.in[1:])
	if n > uint32(s.limit) {
		return 0, nil, fmt.Errorf("%w frame: %d bytes, at most %d", errMalformed, n, s.limit)
	}
	end := sealedHead + int(n)
	sealed := end
	if s.secret != nil {
		sealed += macSize
	}
	if err := s.fill(sealed); err != nil {
		return 0, nil, noEOF(err)
	}
	b := s.in
	s.in = nil
	if s.secret != nil && !hmac.Equal(b[end:], s.seal(!s.server, s.got, b[:end])) {
		return 0, nil, fmt.Errorf("%w frame: its signature is wrong", errMalformed)
	}
	s.got++
	return frameType(b[0]), b[sealedHead:end], nil
}

// fill reads until n bytes of a frame are there, and never more.
func (s *session) fill(n int) error {
	have := len(s.in)
	if have >= n {
		return nil
	}
	s.in = append(s.in, make([]byte, n-have)...)
	got, err := io.ReadFull(s.conn, s.in[have:])
	s.in = s.in[:have+got]
	if err == io.ErrUnexpectedEOF && have+got == 0 {
		err = io.EOF
	}
	return err
}

func (s *session) mac(secret []byte, label string, more ...[]byte) []byte {
	h := hmac.New(sha256.New, secret)
	io.WriteString(h, "switchyard "+label+"\x00")
	h.Write(s.hellos)
	for _, m := range more {
		h.Write(m)
	}
	return h.Sum(nil)
}

// A place is the rank (u32) that is given to one who is accepted, and the size
// (u32) of the group to be.
func encodePlace(rank, size int) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(rank))
	return binary.LittleEndian.AppendUint32(b, uint32(size))
}

func decodePlace(b []byte) (rank, size int, err error) {
	if len(b) == 8 {
		rank, size = int(binary.LittleEndian.Uint32(b)), int(binary.LittleEndian.Uint32(b[4:]))
	}
	if size < 1 || size > MaxSize || rank >= size {
		return 0, 0, fmt.Errorf("%w place: %x", errMalformed, b)
	}
	return rank, size, nil
}

// table is what rank 0 tells all ranks when they have met.
type table struct {
	addrs []string
	// epoch and seats are those of Config, which newcomers do not know.
	epoch int
	seats []int
}

// encode writes the number of ranks (u32), the epoch (u32), the number of seats (u32), which is 0 or that of ranks, the seats (u32 each) and
// the addresses.
func (t *table) encode() []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(t.addrs)))
	b = binary.LittleEndian.AppendUint32(b, uint32(t.epoch))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(t.seats)))
	for _, s := range t.seats {
		b = binary.LittleEndian.AppendUint32(b, uint32(s))
	}
	for _, a := range t.addrs {
		b = appendString(b, a)
	}
	return b
}

func decodeTable(b []byte, size int) (t table, err error) {
	if len(b) < 12 || int(binary.LittleEndian.Uint32(b)) != size {
		return t, fmt.Errorf("%w table: not of %d ranks", errMalformed, size)
	}
	t.epoch = int(binary.LittleEndian.Uint32(b[4:]))
	seats := int(binary.LittleEndian.Uint32(b[8:]))
	if b = b[12:]; seats != 0 && seats != size || len(b) < 4*seats {
		return t, fmt.Errorf("%w table: %d seats of %d ranks", errMalformed, seats, size)
	}
	for range seats {
		t.seats, b = append(t.seats, int(binary.LittleEndian.Uint32(b))), b[4:]
	}
	t.addrs = make([]string, size)
	for i := range t.addrs {
		var ok bool
		if t.addrs[i], b, ok = takeString(b); !ok {
			return t, fmt.Errorf("%w table: it ends at rank %d", errMalformed, i)
		}
	}
	if len(b) != 0 {
		return t, fmt.Errorf("%w table: %d bytes left", errMalformed, len(b))
	}
	return t, nil
}
