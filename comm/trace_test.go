package comm

import (
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/observe"
)

// Traces are the protocols of this package as text, under testdata. A trace is
// commands, each with what it led to behind "----": what ranks said, to whom and
// when, and how their calls ended. Lines that begin with # are comments. The ranks
// are real; what is between them is not: a word takes 1 ms, and clocks are those of
// testing/synctest, so a trace is the same every time and takes no time.
//
//	go test ./comm -run Traces -comm.update
//
// writes what happens into the files.

var update = flag.Bool("comm.update", false, "write the traces under testdata anew")

// odd is added to the times of the script, so that it never acts at the very moment
// at which a rank's timer ends.
const odd = 3 * time.Microsecond

// tracer collects the lines of a trace.
type tracer struct {
	began         time.Time
	failuresFirst bool // at one instant, among what a rank says to another

	mu    sync.Mutex
	lines []traceLine
}

type traceLine struct {
	at   time.Duration
	who  string // "0", or "0 > 1"
	text string
}

func (tr *tracer) add(who, format string, args ...any) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.lines = append(tr.lines, traceLine{time.Since(tr.began), who, fmt.Sprintf(format, args...)})
}

// settle waits until nobody has said anything for a while, and returns what was
// said. At one instant ranks speak in no order, so such lines are sorted by who
// speaks to whom.
func (tr *tracer) settle() string {
	for before := -1; ; {
		synctest.Wait()
		tr.mu.Lock()
		n := len(tr.lines)
		tr.mu.Unlock()
		if n == before {
			break
		}
		before = n
		time.Sleep(15*time.Millisecond + odd)
	}
	tr.mu.Lock()
	lines := tr.lines
	tr.lines = nil
	tr.mu.Unlock()
	slices.SortStableFunc(lines, func(a, b traceLine) int {
		if a.at != b.at {
			return int(a.at - b.at)
		}
		if c := strings.Compare(a.who, b.who); c != 0 || !tr.failuresFirst {
			return c
		}
		return first(b.text) - first(a.text)
	})
	var out strings.Builder
	for _, l := range lines {
		fmt.Fprintf(&out, "%6v  %-7s %s\n", l.at.Round(time.Millisecond), l.who, l.text)
	}
	return out.String()
}

// first is 1 for the news of a failure, which a rank of a group may send while one
// of its calls sends something else, and 0 for all else.
func first(text string) int {
	if strings.HasPrefix(text, "failed: ") {
		return 1
	}
	return 0
}

// command is a line such as "join 1 2 timeout=1s".
type command struct {
	name    string
	args    []string
	options map[string]string
}

func parseCommand(line string) command {
	words := strings.Fields(line)
	c := command{name: words[0], options: map[string]string{}}
	for _, w := range words[1:] {
		if k, v, ok := strings.Cut(w, "="); ok {
			c.options[k] = v
		} else {
			c.args = append(c.args, w)
		}
	}
	return c
}

func (c *command) duration(t *testing.T, name string, missing time.Duration) time.Duration {
	text, ok := c.options[name]
	if !ok {
		return missing
	}
	d, err := time.ParseDuration(text)
	require.NoError(t, err)
	return d
}

// tracedWorld is what the commands of a trace act on.
type tracedWorld interface {
	do(command)
	status() string // the last line of an output
	end()
}

// runTraces runs the files under testdata/dir, each in a bubble of its own.
func runTraces(t *testing.T, dir string, world func(t *testing.T, tr *tracer) tracedWorld) {
	paths, err := filepath.Glob(filepath.Join("testdata", dir, "*.txt"))
	require.NoError(t, err)
	require.NotEmpty(t, paths)
	observe.Listen(slog.New(slog.DiscardHandler)) // opened in a bubble, the socket's goroutine would never let it rest
	for _, path := range paths {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			synctest.Test(t, func(t *testing.T) {
				tr := &tracer{began: time.Now()}
				w := world(t, tr)
				got := replay(tr, string(text), w)
				w.end()
				if *update {
					require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
					return
				}
				require.Equal(t, string(text), got)
			})
		})
	}
}

// replay returns the trace with what its commands lead to now.
func replay(tr *tracer, text string, w tracedWorld) string {
	var out strings.Builder
	for _, part := range strings.Split(strings.TrimRight(text, "\n"), "\n\n") {
		if out.Len() > 0 {
			out.WriteString("\n")
		}
		said, _, _ := strings.Cut(part, "\n----")
		acted := false
		for _, line := range strings.Split(said, "\n") {
			out.WriteString(line + "\n")
			if line == "" || strings.HasPrefix(line, "#") {
				continue
			}
			w.do(parseCommand(line))
			acted = true
		}
		if acted {
			out.WriteString("----\n" + tr.settle() + w.status())
		}
	}
	return out.String()
}
