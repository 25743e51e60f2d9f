package text

import (
	"math"
	"math/rand/v2"
)

// Bigram is the model to beat: the probability of a byte given the one before it, counted in the training text with
// a little added to every count.
type Bigram struct {
	count [256][256]float64
	total [256]float64
}

const addK = 0.1

// NewBigram counts.
func NewBigram(text []byte) *Bigram {
	b := new(Bigram)
	for i := 1; i < len(text); i++ {
		b.count[text[i-1]][text[i]]++
		b.total[text[i-1]]++
	}
	return b
}

// P is the probability that next follows prev.
func (b *Bigram) P(prev, next byte) float64 {
	return (b.count[prev][next] + addK) / (b.total[prev] + 256*addK)
}

// Loss is the mean cross-entropy at the given places of the text, in nats per byte.
func (b *Bigram) Loss(text []byte, at []int) float64 {
	var sum float64
	for _, i := range at {
		sum -= math.Log(b.P(text[i-1], text[i]))
	}
	return sum / float64(len(at))
}

// Continue is what the model writes after a byte. A temperature below 1 makes the likely bytes likelier.
func (b *Bigram) Continue(prev byte, bytes int, temperature float64, r *rand.Rand) []byte {
	text := []byte{prev}
	p := make([]float32, 256)
	for range bytes {
		var sum float64
		for i := range p {
			q := math.Pow(b.P(text[len(text)-1], byte(i)), 1/temperature)
			p[i] = float32(q)
			sum += q
		}
		for i := range p {
			p[i] /= float32(sum)
		}
		text = append(text, Draw(p, r.Float32()))
	}
	return text[1:]
}
