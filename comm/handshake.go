package comm

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

// Two processes that have connected, to the rendezvous or over the mesh, go
// through the same handshake. The one that connected is the client.
//
//	client  hello: version, whether it has a secret, nonce, who it is
//	server  hello: the same
//	client  proof: HMAC(secret, "client" | both hellos)     if both have a secret
//	server  proof: HMAC(secret, "server" | both hellos)
//	server  accept, or reject with a reason
//
// The nonces are fresh, so an old proof is worth nothing; the two roles sign
// different texts, so a proof cannot be sent back to its maker; the server
// proves nothing to a client that has not. Each later message on the same
// connection carries a HMAC over the hellos, the direction and a counter.
//
// The layout of the hello's head and of the proofs is the same in every version
// of the protocol, so that ranks of different versions can tell each other. From
// protocol 4 on they tell their release too. docs/upgrading.md has the protocol
// of each release.
const (
	protocolVersion = 4

	helloHead = 8 + 2 + 1 + 1 + 2 + nonceSize
	nonceSize = 32
	macSize   = sha256.Size
	maxHello  = 1 << 10 // of the body

	sealedHead = 5
	// Limits of the bytes that a side may send at once: before it has proven anything, as a rank that connects, and as the one it connects to.
	maxUnproven = 1 << 10
	maxGuest    = failHeader + 2*maxText
	maxHost     = 1 << 20
)

var helloMagic = [8]byte{'S', 'W', 'Y', 'A', 'R', 'D', '\r', '\n'}

// hello is the first thing both sides say.
type hello struct {
	version uint16
	secret  bool // the sender has one
	nonce   [nonceSize]byte
	body    []byte
}

func (h *hello) encode() []byte {
	b := append([]byte(nil), helloMagic[:]...)
	b = binary.LittleEndian.AppendUint16(b, h.version)
	flag := byte(0)
	if h.secret {
		flag = 1
	}
	b = append(b, flag, 0)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(h.body)))
	b = append(b, h.nonce[:]...)
	return append(b, h.body...)
}

// readHello reads a hello and also returns its bytes.
func readHello(r io.Reader) (hello, []byte, error) {
	raw := make([]byte, helloHead)
	// The magic first: a stranger may not send more, and wait.
	if _, err := io.ReadFull(r, raw[:8]); err != nil {
		return hello{}, nil, fmt.Errorf("%w: %w", errNoHello, noEOF(err))
	}
	if [8]byte(raw[:8]) != helloMagic {
		return hello{}, nil, fmt.Errorf("%w: it begins with %q", errNotHello, raw[:8])
	}
	if _, err := io.ReadFull(r, raw[8:]); err != nil {
		return hello{}, nil, fmt.Errorf("half a hello: %w", noEOF(err))
	}
	h := hello{
		version: binary.LittleEndian.Uint16(raw[8:]),
		secret:  raw[10]&1 != 0,
		nonce:   [nonceSize]byte(raw[14:]),
	}
	n := int(binary.LittleEndian.Uint16(raw[12:]))
	if n > maxHello {
		return hello{}, nil, fmt.Errorf("%w hello: %d bytes, at most %d", errMalformed, n, maxHello)
	}
	raw, err := readAppend(r, raw, n)
	if err != nil {
		return hello{}, nil, fmt.Errorf("half a hello: %w", noEOF(err))
	}
	h.body = raw[helloHead:]
	return h, raw, nil
}

// purpose is what a connection is for.
type purpose uint8

const (
	toRendezvous purpose = 1
	toMesh       purpose = 2
	toYieldPort  purpose = 3 // to take the port of a rendezvous that has failed
	toReplace    purpose = 4 // to take the place of a lost rank
)

// identity is the body of a hello: who the sender is and how it was configured.
type identity struct {
	purpose     purpose
	rank        int
	size        int
	to          int    // the rank it takes the other side for
	late        bool   // it does not know rank and size yet: these are its local ones, size 0 where it has not told
	peerTimeout int64  // ns
	majority    bool   // Config.Majority
	gid         uint64 // toMesh: of the group to be; toRendezvous: of Admit, 0 for a group that starts
	host        string // of the sender, as far as known
	addr        string // toRendezvous: its socket
	name        string // toRendezvous: of the group
	release     string // and build of Switchyard: ranks map each other's control blocks, whose layout is a release's

	spans bool // toMesh, and not said: the table of addresses has ranks of several hosts
}

const (
	flagLate     = 1
	flagMajority = 2
)

const identityFixed = 1 + 4 + 4 + 4 + 1 + 8 + 8

