package comm

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/internal/proctest"
)

func meetAt(t *testing.T, addr string) {
	t.Helper()
	var cfgs []Config
	for r := range 3 {
		cfgs = append(cfgs, Config{Rank: r, Size: 3, Addr: addr})
	}
	gs, errs := joinAll(t, cfgs...)
	requireAll(t, errs)
	requireAll(t, onEach(gs, func(g *Group) error { return errors.Join(g.Barrier(testContext(t)), g.Close()) }))
}

func TestRanksMeetByAnID(t *testing.T) {
	for _, host := range []string{"", "127.0.0.1"} {
		id, err := NewID(host)
		require.NoError(t, err)
		other, err := NewID(host)
		require.NoError(t, err)
		require.NotEqual(t, id, other)
		meetAt(t, string(id))
	}
	_, err := NewID("203.0.113.7") // of the documentation's, so nobody's
	require.ErrorContains(t, err, `comm: new id: host "203.0.113.7" is not this one`)
}

// A rank that knows the address of an ID and not its secret is refused, and no error shows a secret.
func TestAnIDIsASecret(t *testing.T) {
	t.Parallel() // it mostly waits
	id, err := NewID("")
	require.NoError(t, err)
	addr, secret, err := id.parse()
	require.NoError(t, err)
	require.Len(t, secret, secretSize)
	short := Config{Size: 2, Addr: string(id), JoinTimeout: proctest.Scaled(5 * time.Second)}
	stranger := Config{Rank: 1, Size: 2, Addr: addr, JoinTimeout: proctest.Scaled(4 * time.Second)}
	_, errs := joinAll(t, short, stranger)
	require.ErrorIs(t, errs[0], ErrTimeout)
	require.ErrorIs(t, errs[1], ErrMismatch)
	require.ErrorContains(t, errs[1], "secret: the rank that connects has none, the rank it connects to has one")
	text := strings.Split(string(id), ":")[1]
	require.NotContains(t, placeName(string(id)), text)
	for _, bad := range []string{"id:", "id:" + text, "id:" + text + ":", "id:" + text[1:] + ":" + addr, "id:" + text + ":id:x"} {
		_, err := Join(testContext(t), Config{Size: 2, Addr: bad})
		require.ErrorContains(t, err, "that NewID has not made, or not all of it")
		require.NotContains(t, err.Error(), text[1:])
	}
}

func TestRanksMeetByAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "meet")
	for range 2 {
		meetAt(t, filePrefix+path)
		_, err := os.Stat(path)
		require.ErrorIs(t, err, fs.ErrNotExist, "rank 0 removes what it has written")
	}

	// A file of a job whose rank 0 was killed does no harm, nor does one that comes late.
	old, err := NewID("")
	require.NoError(t, err)
	require.NoError(t, writePlace(path, old))
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o600), info.Mode())
	late := Config{Size: 2, Addr: filePrefix + path, delay: func() { time.Sleep(5 * time.Millisecond) }}
	gs, errs := make([]*Group, 2), make([]error, 2)
	done := make(chan struct{})
	go func() {
		defer close(done)
		gs[1], errs[1] = Join(testContext(t), Config{Rank: 1, Size: 2, Addr: filePrefix + path})
	}()
	time.Sleep(50 * time.Millisecond)
	gs[0], errs[0] = Join(testContext(t), late)
	<-done
	requireAll(t, errs)
	requireAll(t, onEach(gs, func(g *Group) error { return errors.Join(g.Barrier(testContext(t)), g.Close()) }))

	// A file that is another group's by now stays.
	require.NoError(t, writePlace(path, "id:another"))
	removePlace(path, old)
	_, err = Join(testContext(t), Config{Rank: 1, Size: 2, Addr: filePrefix + path, JoinTimeout: 50 * time.Millisecond})
	require.ErrorContains(t, err, path+": addr is an ID of 10 bytes that NewID has not made")
	require.NoError(t, os.Remove(path))
	_, err = Join(testContext(t), Config{Rank: 1, Size: 2, Addr: filePrefix + path, JoinTimeout: 50 * time.Millisecond})
	require.ErrorIs(t, err, ErrTimeout)
	require.ErrorContains(t, err, "rank 0 was not found at file://"+path+" (last try: rank 0 has not written it: open "+path)
	_, err = Join(testContext(t), Config{Size: 2, Addr: "file://meet"})
	require.ErrorContains(t, err, `addr "file://meet", want file:// and an absolute path`)
	_, err = Join(testContext(t), Config{Size: 2, Addr: "file:///nowhere/at/all"})
	require.ErrorContains(t, err, "comm: join: addr \"file:///nowhere/at/all\": open /nowhere/at/.all-")
}

