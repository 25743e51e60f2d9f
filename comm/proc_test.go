package comm

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/internal/flight"
	"github.com/switchyard-moe/switchyard/internal/proctest"
)

// Tests of this file run ranks as processes, each of which plays a part.
func TestMain(m *testing.M) {
	proctest.Play(proctest.Parts{"rank": playRank, "flood": playFlood, "stranger": playStranger, "squatter": playSquatter})
	flag.Parse()
	if err := flag.Set("test.parallel", "8"); err != nil { // such tests mostly wait, so there may be more of them than cores
		panic(err)
	}
	os.Exit(m.Run())
}

// sayWhoLacks says which rank is missing, once that is one alone.
func sayWhoLacks() {
	for {
		for _, j := range flight.Joins() {
			if len(j.Missing) == 1 {
				say("lacks %v", j.Missing)
				return
			}
		}
		time.Sleep(time.Millisecond)
	}
}

// say reports to the parent, a line at a time.
func say(format string, args ...any) {
	fmt.Println(strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", " "))
}

func playRank(args []string) int {
	part := args[0]
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	cfg, err := FromEnv()
	if err != nil {
		say("error %v", err)
		return 1
	}
	if part == "few files" {
		if err := haveFiles(args[1]); err != nil {
			say("error %v", err)
			return 1
		}
	}
	if part == "lack one" && cfg.Rank == 0 {
		go sayWhoLacks()
	}
	start := time.Now()
	g, err := Join(ctx, cfg)
	if part == "join again" {
		return joinAgain(ctx, cfg, g, err)
	}
	if err != nil {
		say("error %v", err)
		return 1
	}
	say("joined %d", time.Since(start).Microseconds())
	defer g.Close()
	in := bufio.NewReader(os.Stdin)
	switch part {
	case "survive", "lack one":
		if err := barriers(ctx, g); err != nil {
			return report(ctx, g, err)
		}
	case "shrink when told":
		err := barriers(ctx, g)
		var pe *PeerError
		if !errors.As(err, &pe) {
			say("error %v", err)
			return 1
		}
		say("lost %d", pe.Rank)
		told, _ := in.ReadString('\n')
		say("shrinks now")
		return goOn(ctx, g, strings.TrimSpace(told) == "again")
	case "leave out":
		for {
			short, stop := context.WithTimeout(ctx, proctest.Scaled(1500*time.Millisecond))
			err := g.Barrier(short)
			stop()
			if err == nil {
				time.Sleep(time.Millisecond)
				continue
			}
			var pe *PeerError
			if !errors.As(err, &pe) {
				say("error %v", err)
				return 1
			}
			say("late %d %v %v", pe.Rank, errors.Is(err, ErrTimeout), err)
			start := time.Now()
			short, stop = context.WithTimeout(ctx, proctest.Scaled(1500*time.Millisecond))
			s, err := g.Shrink(short) // waits for one that lives, and no longer than its context
			stop()
			say("waited %v %v %v", errors.Is(err, ErrTimeout), time.Since(start) < soon, err)
			var leaveOut []int
			if pe.Rank != g.Rank() {
				leaveOut = []int{pe.Rank}
			}
			if err != nil { // nobody has said so before
				s, err = g.Shrink(ctx, leaveOut...)
			}
			if err != nil {
				say("outcast %v %v", errors.Is(err, ErrPeerLost), err)
				return 1
			}
			say("survivors %d %v", s.Size(), s.Barrier(ctx))
			start = time.Now()
			g.Close()
			s.Close()
			say("closed %v", time.Since(start) < soon)
			return 0
		}
	case "crash":
		if g.Rank() == 1 {
			in.ReadString('\n') // the others may still be joining
			os.Exit(0)          // without Close, so a crash to the others
		}
		return report(ctx, g, barriers(ctx, g))
	case "abort":
		if g.Rank() == 2 {
			in.ReadString('\n')
			g.Abort(fmt.Errorf("no room for expert 7: %w", ErrTimeout))
			os.Exit(3)
		}
		<-g.Done()
		var pe *PeerError
		errors.As(g.Err(), &pe)
		say("aborted %d %v %v %v", pe.Rank, errors.Is(g.Err(), ErrAborted), errors.Is(g.Err(), ErrTimeout), g.Err())
	case "sequence":
		for range 20 {
			if err := g.Barrier(ctx); err != nil {
				say("error %v", err)
				return 1
			}
		}
		time.Sleep(time.Duration(g.Rank()) * 30 * time.Millisecond)
		if err := g.Err(); err != nil {
			say("error %v", err)
			return 1
		}
	case "fds":
		r, w, err := os.Pipe()
		if err != nil {
			say("error %v", err)
			return 1
		}
		// Everybody writes to everybody's pipe.
		all, err := g.ExchangeFDs(ctx, []int{int(w.Fd())})
		w.Close()
		if err != nil {
			say("error %v", err)
			return 1
		}
		for _, fds := range all {
			f := os.NewFile(uintptr(fds[0]), "pipe")
			fmt.Fprintf(f, "%d", g.Rank())
			f.Close()
		}
		got, err := io.ReadAll(r) // ends when the last rank has closed its end
		if err != nil || len(got) != g.Size() {
			say("error %q %v", got, err)
			return 1
		}
		if _, err := g.Share(ctx, nil); !errors.Is(err, errors.ErrUnsupported) {
			say("error %v", err)
			return 1
		}
		say("fds %d", len(got))
	case "wait":
		in.ReadString('\n')
	}
	return 0
}

// joinAgain joins until it is told to end, again whenever a join or a group fails.
func joinAgain(ctx context.Context, cfg Config, g *Group, err error) int {
	end := make(chan struct{})
	go func() {
		bufio.NewReader(os.Stdin).ReadString('\n')
		close(end)
	}()
	for ; ctx.Err() == nil; g, err = Join(ctx, cfg) {
		if err == nil {
			if err = g.Barrier(ctx); err == nil {
				say("joined %x", g.id)
				select {
				case <-end:
					g.Close()
					return 0
				case <-g.Done():
					err = g.Err()
				}
			}
			g.Close()
		}
		var pe *PeerError
		if !errors.As(err, &pe) {
			break
		}
		say("failed %d %v %v", pe.Rank, errors.Is(err, ErrPeerLost), err)
	}
	say("error %v", err)
	return 1
}

func barriers(ctx context.Context, g *Group) error {
	for {
		if err := g.Barrier(ctx); err != nil {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

// report says what a survivor sees, and goes on with the others.
func report(ctx context.Context, g *Group, err error) int {
	var pe *PeerError
	if !errors.As(err, &pe) {
		say("error %v", err)
		return 1
	}
	say("lost %d %v %v", pe.Rank, errors.Is(err, ErrPeerLost), err)
	return goOn(ctx, g, false)
}

// goOn shrinks a group, once more with again where a rank of the smaller one is lost, too, and says who is left.
func goOn(ctx context.Context, g *Group, again bool) int {
	s, err := g.Shrink(ctx)
	if err != nil {
		say("outcast %v %v", errors.Is(err, ErrPeerLost), err)
		return 1
	}
	defer s.Close()
	all, err := s.AllGather(ctx, []byte(strconv.Itoa(g.Rank())))
	if again && errors.Is(err, ErrPeerLost) {
		return goOn(ctx, s, false)
	}
	if err != nil {
		say("error %v", err)
		return 1
	}
	var names []string
	for _, b := range all {
		names = append(names, string(b))
	}
	say("survivors %s", strings.Join(names, ","))
	if err := s.Barrier(ctx); err != nil {
		say("error %v", err)
		return 1
	}
	return 0
}

// haveFiles leaves a process room for this many more descriptors.
func haveFiles(more string) error {
	room, err := strconv.Atoi(more)
	if err != nil {
		return err
	}
	c, err := net.Listen("unix", fmt.Sprint("@", rand.Uint64())) // which opens what the runtime needs for sockets
	if err != nil {
		return err
	}
	defer c.Close()
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	files := uint64(len(open) - 2 + room) // without the folder's own, and the socket's
	return unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: files})
}

// A rank that gets no descriptor for what a join needs says so, with its limit, and the others hear of it where it has met them. Nobody waits for
// the end of the join.
func TestARankWithoutDescriptorsSaysSo(t *testing.T) {
	for _, poor := range []int{0, 3} {
		for room := range 4 {
			t.Run(fmt.Sprintf("rank %d has %d", poor, room), func(t *testing.T) {
				addr := freeAddr(t)
				ps := make([]*proc, 4)
				for r := range ps {
					args := []string{"crash"}
					if r == poor {
						args = []string{"few files", strconv.Itoa(room)}
					}
					ps[r] = &proc{proctest.Rank(t, r, len(ps), addr, proctest.Spec{Part: "rank", Args: args}), t, nil}
				}
				const want = `rank %d may have \d+ files open and no more \(ulimit -n\): .*too many open files`
				require.Regexp(t, fmt.Sprintf("^comm: .*"+want, poor), strings.Join(ps[poor].expect("error"), " "))
				ps[poor].exit(1)
				if poor == 3 && room == 3 { // it has met rank 0
					for r, p := range ps {
						if r != poor {
							require.Regexp(t, fmt.Sprintf(want, poor), strings.Join(p.expect("error"), " "), "rank %d", r)
							p.exit(1)
						}
					}
				}
			})
		}
	}
}

// proc is a rank in a process of its own.
type proc struct {
	*proctest.Process
	t      *testing.T
	delays *proctest.Delays // of this process and of all ranks of the group, where these are started at once
}

func startProcs(t *testing.T, n int, part string, env ...string) []*proc {
	addr, delays := freeAddr(t), proctest.NoteDelays(t)
	ps := make([]*proc, n)
	for r := range ps {
		ps[r] = startProc(t, r, n, addr, part, delays, env...)
	}
	return ps
}

func startProc(t *testing.T, r, n int, addr, part string, delays *proctest.Delays, env ...string) *proc {
	return &proc{proctest.Rank(t, r, n, addr, proctest.Spec{Part: "rank", Args: []string{part}, Env: env, Delays: delays}), t, delays}
}

// expect returns the fields of the next line, whose first must be word.
func (p *proc) expect(word string) []string {
	p.t.Helper()
	line, ok := p.Line()
	if !ok || !strings.HasPrefix(line, word+" ") {
		p.t.Fatalf("rank %d said %q, want %q", p.Rank, line, word)
	}
	return strings.Fields(line)[1:]
}

// exit waits for the end, before which nothing more is said.
func (p *proc) exit(code int) {
	p.t.Helper()
	for line, ok := p.Line(); ok; line, ok = p.Line() {
		p.t.Errorf("rank %d said %q", p.Rank, line)
	}
	require.Equal(p.t, code, p.Wait(), "rank %d", p.Rank)
}

func TestJoinProcesses(t *testing.T) {
	start := time.Now()
	ps := startProcs(t, 8, "fds", "SWITCHYARD_SECRET=a secret of the test")
	var slowest int
	for _, p := range ps {
		us, err := strconv.Atoi(p.expect("joined")[0])
		require.NoError(t, err)
		slowest = max(slowest, us)
	}
	t.Logf("8 processes: %v from start to joined, Join took %d us at most", time.Since(start), slowest)
	require.Less(t, time.Since(start), soon)
	for _, p := range ps {
		require.Equal(t, "8", p.expect("fds")[0])
		p.exit(0)
	}
}

func TestF2_ProcessesEndInSequence(t *testing.T) {
	ps := startProcs(t, 4, "sequence")
	for _, p := range ps {
		p.expect("joined")
		p.exit(0)
	}
}

// loss is when ranks were lost, and how soon the others are to know.
type loss struct {
	t      *testing.T
	begin  time.Time
	within time.Duration
	delays *proctest.Delays
}

// newLoss is one that is about to happen: some of these ranks end or, where silent says for how long they may be, fall silent.
func newLoss(ps []*proc, silent time.Duration) *loss {
	l := &loss{t: ps[0].t, delays: ps[0].delays, within: proctest.EndedIsNamedWithin}
	if silent > 0 {
		l.within = silent + proctest.SilentIsNamedWithin
	}
	l.begin = time.Now()
	return l
}

// inTime is for a rank that has just said that it knows.
func (l *loss) inTime(p *proc) {
	l.t.Helper()
	l.delays.InTime(l.t, l.begin, time.Now(), l.within, fmt.Sprintf("rank %d knew", p.Rank))
}

// survived is what the survivors of ps say after one of them was lost, and when.
func (l *loss) survived(ps []*proc, lost int) {
	t := l.t
	t.Helper()
	var survivors []string
	for _, p := range ps {
		if p.Rank == lost {
			continue
		}
		survivors = append(survivors, strconv.Itoa(p.Rank))
		words := p.expect("lost")
		l.inTime(p)
		require.Equal(t, strconv.Itoa(lost), words[0], "rank %d: %v", p.Rank, words)
		require.Equal(t, "true", words[1], "rank %d: %v", p.Rank, words)
	}
	for _, p := range ps {
		if p.Rank != lost {
			require.Equal(t, strings.Join(survivors, ","), p.expect("survivors")[0])
			p.exit(0)
		}
	}
}

// soon is far below the silence that patient ranks bear, and long enough for a busy machine.
const (
	soon    = 40 * time.Second
	patient = "SWITCHYARD_PEER_TIMEOUT=1m"
)

func TestF2_KilledProcessIsNamed(t *testing.T) {
	ps := startProcs(t, 4, "survive", patient)
	for _, p := range ps {
		p.expect("joined")
	}
	l := newLoss(ps, 0)
	ps[2].Signal(syscall.SIGKILL)
	l.survived(ps, 2)
}

func TestF2_KilledRankZeroIsNamed(t *testing.T) {
	ps := startProcs(t, 3, "survive", patient)
	for _, p := range ps {
		p.expect("joined")
	}
	l := newLoss(ps, 0)
	ps[0].Signal(syscall.SIGKILL)
	l.survived(ps, 0)
}

func TestF2_ExitWithoutCloseIsALoss(t *testing.T) {
	ps := startProcs(t, 3, "crash", patient)
	for _, p := range ps {
		p.expect("joined")
	}
	l := newLoss(ps, 0)
	ps[1].Tell("")
	l.survived(ps, 1)
}

func TestF2_StoppedProcessIsNamed(t *testing.T) {
	t.Parallel() // it mostly waits
	timeout := proctest.Scaled(4 * time.Second)
	ps := startProcs(t, 4, "survive", "SWITCHYARD_PEER_TIMEOUT="+timeout.String())
	for _, p := range ps {
		p.expect("joined")
	}
	l := newLoss(ps, timeout)
	ps[1].Signal(syscall.SIGSTOP)
	l.survived(ps, 1)
	// When it wakes up it learns that the others have gone on without it, and
	// does not go on alone.
	ps[1].Signal(syscall.SIGCONT)
	words := ps[1].expect("lost")
	require.Equal(t, "1", words[0], words)
	require.Equal(t, "true", ps[1].expect("outcast")[0])
	ps[1].exit(1)
}

// A rank that hangs but lives is left out when the others say so, long before PeerTimeout, and learns it when it wakes up.
func TestF2_StoppedProcessIsLeftOut(t *testing.T) {
	t.Parallel() // it mostly waits
	ps := startProcs(t, 4, "leave out", "SWITCHYARD_PEER_TIMEOUT=1m")
	for _, p := range ps {
		p.expect("joined")
	}
	time.Sleep(20 * time.Millisecond)
	ps[2].Signal(syscall.SIGSTOP)
	for _, r := range []int{0, 1, 3} {
		require.Equal(t, []string{"2", "true"}, ps[r].expect("late")[:2])
	}
	waited := 0
	for _, r := range []int{0, 1, 3} {
		words := ps[r].expect("waited")
		require.Equal(t, "true", words[1], words)
		if words[0] == "true" {
			waited++
		}
		require.Equal(t, []string{"3", "<nil>"}, ps[r].expect("survivors"))
		require.Equal(t, []string{"true"}, ps[r].expect("closed"))
		ps[r].exit(0)
	}
	require.Positive(t, waited)
	ps[2].Signal(syscall.SIGCONT)
	words := ps[2].expect("late")
	require.Equal(t, "2", words[0], words)
	ps[2].expect("waited")
	require.Equal(t, "true", ps[2].expect("outcast")[0])
	ps[2].exit(1)
}

// A rank that was stopped for longer than PeerTimeout blames nobody but itself, though who could tell it is dead by then.
func TestF2_WokenProcessBlamesItself(t *testing.T) {
	t.Parallel() // it mostly waits
	timeout := proctest.Scaled(1500 * time.Millisecond)
	ps := startProcs(t, 2, "survive", "SWITCHYARD_PEER_TIMEOUT="+timeout.String())
	for _, p := range ps {
		p.expect("joined")
	}
	ps[1].Signal(syscall.SIGSTOP)
	time.Sleep(timeout / 2)
	ps[0].Signal(syscall.SIGKILL)
	time.Sleep(2 * timeout)
	ps[1].Signal(syscall.SIGCONT)
	words := ps[1].expect("lost")
	require.Equal(t, "1", words[0], words)
}

// A stop that is shorter than PeerTimeout harms nobody.
func TestF2_ShortStopIsNoLoss(t *testing.T) {
	t.Parallel() // it mostly waits
	ps := startProcs(t, 2, "wait", "SWITCHYARD_PEER_TIMEOUT=10s")
	for _, p := range ps {
		p.expect("joined")
	}
	ps[1].Signal(syscall.SIGSTOP)
	time.Sleep(500 * time.Millisecond)
	ps[1].Signal(syscall.SIGCONT)
	for _, p := range ps {
		p.Tell("")
		p.exit(0)
	}
}

func TestF2_AbortAndExit(t *testing.T) {
	ps := startProcs(t, 4, "abort")
	for _, p := range ps {
		p.expect("joined")
	}
	ps[2].Tell("")
	for _, p := range ps {
		if p.Rank == 2 {
			p.exit(3)
			continue
		}
		words := p.expect("aborted")
		require.Equal(t, []string{"2", "true", "true"}, words[:3], words)
		require.Contains(t, strings.Join(words, " "), "no room for expert 7")
		p.exit(0)
	}
}

// Nothing here catches signals: Ctrl-C ends a rank, and the others learn of it.
func TestF2_InterruptEndsARank(t *testing.T) {
	if signal.Ignored(syscall.SIGINT) {
		t.Skip("interrupts are ignored here, as a shell has them for what it runs in the background")
	}
	ps := startProcs(t, 3, "survive", patient)
	for _, p := range ps {
		p.expect("joined")
	}
	l := newLoss(ps, 0)
	ps[0].Signal(syscall.SIGINT)
	l.survived(ps, 0)
	ps[0].exit(-1)
	require.Equal(t, syscall.SIGINT, ps[0].State().Sys().(syscall.WaitStatus).Signal())
}

func TestF2_ShrinkAfterSeveralProcessesDie(t *testing.T) {
	ps := startProcs(t, 5, "survive")
	for _, p := range ps {
		p.expect("joined")
	}
	ps[4].Signal(syscall.SIGSTOP) // it must not go on with the others before it is killed
	ps[1].Signal(syscall.SIGKILL)
	ps[4].Signal(syscall.SIGKILL)
	for _, r := range []int{0, 2, 3} {
		words := ps[r].expect("lost")
		require.Contains(t, []string{"1", "4"}, words[0])
		require.Equal(t, "true", words[1])
	}
	// A loss that is noticed after Shrink shows in the new group instead.
	for _, r := range []int{0, 2, 3} {
		line, _ := ps[r].Line()
		require.Regexp(t, `^(survivors 0,2,3|error .*peer lost.*)$`, line)
	}
}

var kills = flag.Int("comm.kills", 12, "how many ranks TestF2_KilledInTheJoin kills or stops")

// A rank that is killed at any moment of a join, and started again, holds up nobody: either it was not missed, or the others have an
// error that names it and no other, and join again. One that is stopped for a moment is not missed.
func TestF2_KilledInTheJoin(t *testing.T) {
	n := *kills
	if testing.Short() {
		n = min(n, 4)
	}
	missed := 0
	for i := range n {
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			addr := freeAddr(t)
			rng := rand.New(rand.NewPCG(uint64(i), 5))
			const size = 4
			ps := make([]*proc, size)
			for r := range ps {
				ps[r] = startProc(t, r, size, addr, "join again", nil)
			}
			victim := rng.IntN(size)
			time.Sleep(time.Duration(rng.IntN(40000)*(1+rng.IntN(4))) * time.Microsecond)
			stop := i%4 == 3
			if stop {
				ps[victim].Signal(syscall.SIGSTOP)
				time.Sleep(time.Duration(rng.IntN(300)) * time.Millisecond)
				ps[victim].Signal(syscall.SIGCONT)
			} else {
				ps[victim].Signal(syscall.SIGKILL)
				ps[victim].Wait()
				ps[victim] = startProc(t, victim, size, addr, "join again", nil)
			}
			type word struct {
				rank int
				line string
			}
			words := make(chan word)
			over := make(chan struct{})
			defer close(over)
			for _, p := range ps {
				go func() {
					for line, ok := p.Line(); ok; line, ok = p.Line() {
						select {
						case words <- word{p.Rank, line}:
						case <-over:
						}
					}
				}()
			}
			in := map[int]string{} // rank to the group that it is in
			for same := false; !same; {
				select {
				case w := <-words:
					f := strings.Fields(w.line)
					switch f[0] {
					case "joined":
						in[w.rank] = f[1]
					case "failed":
						require.False(t, stop, "rank %d, stopped %d: %s", w.rank, victim, w.line)
						delete(in, w.rank)
						missed++
						require.Equal(t, []string{strconv.Itoa(victim), "true"}, f[1:3], "rank %d, victim %d: %s", w.rank, victim, w.line)
					default:
						t.Fatalf("rank %d, victim %d: %s", w.rank, victim, w.line)
					}
				case <-time.After(time.Minute):
					t.Fatalf("victim %d: the ranks that have joined are %v", victim, in)
				}
				same = len(in) == size
				for _, id := range in {
					same = same && id == in[0]
				}
			}
			for _, p := range ps {
				p.Tell("")
			}
			for _, p := range ps {
				require.Zero(t, p.Wait(), "rank %d", p.Rank)
			}
		})
	}
	t.Logf("%d kills and stops, missed by %d ranks", n, missed)
}
