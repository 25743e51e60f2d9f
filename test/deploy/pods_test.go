package deploy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/memory"
)

func TestMain(m *testing.M) {
	proctest.Play(proctest.Parts{"rank": playRank, "job": playJob})
	os.Exit(m.Run())
}

// playRank exchanges a large message of ordinary memory with the other rank, and prints what is logged and whether /dev/shm is there.
func playRank([]string) int {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	_, err := os.Stat("/dev/shm")
	fmt.Println("/dev/shm:", err == nil)
	if err := exchange(ctx); err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

func exchange(ctx context.Context) error {
	cfg, err := comm.FromEnv()
	if err != nil {
		return err
	}
	cfg.Logger = slog.New(slog.NewTextHandler(os.Stdout, nil))
	g, err := comm.Join(ctx, cfg)
	if err != nil {
		return err
	}
	defer g.Close()
	h, err := memory.NewHeap(ctx, g, device.Host(), memory.Options{})
	if err != nil {
		return err
	}
	x, err := alltoallv.New(ctx, h, alltoallv.Options{})
	if err != nil {
		return err
	}
	const n = 1 << 20
	splits := &alltoallv.Splits{Send: []int64{n, n}, Recv: []int64{n, n}}
	src, dst := bytes.Repeat([]byte{byte('a' + g.Rank())}, 2*n), make([]byte, 2*n)
	if err := x.Exchange(nil, memory.Host(dst), memory.Host(src), splits); err != nil {
		return err
	}
	if want := append(bytes.Repeat([]byte{'a'}, n), bytes.Repeat([]byte{'b'}, n)...); !bytes.Equal(dst, want) {
		return errors.New("wrong bytes")
	}
	return errors.Join(x.Close(ctx), h.Close(ctx))
}

// ranks runs two of them, each behind a command, and returns what they have printed.
func ranks(t *testing.T, via ...string) [2]string {
	t.Helper()
	if out, err := exec.Command(via[0], append(via[1:], "true")...).CombinedOutput(); err != nil {
		t.Skipf("needs the right to do what %q does: %v: %s", via, err, out)
	}
	ps := proctest.Ranks(t, 2, loopback.Addr(), proctest.Spec{Part: "rank", Via: via})
	require.Equal(t, []error{nil, nil}, proctest.Failures(ps))
	var said [2]string
	for r, p := range ps {
		said[r], _ = p.Output()
	}
	return said
}

// Ranks in PID namespaces of their own, as containers of one pod have them, exchange large messages with one copy more. They say so, and
// that one of them is not found by its number.
func TestRanksInPIDNamespacesOfTheirOwn(t *testing.T) {
	const cure = `start both in one (PID namespace )?\(docker run --pid, shareProcessNamespace of a pod\)`
	said := ranks(t, "unshare", "--pid", "--fork", "--kill-child")
	for r, text := range said {
		require.Regexp(t, `two copies" .*rank `+fmt.Sprint(1-r)+`: shm: process 1: it is in another PID namespace than this process: `+cure, text)
	}
	require.Regexp(t, regexp.MustCompile(`switchyard status will not find this process" err="process 1 of another PID namespace .*`+
		strings.Replace(cure, "(PID namespace )?", "PID namespace ", 1)), said[0]+said[1])
}

// Nothing of a group lies in /dev/shm.
func TestDevShmIsNotNeeded(t *testing.T) {
	inside := func(script string) []string {
		return []string{"unshare", "--mount", "sh", "-ec", script + ` && exec "$@"`, "sh"}
	}
	for _, c := range []struct {
		name, script, says string
	}{
		{"of one page", "mount -t tmpfs -o size=4k tmpfs /dev/shm", "/dev/shm: true"},
		{"not there", `
			new=/tmp/switchyard-dev-$$ && mkdir $new && mount -t tmpfs tmpfs $new
			for file in null zero random urandom; do touch $new/$file && mount --bind /dev/$file $new/$file; done
			mount --rbind $new /dev && umount -l $new && rmdir $new`, "/dev/shm: false"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, text := range ranks(t, inside(c.script)...) {
				require.Contains(t, text, c.says)
				require.NotContains(t, text, "level=WARN")
				require.NotContains(t, text, "PID namespace")
			}
		})
	}
}

// pods runs two ranks as an indexed Job does, each in namespaces of its own, with what pods.yaml sets and a folder, which may be none.
func pods(t *testing.T, folders ...string) (said [2]string, failed []error) {
	t.Helper()
	via := []string{"unshare", "--net", "--pid", "--fork", "--kill-child"}
	if out, err := exec.Command(via[0], append(via[1:], "true")...).CombinedOutput(); err != nil {
		t.Skipf("needs the right to do what %q does: %v: %s", via, err, out)
	}
	_, set := podOfEachRank(t)
	set["SWITCHYARD_WORLD_SIZE"], set["SWITCHYARD_LOCAL_WORLD_SIZE"], set["SWITCHYARD_JOIN_TIMEOUT"] = "2", "2", "20s"
	if folders[0] == "" {
		set["SWITCHYARD_ADDR"], set["SWITCHYARD_JOIN_TIMEOUT"] = "@job", "1s"
	}
	var ps []*proctest.Process
	for r := range 2 {
		env := []string{fmt.Sprintf("JOB_COMPLETION_INDEX=%d", r)}
		set["SWITCHYARD_SOCKETS"] = folders[r]
		for name, value := range set {
			env = append(env, name+"="+value)
		}
		ps = append(ps, proctest.Start(t, proctest.Spec{Part: "rank", Via: via, Env: env}))
	}
	failed = proctest.Failures(ps)
	for r, p := range ps {
		said[r], _ = p.Output()
	}
	return said, failed
}

// Ranks in pods of their own share memory by descriptors that cross a folder, and leave nothing there.
func TestRanksInPodsOfTheirOwn(t *testing.T) {
	folder := t.TempDir()
	said, failed := pods(t, folder, folder)
	require.Equal(t, []error{nil, nil}, failed, said)
	left, err := os.ReadDir(folder)
	require.NoError(t, err)
	require.Empty(t, left)
}

// Without a folder they do not find each other, and hear of the cure.
func TestPodsWithoutAFolder(t *testing.T) {
	said, failed := pods(t, "", "")
	for r, text := range said {
		require.Error(t, failed[r])
		require.Contains(t, text, fmt.Sprintf("comm: join: rank %d: timed out after 1s", 1-r))
	}
	require.Contains(t, said[1], "a name of one user in one network namespace; SWITCHYARD_PORT has ranks meet on a port, SWITCHYARD_SOCKETS in a folder")
}
