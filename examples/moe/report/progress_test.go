package report

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/examples/moe/config"
)

func TestProgressOfAPipeIsLines(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	require.NoError(t, err)
	p := NewProgress(f)
	require.False(t, p.terminal, "a file is no terminal")
	c, h := config.Config{Steps: 4, Batch: 10}, new(History)
	for range 3 {
		h.Losses, h.Elapsed, h.Share = append(h.Losses, 2), h.Elapsed+time.Second, 0.25
		p.Step(c, h)
		p.next = time.Time{}
	}
	p.Done(&Report{Config: c, Losses: h.Losses, TokensPerSecond: 12, CommFraction: 0.26})
	require.NoError(t, f.Close())
	b, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.Contains(t, string(b), "\nstep 2/4  loss 2.000  10 tokens/s  25% communication  2s left\nstep 3/4")
	require.Contains(t, string(b), "\nstep 3/4  loss 2.000  12 tokens/s  26% communication  stopped\n")
}

// The process that becomes rank 0 shows the loss that the one before it would show.
func TestProgressThatBeginsLateShowsTheLoss(t *testing.T) {
	c, h := config.Config{Steps: 90, Batch: 10}, new(History)
	shown := func(p *Progress) string { return fmt.Sprintf("%.3f", p.loss) }
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	require.NoError(t, err)
	defer null.Close()
	early := NewProgress(null)
	for i := range 60 {
		h.Losses, h.Elapsed = append(h.Losses, 3-float64(i)/60), h.Elapsed+time.Second
		early.Step(c, h)
	}
	late := NewProgress(null)
	late.Step(c, h)
	require.Equal(t, shown(early), shown(late))
	require.InDelta(t, 2.3, late.loss, 0.1)
}

// The last line says whether all steps were done, and what the loss came to.
func TestTheLastLineSaysHowItEnded(t *testing.T) {
	for end, losses := range map[string]Numbers{
		"step 3/3  loss 2.000  12 tokens/s  26% communication  done\n":    {2, 2, 2},
		"step 2/3  loss 2.000  12 tokens/s  26% communication  stopped\n": {2, 2},
		"step 2/3  loss NaN  12 tokens/s  26% communication  stopped\n":   {2, math.NaN()},
		"step 3/3  loss +Inf  12 tokens/s  26% communication  stopped\n":  {2, 2, math.Inf(1)},
	} {
		f, err := os.Create(filepath.Join(t.TempDir(), "out"))
		require.NoError(t, err)
		p := NewProgress(f)
		c, h := config.Config{Steps: 3, Batch: 10}, new(History)
		for _, l := range losses {
			if h.Losses = append(h.Losses, l); l == 2 { // a step whose loss is no number is an error, and not told
				p.Step(c, h)
			}
		}
		p.Done(&Report{Config: c, Losses: losses, TokensPerSecond: 12, CommFraction: 0.26})
		require.NoError(t, f.Close())
		b, err := os.ReadFile(f.Name())
		require.NoError(t, err)
		require.True(t, strings.HasSuffix(string(b), "\n"+end), "%q", b)
	}
}

// On a terminal of any width the progress stays on one line.
func TestProgressFitsAnyTerminal(t *testing.T) {
	main, side := terminal(t)
	for cols := 1; cols <= 200; cols++ {
		require.NoError(t, unix.IoctlSetWinsize(int(side.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: uint16(cols)}))
		p := NewProgress(side)
		require.True(t, p.terminal)
		p.draw(1234567, 100000000, 12.345, 123456, 0.99, "123h45m6s left")
		p.next = time.Time{}
		shown := make([]byte, 4096)
		n, err := main.Read(shown)
		require.NoError(t, err)
		line := strings.TrimSuffix(strings.TrimPrefix(string(shown[:n]), "\r"), "\x1b[K")
		require.NotContains(t, line, "\n")
		if cols > echo {
			require.Less(t, len(line)+echo, cols, "%d columns: %q", cols, line)
		}
		if cols >= 24+echo {
			require.Contains(t, line, "step 1234567/100000000")
		}
		if cols == 80 {
			require.Contains(t, line, "loss 12.345")
			require.Contains(t, line, "123h45m6s left")
		}
		if cols >= 70 {
			require.Regexp(t, `^\[#? {9,}\] `, line)
		}
		if cols >= 120 {
			require.Contains(t, line, "99% communication")
		}
	}
}

// A terminal of 80 columns has room for a bar, whatever a usual run has to say.
func TestProgressHasABarAt80Columns(t *testing.T) {
	parts := []string{"step 1250/2500", "loss 1.234", "50000 tokens/s", "24% communication", "1m20s left"}
	width := 80 - 1 - echo
	line := oneLine(parts, 0.5, width)
	require.Regexp(t, `^\[#{5,} {5,}\] step 1250/2500  loss 1.234  24% communication  1m20s left$`, line)
	require.Contains(t, oneLine(parts, 0.5, 120-1-echo), "50000 tokens/s")
	require.NotContains(t, oneLine(parts, 0.5, 45), "[", "what is left is worth more than a bar")
	require.Contains(t, oneLine(parts, 0.5, 45), "1m20s left")
}

// terminal opens a pseudo terminal.
func terminal(t *testing.T) (main, side *os.File) {
	main, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip("no pseudo terminals: ", err)
	}
	t.Cleanup(func() { main.Close() })
	n, err := unix.IoctlGetInt(int(main.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetPointerInt(int(main.Fd()), unix.TIOCSPTLCK, 0))
	side, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { side.Close() })
	return main, side
}
