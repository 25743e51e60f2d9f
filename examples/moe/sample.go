package main

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	promptBytes = 160 // at most, of the held-out text
	sampleBytes = 240
	sampleLeast = 16
	sampleTime  = 30  // seconds of steps; a byte takes a tenth of a step
	stoppedTime = 3   // the same where somebody waits for the end
	temperature = 0.6 // below 1 the likely bytes become likelier
)

// sampled is how many bytes a model writes of which a step takes so many seconds.
func sampled(pace float64, stopped bool) int {
	seconds := float64(sampleTime)
	if stopped {
		seconds = stoppedTime
	}
	if pace <= 0 {
		return sampleBytes
	}
	return int(min(max(seconds/pace, sampleLeast), sampleBytes))
}

// sample is a piece of held-out text and what models write after it.
type sample struct {
	Prompt string `json:"prompt"`
	Model  string `json:"model"`
	Bigram string `json:"bigram"`
}

// prompt is some lines from the middle of the held-out text, with as many bytes as the model wants to see.
func prompt(text []byte, context int) []byte {
	n := max(promptBytes, context)
	end := min(len(text), max(len(text)/2, n))
	p := text[max(0, end-n):end]
	// It begins with a line and ends with one, if that leaves enough.
	if i := bytes.LastIndexByte(p, '\n'); i+1 >= context {
		p = p[:i+1]
	}
	if i := bytes.IndexByte(p, '\n'); i >= 0 && len(p)-i-1 >= max(context, promptBytes/4) {
		p = p[i+1:]
	}
	return p
}

// sample has the models go on with a prompt. It is collective; the ranks make the same text, byte by byte.
func (w *worker) sample(stopped bool) (sample, error) {
	c := w.cfg
	begin := prompt(w.text.heldout, c.Context)
	text := append([]byte(nil), begin...)
	r := rand.New(rand.NewPCG(c.Seed, 1<<40))
	p := make([]float32, 256)
	for len(text) < len(begin)+sampled(w.Pace, stopped) {
		text = append(text, 0) // the byte to be found
		if err := w.model.forward(text, []int{len(text) - 1}); err != nil {
			return sample{}, fmt.Errorf("sample: %w", err)
		}
		w.model.release()
		for i, v := range w.model.logits[:256] {
			p[i] = v / temperature
		}
		softmax(p)
		text[len(text)-1] = draw(p, r)
	}
	w.model.clock.stop()

	b := w.text.bigram()
	plain := append([]byte(nil), begin[len(begin)-1])
	for range sampleBytes / 2 {
		var sum float64
		for i := range p {
			q := math.Pow(b.p(plain[len(plain)-1], byte(i)), 1/temperature)
			p[i] = float32(q)
			sum += q
		}
		for i := range p {
			p[i] /= float32(sum)
		}
		plain = append(plain, draw(p, r))
	}
	return sample{readable(begin), readable(text[len(begin):]), readable(plain[1:])}, nil
}

// draw picks a byte by its probability.
func draw(p []float32, r *rand.Rand) byte {
	u := r.Float32()
	for i, v := range p {
		if u -= v; u < 0 {
			return byte(i)
		}
	}
	best := 0 // rounding has left a little, or there are no numbers here
	for i, v := range p {
		if v > p[best] {
			best = i
		}
	}
	return byte(best)
}

// readable is text that can be shown: what is not a character, or would move the cursor, becomes a dot.
func readable(text []byte) string {
	var s strings.Builder
	for len(text) > 0 {
		c, n := utf8.DecodeRune(text)
		switch text = text[n:]; {
		case c == '\t':
			s.WriteString("    ")
		case c == '\n':
			s.WriteByte('\n')
		case c == utf8.RuneError || !unicode.IsPrint(c):
			s.WriteRune('·')
		default:
			s.WriteRune(c)
		}
	}
	return s.String()
}
