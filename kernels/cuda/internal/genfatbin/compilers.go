package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

func version(compiler string) (string, error) {
	out, err := exec.Command(compiler, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("%s --version: %w", compiler, err)
	}
	v := regexp.MustCompile(`V\d+(\.\d+)+`).Find(out)
	if v == nil {
		return "", fmt.Errorf("%s --version says %q", compiler, strings.TrimSpace(string(out)))
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
	return fetched("nvcc-13.0", filepath.Join("cu13", "bin", "nvcc"), "nvidia-cuda-nvcc==13.0.*", "nvidia-nvvm==13.0.*", "nvidia-cuda-crt==13.0.*",
		"nvidia-cuda-runtime==13.0.*", "nvidia-cuda-cccl==13.0.*")
}

// assembler is ptxas of that version of CUDA 12.
func assembler(want string) (string, error) {
	p, err := fetched("ptxas-"+want, filepath.Join("cuda_nvcc", "bin", "ptxas"), "nvidia-cuda-nvcc-cu12=="+want)
	if err != nil {
		return "", err
	}
	if got, err := version(p); err != nil || got != want {
		return "", fmt.Errorf("%s is version %s, want %s (%v)", p, got, want, err)
	}
	return p, nil
}

// fetched is a program of packages of PyPI, which are installed into the environment of that name if they are not there.
func fetched(name, program string, packages ...string) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	env := filepath.Join(cache, "switchyard", name)
	find := func() (string, error) {
		list, err := filepath.Glob(filepath.Join(env, "lib", "python*", "site-packages", "nvidia", program))
		if err == nil && len(list) == 0 {
			err = fmt.Errorf("no %s in %s", filepath.Base(program), env)
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
		append([]string{filepath.Join(env, "bin", "pip"), "install", "--quiet", "--no-deps"}, packages...),
	} {
		c := exec.Command(args[0], args[1:]...)
		c.Stdout, c.Stderr = os.Stderr, os.Stderr
		if err := c.Run(); err != nil {
			return "", fmt.Errorf("%s: %w", strings.Join(args, " "), err)
		}
	}
	return find()
}
