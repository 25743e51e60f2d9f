// Genfatbin compiles the CUDA kernels to the fatbins that the library embeds, and writes their manifest.
//
//	go run ./kernels/cuda/internal/genfatbin [-root .]
//
// The compiler is $NVCC, or nvcc on the PATH, or one from PyPI that it installs into a virtual environment of its own in
// the user's cache folder. nvcc needs g++.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/switchyard-moe/switchyard/kernels/cuda/internal/fatbin"
)

func main() {
	root := flag.String("root", ".", "the module's root")
	flag.Parse()
	if err := run(*root); err != nil {
		fmt.Fprintln(os.Stderr, "genfatbin:", err)
		os.Exit(1)
	}
}

func run(root string) error {
	dir := filepath.Join(root, "kernels", "cuda")
	nvcc, err := compiler()
	if err != nil {
		return err
	}
	m := fatbin.Manifest{Flags: fatbin.Flags(), Families: make(map[string]fatbin.Family)}
	if m.NVCC, err = version(nvcc); err != nil {
		return err
	}
	families, err := fatbin.Families(os.DirFS(dir))
	if err != nil {
		return err
	}
	for _, name := range families {
		out := name + ".fatbin"
		args := append(fatbin.Flags(), "-o", out, name+".cu")
		c := exec.Command(nvcc, args...)
		c.Dir, c.Stdout, c.Stderr = dir, os.Stderr, os.Stderr
		if err := c.Run(); err != nil {
			return fmt.Errorf("compile %s.cu: %w", name, err)
		}
		b, err := os.ReadFile(filepath.Join(dir, out))
		if err != nil {
			return err
		}
		m.Families[name] = fatbin.Family{SHA256: fatbin.Sum(b), Bytes: len(b)}
	}
	if m.Sources, err = fatbin.Sources(os.DirFS(root)); err != nil {
		return err
	}
	text, err := json.MarshalIndent(m, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "manifest.json"), append(text, '\n'), 0o644)
}

func version(nvcc string) (string, error) {
	out, err := exec.Command(nvcc, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("%s --version: %w", nvcc, err)
	}
	v := regexp.MustCompile(`V\d+(\.\d+)+`).Find(out)
	if v == nil {
		return "", fmt.Errorf("%s --version says %q", nvcc, strings.TrimSpace(string(out)))
	}
	return string(v[1:]), nil
}

func compiler() (string, error) {
	if p := os.Getenv("NVCC"); p != "" {
		return p, nil
	}
	if p, err := exec.LookPath("nvcc"); err == nil {
		return p, nil
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	env := filepath.Join(cache, "switchyard", "nvcc-13.0")
	find := func() (string, error) {
		list, err := filepath.Glob(filepath.Join(env, "lib", "python*", "site-packages", "nvidia", "cu13", "bin", "nvcc"))
		if err == nil && len(list) == 0 {
			err = errors.New("no nvcc in " + env)
		}
		if err != nil {
			return "", err
		}
		return list[0], nil
	}
	if p, err := find(); err == nil {
		return p, nil
	}
	for _, args := range [][]string{
		{"python3", "-m", "venv", env},
		{filepath.Join(env, "bin", "pip"), "install", "--quiet", "nvidia-cuda-nvcc==13.0.*", "nvidia-nvvm==13.0.*", "nvidia-cuda-crt==13.0.*",
			"nvidia-cuda-runtime==13.0.*", "nvidia-cuda-cccl==13.0.*"},
	} {
		c := exec.Command(args[0], args[1:]...)
		c.Stdout, c.Stderr = os.Stderr, os.Stderr
		if err := c.Run(); err != nil {
			return "", fmt.Errorf("%s: %w", strings.Join(args, " "), err)
		}
	}
	return find()
}
