// Package fatbin describes how the embedded kernels are built, so that make kernels compiles what has changed, and a test can tell when
// sources have changed and kernels have not.
package fatbin

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
)

// Folder is that of the kernels, from the module's root.
const Folder = "kernels/cuda"

// Families are the sources <name>.cu in the folder of the kernels, each of which is compiled to <name>.fatbin next to it and to a file of
// machine code for each line of Older.
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
	NVCC  string          `json:"nvcc"`  // the compiler's version
	Files map[string]File `json:"files"` // by their names in the folder of the kernels
}

// File is one embedded object.
type File struct {
	// Inputs is a hash of all that the file is made of: sources, flags, versions of compilers.
	Inputs string `json:"inputs"`
	SHA256 string `json:"sha256"`
	Bytes  int    `json:"bytes"`
}

// Target is one file to be built.
type Target struct {
	Family, File string
	Older        *Older // nil for the family's fatbin
	Inputs       string
}

// Targets are the files of the module at root, in the order of their names, for nvcc of that version.
func Targets(root fs.FS, nvcc string) ([]Target, error) {
	folder, err := fs.Sub(root, Folder)
	if err != nil {
		return nil, err
	}
	families, err := Families(folder)
	if err != nil {
		return nil, err
	}
	var all []Target
	for _, family := range families {
		sources, err := Sources(root, path.Join(Folder, family+".cu"))
		if err != nil {
			return nil, err
		}
		all = append(all, Target{family, family + ".fatbin", nil, inputs(sources, nvcc, Flags())})
		for _, o := range Olders() {
			all = append(all, Target{family, o.File(family), &o, inputs(sources, nvcc, o.Flags(), []string{o.PTX, o.PTXAS}, o.AssemblerFlags())})
		}
	}
	return all, nil
}

// inputs hashes sources, the compiler's version and what else is given.
func inputs(sources map[string]string, nvcc string, others ...[]string) string {
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(sources)) {
		fmt.Fprintf(&text, "%s %s\n", name, sources[name])
	}
	fmt.Fprintf(&text, "%s %q\n", nvcc, others)
	return Sum([]byte(text.String()))
}

var include = regexp.MustCompile(`(?m)^[ \t]*#[ \t]*include[ \t]+"([^"\n]+)"`)

// Sources hashes the source of this name of the module at root and all that it includes, by name. A header in quotes that is not next to the
// sources counts as the compiler's.
func Sources(root fs.FS, name string) (map[string]string, error) {
	found := make(map[string]string)
	return found, follow(root, name, found)
}

func follow(root fs.FS, name string, found map[string]string) error {
	if found[name] != "" {
		return nil
	}
	b, err := fs.ReadFile(root, name)
	if err != nil {
		return fmt.Errorf("fatbin: sources: %w", err)
	}
	found[name] = Sum(b)
	for _, m := range include.FindAllSubmatch(b, -1) {
		next := path.Join(path.Dir(name), string(m[1]))
		if _, err := fs.Stat(root, next); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := follow(root, next, found); err != nil {
			return err
		}
	}
	return nil
}

// folders hold the sources, from the module's root, and so do folders in them, except testdata.
func folders() []string { return []string{Folder, "internal/cuda/layout"} }

// Tree lists all kernel sources of the module at root.
func Tree(root fs.FS) ([]string, error) {
	var names []string
	for _, dir := range folders() {
		err := fs.WalkDir(root, dir, func(name string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case d.IsDir() && d.Name() == "testdata":
				return fs.SkipDir
			case !d.IsDir() && slices.Contains([]string{".cu", ".cuh", ".h"}, path.Ext(name)):
				names = append(names, name)
			}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("fatbin: sources: %w", err)
		}
	}
	return names, nil
}

// Sum is the SHA-256 of b in hexadecimal.
func Sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// FileOf is what the manifest says of a file with these bytes.
func FileOf(inputs string, b []byte) File { return File{Inputs: inputs, SHA256: Sum(b), Bytes: len(b)} }

// Parse reads a manifest.
func Parse(b []byte) (*Manifest, error) {
	m := new(Manifest)
	if err := json.Unmarshal(b, m); err != nil {
		return nil, fmt.Errorf("fatbin: manifest: %w", err)
	}
	return m, nil
}

// Text is the manifest as the file has it.
func (m *Manifest) Text() ([]byte, error) {
	text, err := json.MarshalIndent(m, "", "\t")
	return append(text, '\n'), err
}
