// Package fatbin describes how the embedded kernels were built, so that a test can tell when their sources have changed.
package fatbin

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// Families are the sources <name>.cu in the folder of the kernels, each of which is compiled to <name>.fatbin next to it.
func Families(folder fs.FS) ([]string, error) {
	names, err := fs.Glob(folder, "*.cu")
	for i, name := range names {
		names[i] = strings.TrimSuffix(name, ".cu")
	}
	return names, err
}

// Flags are nvcc's, the same for all families: machine code for Ampere, Hopper and Blackwell, and PTX for what comes
// later.
func Flags() []string {
	return []string{
		"-std=c++17", "-O3", "-fatbin", "--compress-mode=size",
		"-gencode=arch=compute_80,code=sm_80",
		"-gencode=arch=compute_90a,code=sm_90a",
		"-gencode=arch=compute_100,code=[sm_100,compute_100]",
	}
}

// Manifest is what manifest.json holds.
type Manifest struct {
	NVCC     string            `json:"nvcc"`    // the compiler's version
	Flags    []string          `json:"flags"`   // all of them
	Sources  map[string]string `json:"sources"` // SHA-256 of every .cu, .cuh and .h file
	Families map[string]Family `json:"families"`
}

// Family is one embedded object.
type Family struct {
	SHA256 string `json:"sha256"`
	Bytes  int    `json:"bytes"`
}

// folders hold the sources, from the module's root, and so do folders in them, except testdata.
func folders() []string { return []string{"kernels/cuda", "internal/cuda/layout"} }

// Sources hashes the kernel sources of the module at root.
func Sources(root fs.FS) (map[string]string, error) {
	m := make(map[string]string)
	for _, dir := range folders() {
		err := fs.WalkDir(root, dir, func(name string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case d.IsDir() && d.Name() == "testdata":
				return fs.SkipDir
			case d.IsDir() || !slices.Contains([]string{".cu", ".cuh", ".h"}, path.Ext(name)):
				return nil
			}
			b, err := fs.ReadFile(root, name)
			if err != nil {
				return err
			}
			m[name] = Sum(b)
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("fatbin: sources: %w", err)
		}
	}
	return m, nil
}

// Sum is the SHA-256 of b in hexadecimal.
func Sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// Parse reads a manifest.
func Parse(b []byte) (*Manifest, error) {
	m := new(Manifest)
	if err := json.Unmarshal(b, m); err != nil {
		return nil, fmt.Errorf("fatbin: manifest: %w", err)
	}
	return m, nil
}
