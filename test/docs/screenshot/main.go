// Command screenshot makes docs/images/top.png: the page of switchyard top in Chromium, of a job that loses a rank, gets another one and moves
// its experts.
//
//	go run ./test/docs/screenshot
//
// It runs in the module's root, takes a minute, and needs Chromium.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/switchyard-moe/switchyard/observe"
)

const (
	width, height = 1000, 1560
	within        = 5 * time.Minute
	seen          = 20 * time.Second // of the job by the page, before the picture
	mostBytes     = 150 << 10
)

func main() {
	ctx, stop := context.WithTimeout(context.Background(), within)
	err := run(ctx)
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "switchyard-screenshot-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	program := filepath.Join(dir, "moe")
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", program, "./examples/moe").CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	job := exec.CommandContext(ctx, program, "-procs", "-steps", "1000000", "-balance", "40", "-kill-rank", "1", "-at-step", "100", "-replace-at-step", "200")
	job.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	job.Cancel = func() error { return syscall.Kill(-job.Process.Pid, syscall.SIGKILL) }
	if err := job.Start(); err != nil {
		return err
	}
	defer func() { _ = job.Cancel(); _ = job.Wait() }()

	state := func(ctx context.Context) (observe.State, error) {
		s, err := observe.Everybody(ctx, 0)
		s.Ranks = slices.DeleteFunc(s.Ranks, func(r observe.Rank) bool {
			group, err := syscall.Getpgid(r.Pid)
			return err != nil || group != job.Process.Pid && !childOf(r.Pid, job.Process.Pid)
		})
		s.Joins, s.Silent, s.Processes = nil, nil, nil // of other jobs
		return observe.Merge(s), err
	}
	moved := func(s observe.State) bool {
		return len(s.Ranks) == 4 && s.Ranks[0].Epoch > 0 && len(s.Ranks[0].Past) > 0 && len(s.Ranks[0].Changes) > 0
	}
	for s, err := state(ctx); !moved(s); s, err = state(ctx) {
		if ctx.Err() != nil {
			return fmt.Errorf("the job did not lose a rank, get one and move experts within %v: %+v %w", within, s, errors.Join(ctx.Err(), err))
		}
		time.Sleep(200 * time.Millisecond)
	}

	// The browser takes its picture once all of the frame is there, and a part of it comes late.
	mux := http.NewServeMux()
	mux.Handle("/page/", observe.Page(func(r *http.Request) (observe.State, error) { return state(r.Context()) }))
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `<!doctype html><style>body { margin: 0 } iframe { border: 0; width: 100%%; height: %dpx }</style><iframe src="page/"></iframe><img src="late" hidden>`, height)
	})
	mux.HandleFunc("GET /late", func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(seen):
		case <-r.Context().Done():
		}
	})
	server := httptest.NewServer(mux)
	defer server.Close()
	shot := filepath.Join(dir, "top.png")
	browser := exec.CommandContext(ctx, "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--user-data-dir="+filepath.Join(dir, "profile"),
		"--blink-settings=preferredColorScheme=1", fmt.Sprintf("--window-size=%d,%d", width, height), "--screenshot="+shot, server.URL+"/")
	if out, err := browser.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return shrink(shot, filepath.Join("docs", "images", "top.png"))
}

// childOf says whether a process was started by another.
func childOf(pid, parent int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	return err == nil && strings.Contains(string(stat), fmt.Sprintf("\nPPid:\t%d\n", parent))
}

// shrink writes a picture with as few colors as a palette holds, and without empty lines at its end.
func shrink(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	in, err := png.Decode(bytes.NewReader(b))
	if err != nil {
		return err
	}
	// Colors lose their lowest bits until there are few enough.
	for bits := 0; ; bits++ {
		var palette color.Palette
		at := map[color.RGBA]uint8{}
		out := image.NewPaletted(in.Bounds(), nil)
		for y := range in.Bounds().Dy() {
			for x := range in.Bounds().Dx() {
				r, g, b, _ := in.At(x, y).RGBA()
				c := color.RGBA{coarse(r, bits), coarse(g, bits), coarse(b, bits), 255}
				i, ok := at[c]
				if !ok && len(palette) < 256 {
					i = uint8(len(palette))
					palette, at[c], ok = append(palette, c), i, true
				}
				if !ok {
					palette = nil
					break
				}
				out.SetColorIndex(x, y, i)
			}
			if palette == nil {
				break
			}
		}
		if palette == nil {
			continue
		}
		out.Palette = palette
		var small bytes.Buffer
		e := png.Encoder{CompressionLevel: png.BestCompression}
		if err := e.Encode(&small, out); err != nil {
			return err
		}
		if small.Len() > mostBytes {
			return fmt.Errorf("%s has %d bytes, want at most %d", to, small.Len(), mostBytes)
		}
		return os.WriteFile(to, small.Bytes(), 0o644)
	}
}

// coarse is a part of a color with its lowest bits set, so that white stays white.
func coarse(v uint32, bits int) uint8 {
	n := uint8(v >> 8)
	return n | (1<<bits - 1)
}
