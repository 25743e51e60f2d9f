// Package text has what the models learn from: files, divided into what they see and what is held out, and a bigram model.
package text

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/cespare/xxhash/v2"

	"github.com/switchyard-moe/switchyard/examples/moe/words"
)

// Least is how many bytes a text must have: fewer are not worth a model.
const Least = 10 << 10

const (
	maxText  = 64 << 20 // bytes; more is left unread
	maxFiles = 50_000   // in a directory; more are not looked at
	maxTable = 256 << 10
	chunk    = 16 << 10
	every    = 10 // one chunk of these is held out
)

// Corpus is a text in two parts: Train is what the models learn from, Heldout what they are judged by.
type Corpus struct {
	Name           string
	Found          string // what was read, and what was not
	Train, Heldout []byte

	once  sync.Once
	count *Bigram
}

// New divides a text.
func New(name string, text []byte) *Corpus {
	c := &Corpus{Name: name}
	c.Train, c.Heldout = split(text)
	return c
}

// Bigram is the bigram model of the training text.
func (c *Corpus) Bigram() *Bigram {
	c.once.Do(func() { c.count = NewBigram(c.Train) })
	return c.count
}

// Digest tells texts apart.
func (c *Corpus) Digest() uint64 { return xxhash.Sum64(c.Train) ^ xxhash.Sum64(c.Heldout) }

// Load reads the file or directory called path, or the Go standard library if path is empty. Its errors are the user's to mend, but for
// that of a context which ends.
func Load(ctx context.Context, path string, contextBytes int) (*Corpus, error) {
	name := path
	keep := everything
	if path == "" {
		root, err := goroot()
		if err != nil {
			return nil, fmt.Errorf("no default text: %w; name one with -text", err)
		}
		path = filepath.Join(root, "src")
		name, keep = path, goSource
	}
	var text []byte
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("text: %w", err)
	}
	var seen finding
	switch {
	case info.IsDir():
		text, seen, err = readDir(ctx, path, keep)
	case !info.Mode().IsRegular():
		err = fmt.Errorf("it is %s, not a file or a directory", kindOf(info.Mode()))
	default:
		seen.files = 1
		text, err = readFile(path, maxText)
		seen.more = err == nil && info.Size() > maxText
	}
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil:
		return nil, fmt.Errorf("text %s: %w", path, err)
	case len(text) == 0 && seen.leftOut() != "":
		return nil, fmt.Errorf("text %s holds no text: %s", path, seen.leftOut())
	case len(text) == 0 && seen.irregular:
		return nil, fmt.Errorf("text %s holds no regular file", path)
	case len(text) == 0:
		return nil, fmt.Errorf("text %s is empty", path)
	case len(text) < Least:
		return nil, fmt.Errorf("text %s is too short: %d bytes, want at least %d", path, len(text), Least)
	}
	c := New(name, text)
	c.Found = seen.String()
	if len(c.Heldout) <= contextBytes {
		return nil, fmt.Errorf("text %s is too short: %d bytes are held out, -context is %d", path, len(c.Heldout), contextBytes)
	}
	return c, nil
}

// kindOf names what is neither a file nor a directory.
func kindOf(m fs.FileMode) string {
	switch {
	case m&fs.ModeNamedPipe != 0:
		return "a FIFO"
	case m&fs.ModeSocket != 0:
		return "a socket"
	case m&fs.ModeDevice != 0:
		return "a device"
	}
	return "something else"
}

// finding is what was found where a text was looked for.
type finding struct {
	files              int
	binary, unreadable int
	more               bool // there was more than is used
	irregular          bool // there was no regular file, but something else
}

func (f finding) leftOut() string {
	var parts []string
	if f.binary > 0 {
		parts = append(parts, words.Count(f.binary, "binary file"))
	}
	if f.unreadable > 0 {
		parts = append(parts, fmt.Sprintf("%d unreadable", f.unreadable))
	}
	return strings.Join(parts, ", ")
}

func (f finding) String() string {
	s := words.Count(f.files, "file")
	if f.more {
		s = fmt.Sprintf("the first %d MiB of %s", maxText>>20, s)
	}
	if out := f.leftOut(); out != "" {
		s += ", left out: " + out
	}
	return s
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

// readDir joins the text files below root in the order of their names. Hidden files are left out, and what is not text, not
// readable or not a regular file.
func readDir(ctx context.Context, root string, keep func(name string, e fs.DirEntry) bool) (text []byte, seen finding, err error) {
	if root, err = filepath.EvalSymlinks(root); err != nil {
		return nil, seen, err
	}
	looked, others := 0, 0
	err = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		name, relErr := filepath.Rel(root, path)
		switch {
		case name == "." || relErr != nil:
			return errors.Join(err, relErr)
		case err != nil: // a directory that cannot be listed
			seen.unreadable++
			return fs.SkipDir
		case strings.HasPrefix(e.Name(), ".") || !keep(name, e):
			if e.IsDir() {
				return fs.SkipDir
			}
			return nil
		case e.IsDir():
			return nil
		case !e.Type().IsRegular():
			others++
			return nil
		}
		if looked++; looked > maxFiles {
			seen.more = true
			return fs.SkipAll
		}
		// Files of size 0 are empty or, in /proc, not what they seem.
		if info, err := e.Info(); err != nil || info.Size() == 0 {
			return nil
		}
		b, err := readFile(path, maxText+1-len(text))
		switch {
		case errors.Is(err, errBinary):
			seen.binary++
			return nil
		case err != nil:
			seen.unreadable++
			return nil
		}
		seen.files++
		if text = append(text, b...); len(text) > maxText {
			text = text[:maxText]
			seen.more = true
			return fs.SkipAll
		}
		return nil
	})
	seen.irregular = looked == 0 && others > 0
	return text, seen, err
}

var errBinary = errors.New("not text: it contains a zero byte")

// readFile reads a file, at most the given number of bytes of it.
func readFile(path string, most int) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	// Most of what is not text shows it at the beginning.
	var head [8 << 10]byte
	n, err := io.ReadFull(f, head[:min(len(head), most)])
	if bytes.IndexByte(head[:n], 0) >= 0 {
		return nil, errBinary
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return append([]byte(nil), head[:n]...), nil
	}
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	b.Write(head[:n])
	if _, err := io.Copy(&b, io.LimitReader(f, int64(most-n))); err != nil {
		return nil, err
	}
	if bytes.IndexByte(b.Bytes()[n:], 0) >= 0 {
		return nil, errBinary
	}
	return b.Bytes(), nil
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

// Batch fills at with the places in the training text that a step learns to predict. It depends on seed and step only: the ranks
// agree on a batch without a word, however many they are.
func Batch(at []int, text []byte, context int, seed uint64, step int) {
	r := rand.New(rand.NewPCG(seed, uint64(step)))
	for i := range at {
		at[i] = context + r.IntN(len(text)-context)
	}
}

// Spread fills at with places spread evenly over the text.
func Spread(at []int, text []byte, context int) {
	for i := range at {
		at[i] = context + int(int64(len(text)-context)*int64(i)/int64(len(at)))
	}
}
