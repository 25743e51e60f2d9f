package text

import (
	"bytes"
	"strings"
	"unicode"
	"unicode/utf8"
)

const promptBytes = 160 // at most, of the held-out text

// Sample is a piece of held-out text and what models write after it.
type Sample struct {
	Prompt string `json:"prompt"`
	Model  string `json:"model"`
	Bigram string `json:"bigram"`
}

// Prompt is some lines from the middle of the held-out text, with as many bytes as the model wants to see.
func Prompt(text []byte, context int) []byte {
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

// Draw picks a byte by its probability. u is a random number of [0, 1).
func Draw(p []float32, u float32) byte {
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

// Readable is text that can be shown: what is not a character, or would move the cursor, becomes a dot.
func Readable(text []byte) string {
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
