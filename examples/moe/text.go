package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/cespare/xxhash/v2"
)

const (
	minText  = 10 << 10 // bytes; less is not worth a model
	maxText  = 64 << 20 // bytes; more is left unread
	maxTable = 256 << 10
	chunk    = 16 << 10
	every    = 10 // one chunk of so many is held out
)

// corpus is a text in two parts: train is what the models learn from, heldout what they are judged by.
type corpus struct {
	name           string
	files          int
	train, heldout []byte

	once  sync.Once
	count *bigram
}

// bigram is the bigram model of the training text.
func (c *corpus) bigram() *bigram {
	c.once.Do(func() { c.count = newBigram(c.train) })
	return c.count
}

// digest tells texts apart.
func (c *corpus) digest() uint64 { return xxhash.Sum64(c.train) ^ xxhash.Sum64(c.heldout) }

// loadCorpus reads the file or directory called path, or the Go standard library if path is empty. Its errors are the
// user's to mend.
func loadCorpus(path string, context int) (*corpus, error) {
	c := &corpus{name: path}
	keep := everything
	if path == "" {
		root, err := goroot()
		if err != nil {
			return nil, usagef("no default text: %w; name one with -text", err)
		}
		path = filepath.Join(root, "src")
		c.name, keep = path, goSource
	}
	var text []byte
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, usagef("text: %w", err)
	case info.IsDir():
		text, c.files, err = readDir(path, keep)
	case !info.Mode().IsRegular():
		err = errors.New("not a regular file or directory")
	default:
		c.files = 1
		text, err = readFile(path)
	}
	if err != nil {
		return nil, usagef("text %s: %w", path, err)
	}
	switch {
	case len(text) == 0:
		return nil, usagef("text %s is empty", path)
	case len(text) < minText:
		return nil, usagef("text %s is too short: %d bytes, want at least %d", path, len(text), minText)
	}
	c.train, c.heldout = split(text)
	if len(c.heldout) <= context {
		return nil, usagef("text %s is too short: %d bytes are held out, -context is %d", path, len(c.heldout), context)
	}
	return c, nil
}

// goroot asks the go command, which ran this program or is at least likely to be there.
func goroot() (string, error) {
	out, err := exec.Command("go", "env", "GOROOT").Output()
	root := string(bytes.TrimSpace(out))
	if err == nil && root == "" {
		err = errors.New("no answer")
	}
	if err != nil {
		return "", fmt.Errorf("go env GOROOT: %w", err)
	}
	return root, nil
}

func everything(string, fs.DirEntry) bool { return true }

// goSource picks what people wrote: no tests, no commands, no tables of a generator.
func goSource(name string, e fs.DirEntry) bool {
	if e.IsDir() {
		return name != "cmd" && e.Name() != "testdata" && e.Name() != "vendor"
	}
	if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
		return false
	}
	info, err := e.Info()
	return err == nil && info.Size() <= maxTable
}

// readDir joins the text files below root in the order of their names. Binary and hidden files are left out.
func readDir(root string, keep func(name string, e fs.DirEntry) bool) (text []byte, files int, err error) {
	err = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		switch {
		case err != nil:
			return err
		case name == ".":
			return nil
		case strings.HasPrefix(e.Name(), ".") || !keep(name, e):
			if e.IsDir() {
				return fs.SkipDir
			}
			return nil
		case !e.Type().IsRegular():
			return nil
		}
		b, err := readFile(path)
		if errors.Is(err, errBinary) {
			return nil
		}
		if err != nil {
			return err
		}
		files++
		if text = append(text, b...); len(text) >= maxText {
			text = text[:maxText]
			return fs.SkipAll
		}
		return nil
	})
	return text, files, err
}

var errBinary = errors.New("not text: it contains a zero byte")

// readFile reads the first maxText bytes of a file.
func readFile(path string) ([]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	b = b[:min(len(b), maxText)]
	if bytes.IndexByte(b, 0) >= 0 {
		return nil, errBinary
	}
	return b, nil
}

// split cuts the text into chunks, of which one in ten is held out. So both parts are alike, however the text is
// ordered.
func split(text []byte) (train, heldout []byte) {
	size := min(chunk, max(1, len(text)/(2*every)))
	for i := 0; len(text) > 0; i++ {
		c := text[:min(size, len(text))]
		text = text[len(c):]
		if i%every == every/2 {
			heldout = append(heldout, c...)
		} else {
			train = append(train, c...)
		}
	}
	return train, heldout
}

// batchOf fills at with the places in the training text that a step learns to predict. It depends on seed and step only: the ranks
// agree on a batch without a word, however many they are.
func batchOf(at []int, text []byte, context int, seed uint64, step int) {
	r := rand.New(rand.NewPCG(seed, uint64(step)))
	for i := range at {
		at[i] = context + r.IntN(len(text)-context)
	}
}

// spread fills at with places spread evenly over the text.
func spread(at []int, text []byte, context int) {
	for i := range at {
		at[i] = context + int(int64(len(text)-context)*int64(i)/int64(len(at)))
	}
}