func (c *identity) encode() []byte {
	b := []byte{byte(c.purpose)}
	b = binary.LittleEndian.AppendUint32(b, uint32(c.rank))
	b = binary.LittleEndian.AppendUint32(b, uint32(c.size))
	b = binary.LittleEndian.AppendUint32(b, uint32(c.to))
	flags := byte(0)
	if c.late {
		flags |= flagLate
	}
	if c.majority {
		flags |= flagMajority
	}
	b = append(b, flags)
	b = binary.LittleEndian.AppendUint64(b, uint64(c.peerTimeout))
	b = binary.LittleEndian.AppendUint64(b, c.gid)
	b = appendString(b, c.host)
	b = appendString(b, c.addr)
	b = appendString(b, c.name)
	return appendString(b, c.release)
}

func decodeIdentity(b []byte) (identity, error) {
	if len(b) < identityFixed {
		return identity{}, fmt.Errorf("%w identity: %d bytes", errMalformed, len(b))
	}
	c := identity{
		purpose:     purpose(b[0]),
		rank:        int(int32(binary.LittleEndian.Uint32(b[1:]))),
		size:        int(int32(binary.LittleEndian.Uint32(b[5:]))),
		to:          int(int32(binary.LittleEndian.Uint32(b[9:]))),
		late:        b[13]&flagLate != 0,
		majority:    b[13]&flagMajority != 0,
		peerTimeout: int64(binary.LittleEndian.Uint64(b[14:])),
		gid:         binary.LittleEndian.Uint64(b[22:]),
	}
	var ok1, ok2, ok3, ok4 bool
	flags := b[13]
	b = b[identityFixed:]
	c.host, b, ok1 = takeString(b)
	c.addr, b, ok2 = takeString(b)
	c.name, b, ok3 = takeString(b)
	c.release, b, ok4 = takeString(b)
	if !ok1 || !ok2 || !ok3 || !ok4 || len(b) != 0 || flags > flagLate|flagMajority || c.purpose < toRendezvous || c.purpose > toReplace {
		return identity{}, fmt.Errorf("%w identity: purpose %d, %d bytes left", errMalformed, c.purpose, len(b))
	}
	return c, nil
}

func appendString(b []byte, s string) []byte {
	b = binary.LittleEndian.AppendUint16(b, uint16(len(s)))
	return append(b, s...)
}

func takeString(b []byte) (s string, rest []byte, ok bool) {
	if len(b) < 2 {
		return "", b, false
	}
	n := int(binary.LittleEndian.Uint16(b))
	if n > len(b)-2 {
		return "", b, false
	}
	return string(b[2 : 2+n]), b[2+n:], true
}

// errRefused means that this side has refused the other. proven says that the
// other side is no stranger, as far as can be told, group that it is a rank of
// another group.
type errRefused struct {
	text          string
	proven, group bool
}

func (e *errRefused) Error() string { return mismatched("%s", e.text).Error() }
func (e *errRefused) Unwrap() error { return mismatched("%s", e.text) }

// finalError means that there is nothing to join any more.
type finalError struct{ err error }

func (e *finalError) Error() string { return e.err.Error() }
func (e *finalError) Unwrap() error { return e.err }

// greet exchanges hellos and, if this side has a secret, proofs. The caller
// sets the deadline of conn and closes it.
func greet(conn net.Conn, server bool, version uint16, secret []byte, me identity) (*session, error) {
	mine := hello{version: version, secret: len(secret) > 0, body: me.encode()}
	rand.Read(mine.nonce[:])
	s := &session{conn: conn, server: server, limit: maxUnproven}
	raw := mine.encode()
	if !server {
		if _, err := conn.Write(raw); err != nil {
			return nil, err
		}
	}
	peer, peerRaw, err := readHello(conn)
	if err != nil {
		return nil, err
	}
	if server {
		if _, err := conn.Write(raw); err != nil {
			return nil, err
		}
	}
	s.peer = peer
	first, second := raw, peerRaw
	if server {
		first, second = peerRaw, raw
	}
	s.hellos = binary.LittleEndian.AppendUint32(nil, uint32(len(first)))
	s.hellos = append(append(s.hellos, first...), second...)

	if peer.secret != mine.secret {
		text := secretText(server, mine.secret)
		if server {
			s.reject(text)
		}
		return nil, &errRefused{text: text, proven: len(secret) == 0}
	}
	if len(secret) == 0 {
		s.trust()
		return s, nil
	}
	if peer.nonce == mine.nonce {
		return nil, fmt.Errorf("%w hello: it is our own, sent back", errMalformed)
	}
	if server {
		if err := s.checkProof(secret, "client"); err != nil {
			var refused *errRefused
			if errors.As(err, &refused) {
				s.reject(refused.text)
			}
			return nil, err
		}
	}
	role := "client"
	if server {
		role = "server"
	}
	if err := s.send(frameProof, s.mac(secret, role)); err != nil {
		return nil, err
	}
	if !server {
		if err := s.checkProof(secret, "server"); err != nil {
			return nil, err
		}
	}
	// From here on every frame is signed.
	s.secret = secret
	s.sent, s.got = 0, 0
	s.trust()
	return s, nil
}

