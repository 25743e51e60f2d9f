package comm

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Everything that crosses a socket has a decoder here, and a fuzz target. What
// a decoder accepts it must encode to the same bytes, where it has an encoder.

// encodeMessage is what a link writes for a message.
func encodeMessage(t testing.TB, m message) []byte {
	a, b := socketPair(t)
	l := &sockLink{conn: a}
	go func() {
		l.writeMessage(&m)
		a.Close()
	}()
	out, err := io.ReadAll(b)
	require.NoError(t, err)
	b.Close()
	return out
}

func socketPair(t testing.TB) (a, b *net.UnixConn) {
	ln, err := listenSocket("")
	require.NoError(t, err)
	defer ln.Close()
	a, err = net.DialUnix("unix", nil, ln.Addr().(*net.UnixAddr))
	require.NoError(t, err)
	b, err = ln.AcceptUnix()
	require.NoError(t, err)
	return a, b
}

func sampleMessages() []message {
	return []message{
		{kind: kindBeat},
		{kind: kindBye},
		{kind: kindLeave, gid: 7},
		{kind: kindAsk, gid: 7, seq: 1},
		{kind: kindAnswer, gid: 7, seq: 1, data: []byte{2}},
		{kind: kindData, op: opBarrier, gid: 7, seq: 1},
		{kind: kindData, op: opAllGather, gid: 7, seq: 2, data: []byte("data")},
		{kind: kindData, op: opAllGather, gid: 7, seq: 2, poison: "too many"},
		{kind: kindData, op: opSplit, gid: 7, seq: 3, data: make([]byte, 16)},
		{kind: kindWord, gid: 7, seq: 1<<32 | 3, data: []byte("word")},
		{kind: kindRecall, gid: 7, seq: 1<<32 | 3},
		{kind: kindRecalled, gid: 7, seq: 1<<32 | 3, data: []byte{answerTaken}},
		{kind: kindShrink, gid: 7, seq: 1, data: []byte{2}},
		{kind: kindShrink, gid: 7, data: []byte{2}, decided: true},
		{kind: kindFail, gid: 7, fail: &failure{code: failLost, culprit: 2, detail: "killed"}},
		{kind: kindFail, gid: 7, fail: &failure{code: failAborted, culprit: 1, cause: errors.New("why")}},
		{kind: kindFail, gid: 7, fail: &failure{code: failAborted, culprit: 1, cause: ErrTimeout}},
		{kind: kindFail, gid: 7, fail: &failure{code: failAbsent, culprit: 1, detail: "after 2s: nobody", waited: 2 * time.Second}},
	}
}

func noFDs(int) ([]int, error) { return nil, errors.New("none here") }

func TestMessagesSurviveTheWire(t *testing.T) {
	for _, m := range sampleMessages() {
		got, err := readMessage(bytes.NewReader(encodeMessage(t, m)), noFDs)
		require.NoError(t, err)
		if m.fail != nil {
			require.Equal(t, encodeFail(m.fail), encodeFail(got.fail))
			m.fail, got.fail = nil, nil
		}
		if len(got.data) == 0 {
			got.data = nil
		}
		require.Equal(t, m, got)
	}
	long := message{kind: kindData, op: opAllGather, gid: 1, seq: 1, data: bytes.Repeat([]byte("0123456789"), maxFrame/4)}
	got, err := readMessage(bytes.NewReader(encodeMessage(t, long)), noFDs)
	require.NoError(t, err)
	require.True(t, bytes.Equal(long.data, got.data))
}

func FuzzFrames(f *testing.F) {
	for _, m := range sampleMessages() {
		f.Add(encodeMessage(f, m))
	}
	f.Add(encodeMessage(f, message{kind: kindData, op: opAllGather, data: make([]byte, maxFrame+1)}))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		for {
			before := r.Len()
			m, err := readMessage(r, noFDs)
			if err != nil {
				return
			}
			if n := len(m.data); n > before-r.Len() {
				t.Fatalf("%d bytes of data from %d", n, before-r.Len())
			}
		}
	})
}

func FuzzFrameHeader(f *testing.F) {
	for _, m := range sampleMessages() {
		f.Add(encodeMessage(f, m)[:frameHeader])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < frameHeader {
			return
		}
		in := [frameHeader]byte(b)
		h, err := decodeHeader(&in)
		if err != nil {
			require.ErrorIs(t, err, errMalformed)
			return
		}
		var out [frameHeader]byte
		h.encode(&out)
		require.Equal(t, in, out)
		require.LessOrEqual(t, h.length, maxFrame)
	})
}

