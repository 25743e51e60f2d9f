package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/examples/moe/config"
	"github.com/switchyard-moe/switchyard/examples/moe/report"
	"github.com/switchyard-moe/switchyard/examples/moe/text"
	"github.com/switchyard-moe/switchyard/examples/moe/train"
)

// tolerance is how far the losses of a step may be apart, as a part of the loss. Sums over one rank and over several round
// differently; a wrong gradient would be seen within a few steps.
const tolerance = 1e-4

var errCheck = errors.New("check failed")

// alone trains with the same flags on one rank. There is a report of its losses also when it was stopped.
func alone(ctx context.Context, c config.Config, from *text.Corpus, bar *report.Progress) (*report.Report, error) {
	c.Ranks = 1
	g, err := comm.Local(1)
	if err != nil {
		return nil, err
	}
	r, err := train.All(ctx, g, c, from, func(h *report.History) { bar.Step(c, h) })
	bar.Done(r)
	return r, err
}

// compare prints both losses of some steps and the verdict on all.
func compare(out io.Writer, one, many []float64, ranks int) error {
	fmt.Fprintf(out, "%6s  %12s  %12s  %10s\n", "step", "1 rank", fmt.Sprintf("%d ranks", ranks), "difference")
	worst, at := 0.0, 0
	for i := range one {
		d := math.Abs(one[i]-many[i]) / math.Abs(one[i])
		if !(d <= worst) { // NaN is worst
			worst, at = d, i+1
		}
		if i == 0 || (i+1)%5 == 0 || i == len(one)-1 || !(d <= tolerance) {
			fmt.Fprintf(out, "%6d  %12.8f  %12.8f  %10.1e\n", i+1, one[i], many[i], d)
		}
	}
	if !(worst <= tolerance) {
		fmt.Fprintf(out, "check: FAILED: the losses differ by %.1e in step %d, allowed is %.0e\n", worst, at, tolerance)
		return fmt.Errorf("%w: 1 and %d ranks differ by %.1e in step %d", errCheck, ranks, worst, at)
	}
	fmt.Fprintf(out, "check: ok: 1 and %d ranks agree in all %d steps, within %.1e of the loss (allowed is %.0e)\n", ranks, len(one), worst, tolerance)
	return nil
}
