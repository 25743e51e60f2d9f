// Command sim says how long dispatch and combine may take on hosts that nobody has tried.
//
//	go run ./test/sim
//
// It draws routings, has the code of the plan say who sends what (kernels/host.SendsOf), and gets times by a model: a constant and the
// longest of the bytes at each kind of port over its rate. The first table sets the model next to published times of other systems: two of its
// numbers are fitted for each system, on the figures marked "fit". The second is the model for Switchyard.
package main

import (
	"fmt"
	"io"
	"math"
	"os"
)

func main() {
	counted := map[shape]counts{}
	tell(os.Stdout, errorsOf(os.Stdout, counted))
	predict(os.Stdout, counted)
}

// errorsOf prints the figures of all systems next to the model's, and returns the relative errors of those that nothing was fitted on.
func errorsOf(w io.Writer, counted map[shape]counts) (errs []float64) {
	for _, s := range systems() {
		for _, p := range s.rows {
			if _, ok := counted[p.shape]; !ok {
				counted[p.shape] = count(p.shape)
			}
		}
		m := s.fitted(counted)
		fmt.Fprintf(w, "%s: %.0f us, GB/s: port %.1f, inside %.1f, forwarding %.1f, choices %.1f\n", s.name, m.constant, m.port, m.inside, m.forward, m.choices)
		for _, p := range s.rows {
			c := counted[p.shape]
			is, want := m.us(c, p.rowBytes, 0), p.us(c)
			mark := "fit"
			if !p.fit {
				mark = ""
				errs = append(errs, math.Abs(is/want-1))
			}
			fmt.Fprintf(w, "  %-14s EP %-4d %5d tokens  published %6.0f us  model %6.0f us  %+6.1f%%  %s\n", p.what, p.shape.ep, p.shape.tokens, want, is, 100*(is/want-1), mark)
		}
	}
	return errs
}

// meanAndWorst are those of errors.
func meanAndWorst(errs []float64) (mean, worst float64) {
	for _, e := range errs {
		mean += e / float64(len(errs))
		worst = max(worst, e)
	}
	return mean, worst
}

func tell(w io.Writer, errs []float64) {
	mean, worst := meanAndWorst(errs)
	fmt.Fprintf(w, "%d figures not used for a fit: mean error %.1f%%, worst %.1f%%\n\n", len(errs), 100*mean, 100*worst)
}

// The calls of Switchyard that are predicted.
const (
	manyTokens = 4096
	fewTokens  = 128
)

// predict prints the model's times for Switchyard.
func predict(w io.Writer, counted map[shape]counts) {
	fmt.Fprintf(w, "Switchyard, hosts of %d H200, us; hosts: to how many others a token crosses; bytes: in front of a row that crosses\n", perHost)
	fmt.Fprintf(w, "  EP    hosts  bytes  %d: dispatch float8  combine bf16  %d: dispatch float8  a row a choice\n", manyTokens, fewTokens)
	for ep := 16; ep <= 2048; ep *= 2 {
		many, few := shape{ep, manyTokens, 0}, shape{ep, fewTokens, 0}
		for _, s := range [...]shape{many, few} {
			if _, ok := counted[s]; !ok {
				counted[s] = count(s)
			}
		}
		m, f := counted[many], counted[few]
		note := ""
		if ep > 256 {
			note = "prediction: nothing of this size is published"
		}
		choices := ours.few
		choices.choices = choices.port
		choices.port, choices.inside = 0, 0
		fmt.Fprintf(w, "  %-5d %5.2f  %5.1f  %22.0f  %12.0f  %21.0f  %14.0f  %s\n", ep, m.remote/manyTokens, m.head/m.remote,
			ours.many.us(m, float8, m.head), ours.many.us(m, bf16, 0), ours.few.us(f, float8, f.head), choices.us(f, float8, 0), note)
	}
}