// FuzzGroup lets a peer say anything at all to a group that works. The group
// may fail, but must not panic nor hang, and the rest of the world stays.
func FuzzGroup(f *testing.F) {
	var all []byte
	for _, m := range sampleMessages() {
		m.gid = 1
		all = append(all, encodeMessage(f, m)...)
		f.Add(encodeMessage(f, m))
	}
	f.Add(all)
	f.Fuzz(func(t *testing.T, b []byte) {
		gs, err := Local(3)
		require.NoError(t, err)
		r := bytes.NewReader(b)
		for {
			m, err := readMessage(r, noFDs)
			if err != nil {
				break
			}
			gs[0].n.deliver(1, m)
		}
		ctx := testContext(t)
		errs := make(chan error, 2)
		for _, g := range gs[:2] {
			go func() {
				defer g.Close()
				if err := g.Barrier(ctx); err != nil {
					errs <- nil
					return
				}
				_, err := g.AllGather(ctx, []byte{1})
				errs <- err
			}()
		}
		time.AfterFunc(time.Millisecond, gs[2].Kill) // nobody hangs
		<-errs
		<-errs
		gs[2].Close()
	})
}

func FuzzFailure(f *testing.F) {
	for _, m := range sampleMessages() {
		if m.fail != nil {
			f.Add(encodeFail(m.fail))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		fail, err := decodeFail(b)
		if err != nil {
			require.ErrorIs(t, err, errMalformed)
			return
		}
		again, err := decodeFail(encodeFail(fail))
		require.NoError(t, err)
		require.Equal(t, fail, again)
		require.Error(t, joinFailed(fail))
	})
}

func FuzzRankSet(f *testing.F) {
	f.Add([]byte{5}, 3)
	f.Add([]byte{0xff, 0x01}, 9)
	f.Fuzz(func(t *testing.T, b []byte, size int) {
		if size < 1 || size > MaxSize {
			return
		}
		s, err := decodeRankSet(b, size)
		if err != nil {
			require.ErrorIs(t, err, errMalformed)
			return
		}
		require.True(t, bytes.Equal(b, s.encode()))
		for r := size; r < size+16; r++ {
			require.False(t, s.has(r))
		}
	})
}

func FuzzSplit(f *testing.F) {
	f.Add(make([]byte, 16))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, _, err := decodeSplit(b); err != nil {
			require.ErrorIs(t, err, errMalformed)
		}
	})
}

func FuzzHello(f *testing.F) {
	f.Add((&hello{version: 1, secret: true, body: []byte("body")}).encode())
	f.Add(helloMagic[:])
	f.Fuzz(func(t *testing.T, b []byte) {
		h, raw, err := readHello(bytes.NewReader(b))
		if err != nil {
			return
		}
		require.True(t, bytes.HasPrefix(b, raw))
		h2, _, err := readHello(bytes.NewReader(h.encode()))
		require.NoError(t, err)
		require.Equal(t, h, h2)
	})
}

func FuzzIdentity(f *testing.F) {
	f.Add((&identity{purpose: toMesh, rank: 1, size: 2, gid: 3, host: "h", addr: "@a"}).encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := decodeIdentity(b)
		if err != nil {
			require.ErrorIs(t, err, errMalformed)
			return
		}
		require.True(t, bytes.Equal(b, c.encode()))
	})
}

func FuzzTable(f *testing.F) {
	f.Add((&table{[]string{"@a", "@b"}, 3, nil}).encode(), 2)
	f.Add((&table{[]string{"@a", "@b"}, 3, []int{2, 0}}).encode(), 2)
	f.Fuzz(func(t *testing.T, b []byte, size int) {
		if size < 1 || size > MaxSize {
			return
		}
		decoded, err := decodeTable(b, size)
		if err != nil {
			require.ErrorIs(t, err, errMalformed)
			return
		}
		require.True(t, bytes.Equal(b, decoded.encode()))
	})
}

func FuzzFrame(f *testing.F) {
	f.Add([]byte("A\x00\x00\x00\x00"))
	f.Add([]byte("R\x02\x00\x00\x00no"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s := &session{conn: &wire{in: bytes.NewReader(b)}, limit: maxHost}
		if kind, body, err := s.recv(); err == nil {
			require.Equal(t, b[0], byte(kind))
			require.True(t, bytes.HasPrefix(b[sealedHead:], body))
		}
	})
}

// wire is a connection whose other side has said all it ever will.
type wire struct {
	net.Conn
	in *bytes.Reader
}

func (w *wire) Read(b []byte) (int, error)  { return w.in.Read(b) }
func (w *wire) Write(b []byte) (int, error) { return len(b), nil }

// FuzzHandshake says anything to either side. Without the secret nothing gets
// one through.
func FuzzHandshake(f *testing.F) {
	h := (&hello{version: 1, secret: true, body: (&identity{purpose: toMesh, size: 2}).encode()}).encode()
	f.Add(h, true)
	f.Add(append(append([]byte(nil), h...), "P\x20\x00\x00\x0000000000000000000000000000000000"...), true)
	f.Add(append(append([]byte(nil), h...), "P\x20\x00\x00\x0000000000000000000000000000000000"...), false)
	f.Fuzz(func(t *testing.T, b []byte, server bool) {
		_, err := greet(&wire{in: bytes.NewReader(b)}, server, 1, []byte("secret"), identity{purpose: toMesh, size: 2})
		require.Error(t, err)
		s, err := greet(&wire{in: bytes.NewReader(b)}, server, 1, nil, identity{purpose: toMesh, size: 2})
		if err == nil {
			_, _ = s.examine(1, identity{purpose: toMesh, size: 2})
			_, _ = s.verdict()
		}
	})
}
