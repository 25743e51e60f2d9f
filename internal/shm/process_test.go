package shm

import (
	"encoding/json"
	"os"
	"runtime"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/internal/proctest"
)

// child tells where its memory is, and waits for the end of its input.
type child struct {
	Process Process
	Text    uintptr
}

const text = "what another process has"

func playChild([]string) int {
	b, nonce := []byte(text), NewNonce()
	_ = json.NewEncoder(os.Stdout).Encode(child{Self(nonce), uintptr(unsafe.Pointer(unsafe.SliceData(b)))})
	_, _ = os.Stdin.Read(make([]byte, 1))
	runtime.KeepAlive(nonce)
	runtime.KeepAlive(b)
	return 0
}

func TestMain(m *testing.M) {
	proctest.Play(proctest.Parts{"child": playChild})
	os.Exit(m.Run())
}

func TestReadsTheMemoryOfAnotherProcess(t *testing.T) {
	p := proctest.Start(t, proctest.Spec{Part: "child"})
	line, ok := p.Line()
	require.True(t, ok)
	var c child
	require.NoError(t, json.Unmarshal([]byte(line), &c))

	if err := c.Process.Probe(); err != nil {
		require.ErrorIs(t, err, unix.EPERM)
		t.Skip("this system does not let processes read each other's memory")
	}
	dst := make([]byte, len(text))
	require.NoError(t, c.Process.Read(dst, c.Text))
	require.Equal(t, text, string(dst))
	require.ErrorIs(t, c.Process.Read(dst, 8), unix.EFAULT)

	stranger := c.Process
	stranger.Nonce[0]++
	require.ErrorIs(t, stranger.Read(dst, c.Text), errStranger)

	p.CloseInput()
	require.Zero(t, p.Wait())
	require.ErrorIs(t, c.Process.Read(dst, c.Text), unix.ESRCH)
}

func TestACardTellsOfAProcess(t *testing.T) {
	p := Process{PID: 1<<22 - 1, Space: 0xf0000001, At: 0xc000123456, Nonce: Nonce{1, 15: 2}}
	card := make([]byte, CardBytes)
	p.Write(card)
	require.Equal(t, p, ReadCard(card))
	nonce := NewNonce()
	defer runtime.KeepAlive(nonce)
	self := Self(nonce)
	require.NotZero(t, self.Space)
	require.NoError(t, self.Probe())
}

// A number of another namespace may be that of any process here, this one too.
func TestAProcessOfAnotherNamespaceIsNotRead(t *testing.T) {
	nonce := NewNonce()
	defer runtime.KeepAlive(nonce)
	self := Self(nonce)
	self.Space++
	err := self.Probe()
	require.ErrorIs(t, err, errElsewhere)
	require.ErrorContains(t, err, "is in another PID namespace than this process: start both in one")
	self.Space = 0 // not known
	require.NoError(t, self.Probe())
}

func TestAPartOfAMessageIsNotEnough(t *testing.T) {
	nonce := NewNonce()
	defer runtime.KeepAlive(nonce)
	self := Self(nonce)
	page := os.Getpagesize()
	mem, err := unix.Mmap(-1, 0, 2*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(mem)) }()
	dst := make([]byte, 2*page)
	require.NoError(t, self.Read(dst, Addr(mem)))
	require.NoError(t, unix.Mprotect(mem[page:], unix.PROT_NONE))
	require.ErrorIs(t, self.Read(dst, Addr(mem)), unix.EFAULT)
	require.NoError(t, self.Read(dst[:page], Addr(mem)))
}

func TestReadsOfWhoWasRevokedAreErrors(t *testing.T) {
	nonce, b := NewNonce(), []byte("text")
	p := Self(nonce)
	dst := make([]byte, len(b))
	require.NoError(t, p.Read(dst, Addr(b)))
	nonce.Revoke()
	require.ErrorIs(t, p.Read(dst, Addr(b)), errStranger)
	runtime.KeepAlive(nonce)
	runtime.KeepAlive(b)
}
