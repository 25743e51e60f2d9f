// Package checkpoint keeps a trained model in a file: a line of JSON that describes it, and its weights as little-endian float32.
package checkpoint

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cespare/xxhash/v2"

	"github.com/switchyard-moe/switchyard/examples/moe/config"
	"github.com/switchyard-moe/switchyard/examples/moe/model"
)

// Model is a whole model, whichever ranks its parts were on.
type Model struct {
	Config config.Config
	// Dense is the dense part, by stage of backward. Experts[e] is expert e, layer by layer.
	Dense   [][]float32
	Experts [][][]float32
	// Digest tells models apart that were read from files.
	Digest uint64
}

// header is the first line of the file.
type header struct {
	Format string
	Config config.Config
	Floats int
	Digest uint64 // of the weights as they are in the file
}

const format = "switchyard examples/moe 1"

// New is a model without numbers.
func New(c config.Config) *Model {
	m := &Model{Config: c}
	for _, n := range model.StageSizes(c) {
		m.Dense = append(m.Dense, make([]float32, n))
	}
	for range c.Experts {
		layers := make([][]float32, c.Layers)
		for i := range layers {
			layers[i] = make([]float32, c.ExpertSize())
		}
		m.Experts = append(m.Experts, layers)
	}
	return m
}

// parts are the weights in the order of the file.
func (m *Model) parts() [][]float32 {
	all := append([][]float32(nil), m.Dense...)
	for _, layers := range m.Experts {
		all = append(all, layers...)
	}
	return all
}

// Write makes the file, or replaces it as a whole: nobody finds a part of a model there.
func (m *Model) Write(path string) (err error) {
	var weights bytes.Buffer
	for _, p := range m.parts() {
		_ = binary.Write(&weights, binary.LittleEndian, p) // a buffer takes all
	}
	h, err := json.Marshal(header{format, m.Config, weights.Len() / 4, xxhash.Sum64(weights.Bytes())})
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("save the model: %w", err)
	}
	_, err = f.Write(append(h, '\n'))
	if err == nil {
		_, err = f.Write(weights.Bytes())
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("save the model: %w", errors.Join(err, os.Remove(f.Name())))
	}
	return nil
}

// Read reads a file that Write made.
func Read(path string) (*Model, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	line, weights, _ := bytes.Cut(b, []byte("\n"))
	var h header
	if err := json.Unmarshal(line, &h); err != nil || h.Format != format {
		return nil, fmt.Errorf("model %s: not a file that examples/moe -save wrote", path)
	}
	if err := h.Config.Validate(); err != nil {
		return nil, fmt.Errorf("model %s: %w", path, err)
	}
	m := New(h.Config)
	m.Digest = h.Digest
	floats := 0
	for _, p := range m.parts() {
		floats += len(p)
	}
	switch {
	case floats != h.Floats || len(weights) != 4*floats:
		return nil, fmt.Errorf("model %s: %d bytes of weights, want %d", path, len(weights), 4*floats)
	case xxhash.Sum64(weights) != h.Digest:
		return nil, fmt.Errorf("model %s: the weights are not those that were written", path)
	}
	r := bufio.NewReader(bytes.NewReader(weights))
	for _, p := range m.parts() {
		if err := binary.Read(r, binary.LittleEndian, p); err != nil {
			return nil, fmt.Errorf("model %s: %w", path, err)
		}
	}
	return m, nil
}

// Load gives a rank's part of a model its weights: the dense part, and the experts that the rank has, in the order of its slots.
func (m *Model) Load(into *model.Model, mine []int) {
	for i, w := range into.Weights() {
		copy(w, m.Dense[i])
	}
	for slot, e := range mine {
		for i, w := range into.ExpertWeights(slot) {
			copy(w, m.Experts[e][i])
		}
	}
}
