package text

import (
	"bytes"
	"context"
	"math"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestDefaultTextIsGoSource(t *testing.T) {
	c, err := Load(t.Context(), "", 8)
	require.NoError(t, err)
	require.Regexp(t, `^\d{4,} files`, c.Found)
	require.True(t, bytes.Contains(c.Train, []byte("package fmt\n")) || bytes.Contains(c.Heldout, []byte("package fmt\n")))
	require.InDelta(t, 0.1, float64(len(c.Heldout))/float64(len(c.Train)+len(c.Heldout)), 0.002)
}

func TestDirectoryIsReadInOrder(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"b.txt": "two", "a/z.txt": strings.Repeat("one ", Least/4), "a.bin": "\x00", ".git/config": "hidden", "c": "three",
	} {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	text, seen, err := readDir(t.Context(), dir, everything)
	require.NoError(t, err)
	require.Equal(t, finding{files: 3, binary: 1}, seen)
	require.Equal(t, strings.Repeat("one ", Least/4)+"twothree", string(text))
}

// A text that is huge is read as far as it is used; what is no text, cannot be read or would block is left out.
func TestOddTexts(t *testing.T) {
	dir := t.TempDir()
	line := []byte("some text that is worth a model\n")
	huge, err := os.Create(filepath.Join(dir, "huge"))
	require.NoError(t, err)
	for n := 0; n <= maxText; n += 1 << 20 {
		_, err = huge.Write(bytes.Repeat(line, 1<<20/len(line)))
		require.NoError(t, err)
	}
	require.NoError(t, huge.Truncate(1<<40))
	require.NoError(t, huge.Close())
	begin := time.Now()
	c, err := Load(t.Context(), huge.Name(), 8)
	require.NoError(t, err)
	require.Equal(t, maxText, len(c.Train)+len(c.Heldout))
	require.Equal(t, "the first 64 MiB of 1 file", c.Found)

	zeros := filepath.Join(dir, "zeros")
	require.NoError(t, os.WriteFile(zeros, nil, 0o644))
	require.NoError(t, os.Truncate(zeros, 1<<40))
	_, err = Load(t.Context(), zeros, 8)
	require.ErrorContains(t, err, "not text: it contains a zero byte")
	require.Less(t, time.Since(begin), time.Minute, "not all of two files of 1 TiB")

	folder := filepath.Join(dir, "folder")
	require.NoError(t, os.Mkdir(folder, 0o755))
	require.NoError(t, syscall.Mkfifo(filepath.Join(folder, "fifo"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(folder, "a"), bytes.Repeat(line, 1000), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(folder, "picture"), []byte("\x89PNG\x00"), 0o644))
	require.NoError(t, os.Symlink(filepath.Join(folder, "a"), filepath.Join(folder, "link")))
	require.NoError(t, os.Symlink(folder, filepath.Join(dir, "elsewhere")))
	for _, path := range []string{folder, filepath.Join(dir, "elsewhere")} {
		c, err = Load(t.Context(), path, 8)
		require.NoError(t, err)
		require.Equal(t, "1 file, left out: 1 binary file", c.Found)
	}

	gone, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Load(gone, folder, 8)
	require.ErrorIs(t, err, context.Canceled)
}

func TestSplitHoldsOutATenth(t *testing.T) {
	text := make([]byte, 100*chunk+17)
	for i := range text {
		text[i] = byte(i / chunk)
	}
	train, heldout := split(text)
	require.Equal(t, len(text), len(train)+len(heldout))
	require.Len(t, heldout, 10*chunk)
	for i := range 10 {
		k := byte(10*i + 5)
		require.Equal(t, chunk, bytes.Count(heldout, []byte{k}))
		require.Equal(t, -1, bytes.IndexByte(train, k))
	}
	for _, n := range []int{Least, Least + 1, 33333} {
		train, heldout = split(text[:n])
		require.Equal(t, n, len(train)+len(heldout))
		require.InDelta(t, float64(n)/10, float64(len(heldout)), float64(n)/20)
	}
}

func TestBatchDependsOnSeedAndStepOnly(t *testing.T) {
	text := make([]byte, 1000)
	batch := func(n int, seed uint64, step int) []int {
		at := make([]int, n)
		Batch(at, text, 8, seed, step)
		for _, i := range at {
			require.True(t, i >= 8 && i < len(text))
		}
		return at
	}
	require.Equal(t, batch(50, 1, 2), batch(50, 1, 2))
	require.Equal(t, batch(50, 1, 2), batch(90, 1, 2)[:50])
	require.NotEqual(t, batch(50, 1, 2), batch(50, 1, 3))
	require.NotEqual(t, batch(50, 1, 2), batch(50, 2, 2))
}

func TestSpreadCoversTheText(t *testing.T) {
	at := make([]int, 5)
	Spread(at, make([]byte, 13), 3)
	require.Equal(t, []int{3, 5, 7, 9, 11}, at)
}

func TestBigram(t *testing.T) {
	b := NewBigram([]byte("abababac"))
	// a is followed by b 3 times and by c once, b by a 3 times.
	require.InDelta(t, 3.1/29.6, b.P('a', 'b'), 1e-12)
	require.InDelta(t, 1.1/29.6, b.P('a', 'c'), 1e-12)
	require.InDelta(t, 0.1/29.6, b.P('a', 'a'), 1e-12)
	require.InDelta(t, 3.1/28.6, b.P('b', 'a'), 1e-12)
	require.InDelta(t, 1.0/256, b.P('z', 'a'), 1e-12)
	for _, prev := range []byte("abz") {
		sum := 0.0
		for next := range 256 {
			sum += b.P(prev, byte(next))
		}
		require.InDelta(t, 1, sum, 1e-12)
	}
	require.InDelta(t, -(math.Log(3.1/29.6)+math.Log(3.1/28.6))/2, b.Loss([]byte("aba"), []int{1, 2}), 1e-12)
}

func TestReadable(t *testing.T) {
	require.Equal(t, "    a·é\n··b·", Readable([]byte("\ta\x1bé\n\xff\x00b\r")))
}

func TestPromptBeginsWithALine(t *testing.T) {
	text := []byte(strings.Repeat("0123456789 0123456789 0123456789 012345678\n", 100))
	p := Prompt(text, 8)
	require.Equal(t, byte('0'), p[0])
	require.Equal(t, byte('\n'), p[len(p)-1])
	require.LessOrEqual(t, len(p), promptBytes)
	for _, context := range []int{1, 50, 1000} {
		for _, text := range [][]byte{text, bytes.Repeat([]byte("x"), 1001), bytes.Repeat([]byte("\n"), 1001)} {
			require.GreaterOrEqual(t, len(Prompt(text, context)), context)
		}
	}
}
