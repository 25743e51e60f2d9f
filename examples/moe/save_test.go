package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/examples/moe/checkpoint"
	"github.com/switchyard-moe/switchyard/examples/moe/model"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/stack"
)

// A model that 3 ranks have saved, processes or not, predicts the poem on one rank.
func TestSavedModelIsTheTrainedOne(t *testing.T) {
	text := poem(t)
	line := []byte("a rose is a rose is a rose, and the train on the rails is never the train of the rail\n")
	var first []byte
	for _, more := range []string{"", "-procs"} {
		path := filepath.Join(t.TempDir(), "model")
		args := append(small("-text", text, "-save", path, "-ranks", "3", "-experts", "7", "-steps", "200"), strings.Fields(more)...)
		code, out, errs := start(t, args...).end()
		require.Zero(t, code, errs)
		require.Contains(t, out, "the model is in "+path)
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		_, weights, _ := bytes.Cut(b, []byte("\n"))
		if first == nil {
			first = weights
		}
		require.True(t, bytes.Equal(first, weights), "ranks that are processes compute the same")

		m, err := checkpoint.Read(path)
		require.NoError(t, err)
		c := m.Config
		groups, err := comm.Local(1)
		require.NoError(t, err)
		s, err := stack.Open(t.Context(), groups[0], device.Host(), stack.Options{Dispatcher: &dispatch.Options{
			Experts: c.Experts, TopK: c.TopK, Hidden: c.Hidden, MaxTokens: len(line), Handles: c.Layers, HostCounts: true,
		}})
		require.NoError(t, err)
		rows, err := s.Heap.Alloc(4 * int64(s.Dispatcher.MaxRows()*c.Hidden))
		require.NoError(t, err)
		made := make([]memory.View, c.Layers)
		for i := range made {
			made[i] = rows.View()
		}
		whole := model.New(c, 0, s.Dispatcher, nil, made)
		m.Load(whole, s.Dispatcher.Placement().Local(0))
		var at []int
		for i := c.Context; i < len(line); i++ {
			at = append(at, i)
		}
		require.NoError(t, whole.Forward(line, at))
		whole.Release()
		require.Less(t, whole.Loss(line, at)/float64(len(at)), 0.7, "nats a byte, where a bigram model has more than 1")
		require.NoError(t, s.Close(t.Context()))
		require.NoError(t, groups[0].Close())
	}
}

// A file that is no whole model is refused, with its name.
func TestBrokenModelIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model")
	code, _, errs := start(t, small("-text", poem(t), "-save", path, "-steps", "2")...).end()
	require.Zero(t, code, errs)
	whole, err := os.ReadFile(path)
	require.NoError(t, err)
	for what, b := range map[string][]byte{
		"want":                  whole[:len(whole)-4],
		"not those":             append(append([]byte(nil), whole[:len(whole)-1]...), whole[len(whole)-1]^1),
		"not a file that":       []byte("{}\n"),
		"-layers is 0, want at": []byte(strings.Replace(string(whole), `"layers":2`, `"layers":0`, 1)),
	} {
		require.NoError(t, os.WriteFile(path, b, 0o644))
		_, err := checkpoint.Read(path)
		require.ErrorContains(t, err, what)
		require.ErrorContains(t, err, path)
	}
	folder, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, folder, 1, "nothing is left over")
}
