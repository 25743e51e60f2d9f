package deploy

import (
	"bytes"
	"context"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var bases = flag.String("image", "", "build the image on base images from a registry (pull), or on ones that debootstrap makes (debootstrap)")

// builder is buildah with storage of the test's own.
type builder struct {
	t    *testing.T
	path string
	dir  string
}

func (b *builder) run(args ...string) string {
	b.t.Helper()
	global := []string{"--root", filepath.Join(b.dir, "root"), "--runroot", filepath.Join(b.dir, "run"), "--storage-driver", "vfs"}
	ctx, cancel := context.WithTimeout(b.t.Context(), 20*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, b.path, append(global, args...)...)
	cmd.Env = append(os.Environ(), "BUILDAH_ISOLATION=chroot")
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	err := cmd.Run()
	require.NoError(b.t, err, "buildah %s: %s%s", args, out.String(), log.String())
	return strings.TrimSpace(out.String())
}

// base makes an image of a folder, and of one more that goes to a place in it.
func (b *builder) base(name, from string, more ...string) {
	b.t.Helper()
	c := b.run("from", "scratch")
	b.run("add", c, from, "/")
	if len(more) > 0 {
		b.run("add", c, more[0], more[1])
		b.run("config", "--env", "PATH="+more[1]+"/bin:/usr/sbin:/usr/bin:/sbin:/bin", c)
	}
	b.run("commit", "-q", c, "docker.io/library/"+name)
	b.run("rm", c)
}

// The image is built by its file, and in it the command finds nothing wrong, ranks meet and calls are measured. This is make image.
func TestImage(t *testing.T) {
	if *bases == "" {
		t.Skip("builds an image: make image")
	}
	path, err := exec.LookPath("buildah")
	if err != nil {
		t.Skip("needs buildah")
	}
	b := &builder{t, path, t.TempDir()}
	build := []string{"build", "-q", "-t", "localhost/switchyard", "-f", folder + "Containerfile"}
	if *bases == "debootstrap" {
		debootstrap, err := exec.LookPath("debootstrap")
		if err != nil {
			t.Skip("needs debootstrap")
		}
		debian := filepath.Join(b.dir, "debian")
		out, err := exec.Command(debootstrap, "--variant=minbase", "--include=gcc,libc6-dev", "bookworm", debian).CombinedOutput()
		require.NoError(t, err, string(out))
		goroot := goEnv(t, "GOROOT")
		b.base("debian:bookworm-slim", debian)
		b.base("golang:1.26-bookworm", debian, goroot, "/usr/local/go")
		// Modules and what has been compiled come from this machine, where a registry may be out of reach.
		build = append(build, "--pull-never", "--volume", goEnv(t, "GOMODCACHE")+":/root/go/pkg/mod", "--volume", goEnv(t, "GOCACHE")+":/root/.cache/go-build")
	}
	began := time.Now()
	b.run(append(build, root)...)
	t.Logf("built in %.0f s", time.Since(began).Seconds())

	c := b.run("from", "--pull-never", "localhost/switchyard")
	inside := func(args ...string) string {
		return b.run(append([]string{"run", c, "--"}, args...)...)
	}
	require.Contains(t, inside("switchyard", "doctor", "-json"), `{"check":"exchange","state":"ok"`)
	require.Contains(t, inside("switchyard", "run", "-n", "2", "worker"), "rank 1 of 2")
	began = time.Now()
	require.Contains(t, inside("perf", "alltoallv", "-procs", "-ranks", "2", "-sizes", "8KiB", "-json"), `"bytes_per_rank":8192`)
	t.Logf("a measured row in %.1f s", time.Since(began).Seconds())
}

func goEnv(t *testing.T, name string) string {
	t.Helper()
	out, err := exec.Command("go", "env", name).Output()
	require.NoError(t, err)
	return strings.TrimSpace(string(out))
}