// A worker that torchrun has restarted, or one of another job, does not get into a group that meets at the same port.
func TestAStaleWorkerDoesNotJoin(t *testing.T) {
	t.Parallel() // it mostly waits
	addr := loopback.Addr()
	now := Config{Size: 2, Addr: addr, Job: `torchrun ["job" "1"]`, JoinTimeout: time.Minute}
	stale := Config{Rank: 1, Size: 2, Addr: addr, Job: `torchrun ["job" "0"]`, JoinTimeout: proctest.Scaled(time.Second)}
	fresh := now
	fresh.Rank = 1
	refused, ended := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(ended)
		_, err := Join(testContext(t), stale)
		refused <- err
	}()
	fresh.delay = func() { <-ended } // so that the stale one knocks first
	gs, errs := joinAll(t, now, fresh)
	requireAll(t, errs)
	require.ErrorContains(t, <-refused, "it is not a rank of the group that meets here")
	requireAll(t, onEach(gs, func(g *Group) error { return errors.Join(g.Barrier(testContext(t)), g.Close()) }))

	// Nor does a fresh one join a rank 0 of before, which goes while the fresh one waits for its own.
	before := stale
	before.Rank, before.JoinTimeout = 0, 200*time.Millisecond
	before.Addr, now.Addr, fresh.Addr = freeName(t), "", ""
	now.Addr, fresh.Addr = before.Addr, before.Addr
	oldContext := testContext(t)
	done := make(chan error)
	go func() { _, err := Join(oldContext, before); done <- err }()
	time.Sleep(50 * time.Millisecond)
	fresh.delay = nil
	var g1 *Group
	met := make(chan error)
	go func() { var err error; g1, err = Join(testContext(t), fresh); met <- err }()
	require.ErrorIs(t, <-done, ErrTimeout)
	g0, err := Join(testContext(t), now)
	require.NoError(t, err)
	require.NoError(t, <-met)
	require.NoError(t, errors.Join(g0.Close(), g1.Close()))
}

// Ranks whose sockets are in a folder meet there and leave nothing, however they find each other.
func TestSocketsInAFolder(t *testing.T) {
	folder := t.TempDir()
	id, err := newID("", folder)
	require.NoError(t, err)
	for _, addr := range []string{"file://" + folder + "/meet", loopback.Addr(), string(id)} {
		var cfgs []Config
		for r := range 3 {
			cfgs = append(cfgs, Config{Rank: r, Size: 3, Addr: addr, Sockets: folder + "/"})
		}
		gs, errs := joinAll(t, cfgs...)
		requireAll(t, errs)
		require.Equal(t, 1, gs[0].Topology().Hosts)
		requireAll(t, onEach(gs, func(g *Group) error { return errors.Join(g.Barrier(testContext(t)), g.Close()) }))
		left, err := os.ReadDir(folder)
		require.NoError(t, err)
		require.Empty(t, left, addr)
	}
}

// What is left of ranks that were killed while they joined is in nobody's way.
func TestAFolderWithSocketsOfTheDead(t *testing.T) {
	folder := t.TempDir()
	meet := filepath.Join(folder, "meet")
	dead, err := newID("", folder)
	require.NoError(t, err)
	addr, _, err := dead.parse()
	require.NoError(t, err)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: addr})
	require.NoError(t, err)
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
	require.NoError(t, os.WriteFile(meet, []byte(dead), 0o600))
	var cfgs []Config
	for r := range 2 {
		cfgs = append(cfgs, Config{Rank: r, Size: 2, Addr: "file://" + meet, Sockets: folder})
	}
	cfgs[0].delay = func() { time.Sleep(20 * time.Millisecond) } // rank 1 finds the dead one first
	gs, errs := joinAll(t, cfgs...)
	requireAll(t, errs)
	requireAll(t, onEach(gs, func(g *Group) error { return g.Close() }))
}

func TestF3_BadFoldersOfSockets(t *testing.T) {
	folder := t.TempDir()
	file := filepath.Join(folder, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	long := "/" + strings.Repeat("x", 90)
	for sockets, want := range map[string]string{
		"here":             `sockets "here" of 4 bytes, want an absolute path of at most 80 without spaces`,
		"/a b":             `sockets "/a b" of 4 bytes`,
		long:               "of 91 bytes, want an absolute path of at most 80",
		folder + "/absent": "no such file or directory",
		file:               "is not a folder",
	} {
		_, err := Join(testContext(t), Config{Size: 2, Addr: "file:///x", Sockets: sockets})
		require.ErrorContains(t, err, want)
	}
	// One rank has a folder and the other has none, or another one.
	for _, other := range []string{"", t.TempDir()} {
		addr := loopback.Addr()
		_, errs := joinAll(t, Config{Size: 2, Addr: addr, Sockets: folder, JoinTimeout: 10 * time.Second}, Config{Rank: 1, Size: 2, Addr: addr, Sockets: other, JoinTimeout: 10 * time.Second})
		for _, err := range errs {
			require.ErrorIs(t, err, ErrMismatch)
			require.ErrorContains(t, err, "folder:[")
		}
	}
}
