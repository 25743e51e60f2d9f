package main

import (
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// progress shows how training goes: a bar that is drawn anew on a terminal, a line now and then elsewhere.
type progress struct {
	out      sink
	terminal bool
	open     bool      // the bar is on the line where the cursor is
	next     time.Time // when to draw again
	loss     float64   // of late
	losses   int       // in loss so far
	events   int       // told so far
}

// sink is where lines for people go.
type sink interface {
	io.Writer
	Fd() uintptr
}

// screen is a file that remembers the first error of writing to it.
type screen struct {
	*os.File
	err error
}

func (s *screen) Write(b []byte) (int, error) {
	n, err := s.File.Write(b)
	if s.err == nil {
		s.err = err
	}
	return n, err
}

const (
	redraw   = 100 * time.Millisecond
	newLine  = 5 * time.Second
	maxWidth = 120
	echo     = len("^C") // what a terminal writes for Ctrl-C
)

func newProgress(out sink) *progress {
	_, err := unix.IoctlGetWinsize(int(out.Fd()), unix.TIOCGWINSZ)
	return &progress{out: out, terminal: err == nil}
}

// columns is the width of the terminal, and 80 for what is none.
func columns(out sink) int {
	size, err := unix.IoctlGetWinsize(int(out.Fd()), unix.TIOCGWINSZ)
	if err != nil || size.Col == 0 {
		return 80
	}
	return int(size.Col)
}

// step is called after each step of training.
func (p *progress) step(w *worker) {
	n := w.done()
	// The process that becomes rank 0 begins with the losses of the steps before.
	for ; p.losses < n; p.losses++ {
		p.loss += max(0.05, 2/float64(p.losses+2)) * (w.Losses[p.losses] - p.loss)
	}
	for ; p.events < len(w.Events); p.events++ {
		if p.terminal { // a bar may be there, of this process or of the one that was rank 0
			fmt.Fprint(p.out, "\r\x1b[K")
			p.open = false
		}
		for _, line := range fold(w.Events[p.events], columns(p.out)) {
			fmt.Fprintln(p.out, line)
		}
	}
	if now := time.Now(); now.After(p.next) {
		p.next = now.Add(newLine)
		if p.terminal {
			p.next = now.Add(redraw)
		}
		rest := w.Elapsed.Seconds() / float64(n) * float64(w.cfg.Steps-n)
		p.draw(n, w.cfg.Steps, p.loss, float64(n*w.cfg.Batch)/w.Elapsed.Seconds(), w.Share, (time.Duration(rest)*time.Second).String()+" left")
	}
}

// done shows the last step as the report has it. A loss that is no number any more is shown as it is.
func (p *progress) done(r *report) {
	if r != nil && len(r.Losses) > 0 {
		n, loss, end := len(r.Losses), p.loss, "done"
		last := r.Losses[n-1]
		diverged := math.IsNaN(last) || math.IsInf(last, 0)
		if diverged {
			loss = last
		}
		if diverged || n < r.Config.Steps {
			end = "stopped"
		}
		p.draw(n, r.Config.Steps, loss, r.TokensPerSecond, r.CommFraction, end)
	}
	p.end()
}

func (p *progress) draw(n, all int, loss, speed, share float64, end string) {
	// The parts in the order in which they are left out where they do not fit.
	step := fmt.Sprintf("step %d/%d", n, all)
	parts := []string{step, fmt.Sprintf("loss %.3f", loss), fmt.Sprintf("%.0f tokens/s", speed), fmt.Sprintf("%.0f%% communication", 100*share), end}
	if !p.terminal {
		fmt.Fprintln(p.out, strings.Join(parts, "  "))
		return
	}
	// The last column stays free, also after Ctrl-C: writing there may move the cursor to the next line.
	line, width := "", min(columns(p.out)-1-echo, maxWidth)
	for _, order := range [][]int{{0, 1, 2, 3, 4}, {0, 1, 3, 4}, {0, 1, 4}, {0, 1}, {0}} {
		var some []string
		for _, i := range order {
			some = append(some, parts[i])
		}
		if line = strings.Join(some, "  "); len(line) <= width {
			break
		}
	}
	if len(line) > width {
		line = line[:max(width, 0)]
	}
	if room := min(width-len(line)-3, 24); room >= 6 {
		line = fmt.Sprintf("[%-*s] %s", room, bar(float64(n)/float64(all), room), line)
	}
	fmt.Fprintf(p.out, "\r%s\x1b[K", line)
	p.open = true
}

// end leaves the line of the bar.
func (p *progress) end() {
	if p.open {
		fmt.Fprintln(p.out)
		p.open = false
	}
}

// fold breaks a text into lines of so many columns, at spaces if it can.
func fold(text string, width int) (lines []string) {
	width = max(width, 1)
	for _, line := range strings.Split(text, "\n") {
		rest := []rune(line)
		for len(rest) > width {
			at := width
			for i := width; i > width/2; i-- {
				if rest[i] == ' ' {
					at = i
					break
				}
			}
			lines = append(lines, string(rest[:at]))
			if rest = rest[at:]; rest[0] == ' ' {
				rest = rest[1:]
			}
		}
		lines = append(lines, string(rest))
	}
	return lines
}
