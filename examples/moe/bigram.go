package main

import "math"

// bigram is the model to beat: the probability of a byte given the one before it, counted in the training text with
// a little added to every count.
type bigram struct {
	count [256][256]float64
	total [256]float64
}

const addK = 0.1

func newBigram(text []byte) *bigram {
	b := new(bigram)
	for i := 1; i < len(text); i++ {
		b.count[text[i-1]][text[i]]++
		b.total[text[i-1]]++
	}
	return b
}

// p is the probability that next follows prev.
func (b *bigram) p(prev, next byte) float64 {
	return (b.count[prev][next] + addK) / (b.total[prev] + 256*addK)
}

// loss is the mean cross-entropy at the given places of the text, in nats per byte.
func (b *bigram) loss(text []byte, at []int) float64 {
	var sum float64
	for _, i := range at {
		sum -= math.Log(b.p(text[i-1], text[i]))
	}
	return sum / float64(len(at))
}
