// Genfatbin compiles the CUDA kernels to the fatbins and the machine code for older drivers that the library embeds, and writes their manifest.
// A file stays if the manifest says that it was made of the same sources, flags and compilers, so a run goes on where one was interrupted.
//
//	go run ./kernels/cuda/internal/genfatbin [-root .] [-all] [-only NAME]
//
// The compiler is $NVCC, or nvcc on the PATH, or one from PyPI. The assemblers of earlier CUDA versions are from PyPI. Packages from there are
// installed into virtual environments in the user's cache folder. nvcc needs g++.
package main

import (
	"bytes"
	"compress/gzip"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/switchyard-moe/switchyard/kernels/cuda/internal/fatbin"
)

func main() {
	root := flag.String("root", ".", "the module's root")
	all := flag.Bool("all", false, "compile everything, also what has not changed")
	only := flag.String("only", "", "compile this source alone, such as p2p; what else has changed is left out of the manifest")
	flag.Parse()
	if err := run(*root, *all, *only); err != nil {
		fmt.Fprintln(os.Stderr, "genfatbin:", err)
		os.Exit(1)
	}
}

// generator is one run.
type generator struct {
	dir, nvcc  string
	assemblers map[string]string // by version

	mu       sync.Mutex
	manifest *fatbin.Manifest
}

func run(root string, all bool, only string) error {
	g := &generator{dir: filepath.Join(root, filepath.FromSlash(fatbin.Folder)), assemblers: map[string]string{}}
	var err error
	if g.nvcc, err = compiler(); err != nil {
		return err
	}
	version, err := version(g.nvcc)
	if err != nil {
		return err
	}
	targets, err := fatbin.Targets(os.DirFS(root), version)
	if err != nil {
		return err
	}
	todo, err := g.begin(version, targets, all)
	if err != nil {
		return err
	}
	if only != "" {
		todo = slices.DeleteFunc(todo, func(t fatbin.Target) bool { return !strings.HasPrefix(path.Base(t.File), only+".") })
	}
	for _, t := range todo {
		if t.Older != nil && g.assemblers[t.Older.PTXAS] == "" {
			if g.assemblers[t.Older.PTXAS], err = assembler(t.Older.PTXAS); err != nil {
				return err
			}
		}
	}
	var jobs errgroup.Group
	jobs.SetLimit(runtime.NumCPU())
	for _, t := range todo {
		jobs.Go(func() error {
			if err := g.build(t); err != nil {
				return fmt.Errorf("%s: %w", t.File, err)
			}
			return nil
		})
	}
	return jobs.Wait()
}

// begin removes files that are no target's, and leaves in the manifest those that are up to date. It returns the others.
func (g *generator) begin(version string, targets []fatbin.Target, all bool) ([]fatbin.Target, error) {
	before := new(fatbin.Manifest)
	if text, err := os.ReadFile(filepath.Join(g.dir, "manifest.json")); err == nil {
		if m, err := fatbin.Parse(text); err == nil { // else, as after a merge with conflicts, nothing is up to date
			before = m
		}
	}
	g.manifest = &fatbin.Manifest{NVCC: version, Files: make(map[string]fatbin.File)}
	var todo []fatbin.Target
	wanted := map[string]bool{}
	for _, t := range targets {
		wanted[t.File] = true
		b, err := os.ReadFile(filepath.Join(g.dir, t.File))
		if f := fatbin.FileOf(t.Inputs, b); err == nil && !all && before.Files[t.File] == f {
			g.manifest.Files[t.File] = f
		} else {
			todo = append(todo, t)
		}
	}
	for _, pattern := range []string{"*.fatbin", "older/*.gz"} {
		files, err := filepath.Glob(filepath.Join(g.dir, pattern))
		if err != nil {
			return nil, err
		}
		for _, f := range files {
			name, err := filepath.Rel(g.dir, f)
			if err == nil && !wanted[filepath.ToSlash(name)] {
				err = os.Remove(f)
			}
			if err != nil {
				return nil, err
			}
		}
	}
	return todo, g.save()
}

// save writes the manifest of what is up to date. g.mu is held, or nobody else runs.
func (g *generator) save() error {
	text, err := g.manifest.Text()
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(g.dir, "manifest.json"), text, 0o644)
}

// build makes a target's file and notes it in the manifest.
func (g *generator) build(t fatbin.Target) error {
	tmp, err := os.MkdirTemp("", "genfatbin-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	fmt.Fprintln(os.Stderr, "genfatbin:", t.File)
	made := filepath.Join(tmp, t.Family)
	var b []byte
	if t.Older == nil {
		err = g.command(g.nvcc, append(fatbin.Flags(), "-o", made, t.Family+".cu")...)
		if err == nil {
			b, err = os.ReadFile(made)
		}
	} else {
		b, err = g.older(*t.Older, t.Family, made)
	}
	if err != nil {
		return err
	}
	to := filepath.Join(g.dir, t.File)
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(to, b, 0o644); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.manifest.Files[t.File] = fatbin.FileOf(t.Inputs, b)
	return g.save()
}

// The version of PTX that nvcc writes. The assembler looks at the line before anything else, and refuses instructions that it does not know.
var ptxVersion = regexp.MustCompile(`(?m)^\.version \d+\.\d+$`)

// older is the compressed machine code of a family; made is a name for files on the way.
func (g *generator) older(o fatbin.Older, family, made string) ([]byte, error) {
	if err := g.command(g.nvcc, append(o.Flags(), "-o", made+".ptx", family+".cu")...); err != nil {
		return nil, err
	}
	text, err := os.ReadFile(made + ".ptx")
	if err != nil {
		return nil, err
	}
	if n := len(ptxVersion.FindAll(text, -1)); n != 1 {
		return nil, fmt.Errorf("%d lines of PTX say its version", n)
	}
	if err := os.WriteFile(made+".ptx", ptxVersion.ReplaceAll(text, []byte(".version "+o.PTX)), 0o644); err != nil {
		return nil, err
	}
	if err := g.command(g.assemblers[o.PTXAS], append(o.AssemblerFlags(), "-o", made+".cubin", made+".ptx")...); err != nil {
		return nil, err
	}
	code, err := os.ReadFile(made + ".cubin")
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	z, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if _, err := z.Write(code); err != nil {
		return nil, err
	}
	err = z.Close()
	return out.Bytes(), err
}

// command runs a compiler in the folder of the kernels.
func (g *generator) command(name string, args ...string) error {
	c := exec.Command(name, args...)
	c.Dir, c.Stdout, c.Stderr = g.dir, os.Stderr, os.Stderr
	if err := c.Run(); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(append([]string{filepath.Base(name)}, args...), " "), err)
	}
	return nil
}
