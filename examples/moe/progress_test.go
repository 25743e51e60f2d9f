package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestProgressIsABarOnATerminalAndLinesElsewhere(t *testing.T) {
	shown := func(terminal bool) string {
		f, err := os.Create(filepath.Join(t.TempDir(), "out"))
		require.NoError(t, err)
		p := newProgress(f)
		require.False(t, p.terminal, "a file is no terminal")
		p.terminal = terminal
		w := &worker{cfg: config{Steps: 4, Batch: 10}, model: blankModel(config{})}
		for range 4 {
			w.losses, w.elapsed = append(w.losses, 2), w.elapsed+time.Second
			p.step(w)
			p.next = time.Time{}
		}
		p.close()
		require.NoError(t, f.Close())
		b, err := os.ReadFile(f.Name())
		require.NoError(t, err)
		return string(b)
	}
	const middle = "step 2/4  loss 2.000  10 tokens/s  0% communication  2s left"
	require.Contains(t, shown(true), "\r[############            ] "+middle+"\x1b[K\r[")
	require.Contains(t, shown(false), "\n"+middle+"\nstep 3/4")
}