// trust lets the other side say what a rank may have to say.
func (s *session) trust() {
	s.limit = maxHost
	if s.server {
		s.limit = maxGuest
	}
}

func secretText(server, mine bool) string {
	has := map[bool]string{true: "one", false: "none"}
	client := has[mine != server]
	srv := has[mine == server]
	return fmt.Sprintf("secret: the rank that connects has %s, the rank it connects to has %s", client, srv)
}

func (s *session) checkProof(secret []byte, role string) error {
	kind, body, err := s.recv()
	switch {
	case err != nil:
		return err
	case kind == frameReject:
		return mismatched("%s", body)
	case kind != frameProof:
		return fmt.Errorf("%w handshake: %q instead of a proof", errMalformed, byte(kind))
	case !hmac.Equal(body, s.mac(secret, role)):
		return &errRefused{text: "secret: it is not the same on the two sides"}
	}
	return nil
}

// verdict is the client's last step: what the server thinks of it. It returns
// what comes with an accept.
func (s *session) verdict() ([]byte, error) {
	kind, body, err := s.recv()
	switch {
	case err != nil:
		return nil, err
	case kind == frameReject:
		return nil, mismatched("%s", body)
	case kind == frameFail:
		f, err := decodeFail(body)
		if err != nil {
			return nil, err
		}
		return nil, &finalError{joinFailed(f)}
	case kind != frameAccept:
		return nil, fmt.Errorf("%w handshake: %q instead of a verdict", errMalformed, byte(kind))
	}
	return body, nil
}

// ofHost is this side's identity on the server, the other's on the client.
func (s *session) ofHost(mine, theirs identity) identity {
	if s.server {
		return mine
	}
	return theirs
}

// examine compares the two sides' cards after the greeting. The text is the
// same on both sides, who are named by their ranks.
func (s *session) examine(version uint16, me identity) (identity, error) {
	refuse := func(c identity, what, format string, mine, theirs any) error {
		text := fmt.Sprintf("%s: rank %d has "+format+", rank %d has "+format, what, me.rank, mine, c.rank, theirs)
		if !s.server && c.rank >= 0 {
			text = fmt.Sprintf("%s: rank %d has "+format+", rank %d has "+format, what, c.rank, theirs, me.rank, mine)
		}
		return &errRefused{text: text, proven: true}
	}
	if v := s.peer.version; v != version {
		server, client := version, v
		if !s.server {
			server, client = v, version
		}
		return identity{}, &errRefused{proven: true, text: fmt.Sprintf(
			"version: the rank that connects speaks protocol %d, the rank it connects to %d, and this one has Switchyard %s: a group has one release", client, server, me.release)}
	}
	c, err := decodeIdentity(s.peer.body)
	if err != nil {
		return identity{}, err
	}
	late := c.late || me.late // then rank and size are yet to be given
	switch {
	case c.purpose == toYieldPort && me.purpose == toRendezvous && s.server && c.host == me.host:
		return c, nil
	case c.purpose != me.purpose:
		return c, fmt.Errorf("%w handshake: purpose %d on a connection for %d", errMalformed, c.purpose, me.purpose)
	case c.release != me.release:
		return c, &errRefused{proven: true, text: fmt.Sprintf("version: the rank that connects has Switchyard %s, the rank it connects to %s: a group has one build of one release",
			s.ofHost(c, me).release, s.ofHost(me, c).release)}
	case late && c.name != me.name:
		return c, &errRefused{text: fmt.Sprintf("name: the group is %q, a newcomer asks for %q", s.ofHost(me, c).name, s.ofHost(c, me).name)}
	case !late && c.gid != me.gid && me.purpose == toRendezvous:
		return c, &errRefused{group: true, text: "group: it is not a rank of the group that meets here"}
	case !late && c.size != me.size:
		return c, refuse(c, "size", "%d", me.size, c.size)
	case !late && (c.rank < 0 || c.rank >= c.size):
		return c, &errRefused{proven: true, text: fmt.Sprintf("rank: a rank that connects says it is %d, want 0 to %d", c.rank, c.size-1)}
	case c.peerTimeout != me.peerTimeout:
		return c, refuse(c, "peer timeout", "%v", time.Duration(me.peerTimeout), time.Duration(c.peerTimeout))
	case c.majority != me.majority:
		return c, refuse(c, "majority", "%v", me.majority, c.majority)
	case c.host != me.host && c.host != "" && me.host != "" && !me.spans && !(spans(me.addr) && spans(c.addr)):
		return c, refuse(c, "host", "%q (a group spans hosts where LocalSize, LOCAL_WORLD_SIZE, is below its size on all ranks, and they meet on a port)", me.host, c.host)
	case !late && c.gid != me.gid:
		return c, refuse(c, "addresses", "the list %016x", me.gid, c.gid)
	}
	return c, nil
}
