package report

import (
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/examples/moe/config"
	"github.com/switchyard-moe/switchyard/examples/moe/words"
)

// Progress shows how training goes: a bar that is drawn anew on a terminal, a line now and then elsewhere.
type Progress struct {
	out      Sink
	terminal bool
	open     bool      // the bar is on the line where the cursor is
	next     time.Time // when to draw again
	loss     float64   // a running mean
	losses   int       // in loss so far
	events   int       // told so far
}

// Sink is where lines for people go.
type Sink interface {
	io.Writer
	Fd() uintptr
}

// Screen is a file that remembers the first error of writing to it.
type Screen struct {
	*os.File
	Err error
}

func (s *Screen) Write(b []byte) (int, error) {
	n, err := s.File.Write(b)
	if s.Err == nil {
		s.Err = err
	}
	return n, err
}

const (
	redraw   = 100 * time.Millisecond
	newLine  = 5 * time.Second
	maxWidth = 120
	leastBar = 10
	mostBar  = 24
	echo     = len("^C") // what a terminal writes for Ctrl-C
)

// NewProgress shows it on a terminal if out is one.
func NewProgress(out Sink) *Progress {
	_, err := unix.IoctlGetWinsize(int(out.Fd()), unix.TIOCGWINSZ)
	return &Progress{out: out, terminal: err == nil}
}

// Columns is the width of the terminal, and 80 for what is none.
func Columns(out Sink) int {
	size, err := unix.IoctlGetWinsize(int(out.Fd()), unix.TIOCGWINSZ)
	if err != nil || size.Col == 0 {
		return 80
	}
	return int(size.Col)
}

// Terminal reports whether out is a terminal.
func (p *Progress) Terminal() bool { return p.terminal }

// Step is called after each step of training.
func (p *Progress) Step(c config.Config, h *History) {
	n := h.Done()
	// The process that becomes rank 0 begins with the losses of the steps before.
	for ; p.losses < n; p.losses++ {
		p.loss += max(0.05, 2/float64(p.losses+2)) * (h.Losses[p.losses] - p.loss)
	}
	for ; p.events < len(h.Events); p.events++ {
		if p.terminal { // a bar may be there, of this process or of the one that was rank 0
			fmt.Fprint(p.out, "\r\x1b[K")
			p.open = false
		}
		for _, line := range words.Fold(h.Events[p.events], Columns(p.out)) {
			fmt.Fprintln(p.out, line)
		}
	}
	if now := time.Now(); now.After(p.next) {
		p.next = now.Add(newLine)
		if p.terminal {
			p.next = now.Add(redraw)
		}
		rest := h.Elapsed.Seconds() / float64(n) * float64(c.Steps-n)
		p.draw(n, c.Steps, p.loss, float64(n*c.Batch)/h.Elapsed.Seconds(), h.Share, (time.Duration(rest)*time.Second).String()+" left")
	}
}

// Done shows the last step as the report has it. A loss that is no number any more is shown as it is.
func (p *Progress) Done(r *Report) {
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

func (p *Progress) draw(n, all int, loss, speed, share float64, end string) {
	// The parts in the order in which they are left out where they do not fit.
	step := fmt.Sprintf("step %d/%d", n, all)
	parts := []string{step, fmt.Sprintf("loss %.3f", loss), fmt.Sprintf("%.0f tokens/s", speed), fmt.Sprintf("%.0f%% communication", 100*share), end}
	if !p.terminal {
		fmt.Fprintln(p.out, strings.Join(parts, "  "))
		return
	}
	// The last column stays free, also after Ctrl-C: writing there may move the cursor to the next line.
	width := min(Columns(p.out)-1-echo, maxWidth)
	fmt.Fprintf(p.out, "\r%s\x1b[K", oneLine(parts, float64(n)/float64(all), width))
	p.open = true
}

// oneLine is a bar and what fits behind it: the speed and the share of communication make room for the bar, which makes room for the rest.
func oneLine(parts []string, done float64, width int) string {
	choices := [][]int{{0, 1, 2, 3, 4}, {0, 1, 3, 4}, {0, 1, 4}, {0, 1}, {0}}
	text := func(choice []int) string {
		var some []string
		for _, i := range choice {
			some = append(some, parts[i])
		}
		return strings.Join(some, "  ")
	}
	for _, choice := range choices[:3] {
		line := text(choice)
		if room := min(width-len(line)-len("[] "), mostBar); room >= leastBar {
			return fmt.Sprintf("[%-*s] %s", room, bar(done, room), line)
		}
	}
	for _, choice := range choices {
		if line := text(choice); len(line) <= width {
			return line
		}
	}
	return parts[0][:max(min(width, len(parts[0])), 0)]
}

// end leaves the line of the bar.
func (p *Progress) end() {
	if p.open {
		fmt.Fprintln(p.out)
		p.open = false
	}
}
