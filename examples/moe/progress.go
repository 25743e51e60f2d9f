package main

import (
	"fmt"
	"os"
	"time"
)

// progress shows how training goes: a bar that is drawn anew on a terminal, a line now and then elsewhere.
type progress struct {
	out      *os.File
	terminal bool
	open     bool      // the bar is on the line where the cursor is
	next     time.Time // when to draw again
	loss     float64   // of late
}

const (
	redraw   = 100 * time.Millisecond
	newLine  = 5 * time.Second
	barWidth = 24
)

func newProgress(out *os.File) *progress {
	info, err := out.Stat()
	return &progress{out: out, terminal: err == nil && info.Mode()&os.ModeCharDevice != 0}
}

// step is called after each step of training.
func (p *progress) step(w *worker) {
	n, all := len(w.losses), w.cfg.Steps
	if n == 1 {
		p.loss = w.losses[0]
	}
	p.loss += 0.05 * (w.losses[n-1] - p.loss)
	now := time.Now()
	if now.Before(p.next) && n < all {
		return
	}
	rest := time.Duration(float64(w.elapsed) / float64(n) * float64(all-n))
	line := fmt.Sprintf("step %d/%d  loss %.3f  %.0f tokens/s  %.0f%% communication  %s left",
		n, all, p.loss, float64(n*w.cfg.Batch)/w.elapsed.Seconds(), 100*w.model.clock.commFraction(), rest.Round(time.Second))
	if !p.terminal {
		p.next = now.Add(newLine)
		fmt.Fprintln(p.out, line)
		return
	}
	p.next = now.Add(redraw)
	fmt.Fprintf(p.out, "\r[%-*s] %s\x1b[K", barWidth, bar(float64(n)/float64(all), barWidth), line)
	p.open = true
}

// close ends the line of the bar.
func (p *progress) close() {
	if p.open {
		fmt.Fprintln(p.out)
	}
}
