package troubles

import (
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/internal/proctest"
)

var (
	transcript = flag.String("transcript", "", "write what an operator saw to this `FILE`")
	torch      = flag.String("torch", "", "a `PYTHON` with a torch that has an analyzer of flight records")
)

func TestMain(m *testing.M) {
	proctest.Play(proctest.Parts{"rank": play, "squatter": squat, "python": func(args []string) int { panic(unix.Exec(args[0], args, os.Environ())) }})
	code := m.Run()
	if built != "" {
		_ = os.RemoveAll(built)
	}
	os.Exit(code)
}

// command is the operator's, built once, in the folder built.
var (
	built   string
	command = sync.OnceValues(func() (path string, err error) {
		if built, err = os.MkdirTemp("", "switchyard-troubles-"); err != nil {
			return "", err
		}
		path = filepath.Join(built, "switchyard")
		if out, err := exec.Command("go", "build", "-o", path, "../../cmd/switchyard").CombinedOutput(); err != nil {
			return "", fmt.Errorf("build the command: %w\n%s", err, out)
		}
		return path, nil
	})
)

const ranks = 4

// job is ranks whose trouble an operator looks at.
type job struct {
	*testing.T
	command string
	dumps   string // the folder of SWITCHYARD_DUMP, for ranks in different calls
	spaces  []*proctest.Namespace
	ps      []*proctest.Process
}

// begin is a job without ranks yet.
func begin(t *testing.T, hosts int) *job {
	t.Helper()
	j := &job{T: t, spaces: proctest.Namespaces(t, hosts)}
	var err error
	j.command, err = command()
	require.NoError(t, err)
	return j
}

// start starts ranks of a job in hosts of their own, or all on one, and waits until the trouble has begun.
func start(t *testing.T, hosts, started int, trouble string, culprit int) *job {
	t.Helper()
	j := begin(t, hosts)
	if trouble == calls || trouble == kinds {
		j.dumps = t.TempDir()
	}
	for r := range started {
		env := []string{"TROUBLES_FOLDER=" + t.TempDir(), "UCX_TLS=tcp,self", "SWITCHYARD_DUMP=" + j.dumps}
		if hosts > 1 {
			env = append(env, "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1")
		}
		s := proctest.Spec{Part: "rank", Args: []string{trouble, fmt.Sprint(culprit)}, Via: j.spaces[r%hosts].Via, Env: env}
		j.ps = append(j.ps, proctest.Rank(t, r, ranks, j.spaces[0].IP+":29431", s))
	}
	if started == ranks {
		for r, p := range j.ps {
			if !(r == culprit && trouble == calls) && trouble != kinds { // it is in its other call then
				p.Saw("begins")
			}
		}
	}
	return j
}

// table begins one of several tables with its time.
var table = regexp.MustCompile(`(?m)^\d\d:\d\d:\d\d$`)

// asks runs a command of the operator until it says what a pattern wants, for a minute at most, and writes down what it said.
func (j *job) asks(title, want string, args ...string) {
	j.Helper()
	re := regexp.MustCompile(want)
	said := ""
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		line := append(j.spaces[0].Via[:len(j.spaces[0].Via):len(j.spaces[0].Via)], append([]string{j.command}, args...)...)
		b, _ := exec.CommandContext(j.Context(), line[0], line[1:]...).CombinedOutput() // what it said tells enough
		said = strings.TrimSpace(string(b))
		if tables := table.FindAllStringIndex(said, -1); tables != nil {
			said = said[tables[len(tables)-1][0]:] // it counts from the one before
		}
		if re.MatchString(said) || time.Now().After(end) {
			break
		}
	}
	if *transcript != "" {
		f, err := os.OpenFile(*transcript, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o666)
		require.NoError(j, err)
		_, err = fmt.Fprintf(f, "\n## %s\n\n```text\n$ switchyard %s\n%s\n```\n", title, strings.Join(args, " "), said)
		require.NoError(j, err)
		require.NoError(j, f.Close())
	}
	require.Regexp(j, re, said)
}

func TestALateRank(t *testing.T) {
	start(t, 1, ranks, late, 2).asks("A rank comes 40 ms late to every step", `rank 2 comes late to calls: the others wait \d\d% of the time until it begins one, most in alltoallv`, "top", "-n", "3")
}

func TestAStoppedRank(t *testing.T) {
	j := start(t, 1, ranks, none, 1)
	j.ps[1].Signal(syscall.SIGSTOP)
	defer j.ps[1].Signal(syscall.SIGCONT)
	j.asks("A rank is stopped", fmt.Sprintf(`rank 1 (does not come further|has not entered).*(?s:.*)rank 1, process %d, is stopped: it got a signal such as SIGSTOP`, j.ps[1].Pid()), "status")
}

func TestAKilledRank(t *testing.T) {
	j := start(t, 1, ranks, none, 3)
	j.ps[3].Signal(syscall.SIGKILL)
	j.asks("A rank is killed", `rank 3 was lost at .*its connection ended without a goodbye`, "status")
}

func TestRanksInDifferentCalls(t *testing.T) {
	start(t, 1, ranks, calls, 2).asks("Ranks make different calls", `ranks make different calls, and wait for each other: rank 2 in all-reduce 1 of group world; ranks 0, 1 and 3 in alltoallv 21`, "status")
}

func TestRanksInDifferentCallsThatHaveFailed(t *testing.T) {
	j := start(t, 1, ranks, calls, 2)
	j.asks("The same, after they have failed", `rank 0: alltoallv 21 failed .*rank 2 waits in all-reduce`, "status")
	for rank, p := range j.ps {
		p.Saw("ended: ") // with the error of its call, before which it has left its calls
		require.FileExists(t, filepath.Join(j.dumps, fmt.Sprintf("switchyard-rank%d.jsonl", rank)))
		require.FileExists(t, filepath.Join(j.dumps, fmt.Sprintf("torch_rank_%d", rank)))
	}
}

// leftBehind are the files of dumps that ranks leave, but for those of one rank.
func leftBehind(lost int) (files []string) {
	for r := range ranks {
		if r != lost {
			files = append(files, fmt.Sprintf("switchyard-rank%d.jsonl", r), fmt.Sprintf("torch_rank_%d", r))
		}
	}
	slices.Sort(files)
	return files
}

func entries(t *testing.T, dir string) (names []string) {
	t.Helper()
	all, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range all {
		names = append(names, e.Name())
	}
	return names
}

// Programs end on their errors, and launchers end the others when one has.
func TestProgramsThatEndOnTheirErrorsLeaveTheirCalls(t *testing.T) {
	const lost = 3
	t.Run("alone", func(t *testing.T) {
		j := begin(t, 1)
		dumps := t.TempDir()
		for r := range ranks {
			j.ps = append(j.ps, proctest.Rank(t, r, ranks, j.spaces[0].IP+":29431", proctest.Spec{Part: "rank", Args: []string{none, "0"}, Via: j.spaces[0].Via, Env: []string{"SWITCHYARD_DUMP=" + dumps, endsVar + "=1"}}))
		}
		for _, p := range j.ps {
			p.Saw("begins")
		}
		j.ps[lost].Signal(syscall.SIGKILL)
		for _, p := range j.ps {
			p.Wait()
		}
		require.Equal(t, leftBehind(lost), entries(t, dumps))
	})
	t.Run("with a launcher", func(t *testing.T) {
		path, err := command()
		require.NoError(t, err)
		dumps := t.TempDir()
		p := proctest.Start(t, proctest.Spec{Part: "rank", Args: []string{none, "0"}, Via: []string{path, "run", "-n", fmt.Sprint(ranks)},
			Env: []string{"SWITCHYARD_DUMP=" + dumps, endsVar + "=1", "SWITCHYARD_METRICS_HOLD=1m"}}) // the launcher waits longer, for a busy machine
		p.Saw(`\[3\] begins`)
		out, _ := p.Output()
		var pid int
		_, err = fmt.Sscanf(out[strings.Index(out, "[3] begins"):], "[3] begins in process %d", &pid)
		require.NoError(t, err)
		require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
		p.Wait()
		require.Equal(t, leftBehind(lost), entries(t, dumps))
	})
}

// torch's analyzer finds ranks in different calls of two communicators, while they wait and once the calls have failed, and the rank that makes
// another call of one communicator.
func TestTorchsAnalyzerFindsDifferentCalls(t *testing.T) {
	if *torch == "" {
		t.Skip("needs -torch PYTHON")
	}
	analyze := func(folder, prefix string, want ...string) {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), *torch, "-m", "torch.distributed.flight_recorder.fr_trace", folder, "--prefix", prefix).CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.NotContains(t, string(out), "unrecognized")
		for _, pattern := range want {
			require.Regexp(t, pattern, string(out))
		}
	}
	dumped := func(j *job) (folder string) {
		t.Helper()
		folder = t.TempDir()
		j.asks("The last calls for torch's analyzer", `calls_rank_3`, "dump", "-torch", filepath.Join(folder, "calls_rank_"))
		return folder
	}
	apart := []string{`sequence number: 21\s(?s:.*)collective: nccl:all_to_all\s+missing ranks: \{2\}`, `sequence number: 1\s(?s:.*)collective: nccl:all_reduce\s+missing ranks: \{0, 1, 3\}`}
	j := start(t, 1, ranks, calls, 2)
	j.asks("Ranks make different calls", `ranks make different calls`, "status")
	analyze(dumped(j), "calls_rank_", apart...)
	for _, p := range j.ps {
		p.Saw("ended: ")
	}
	analyze(j.dumps, "torch_rank_", apart...)

	j = start(t, 1, ranks, kinds, 1)
	for _, p := range j.ps {
		p.Saw("ended: ")
	}
	analyze(dumped(j), "calls_rank_", `nccl:all_reduce\s(?s:.*)Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH, Expected collective type: 'all_reduce' .*'_all_gather_base'`)
}

func TestCallsThatGoToGloo(t *testing.T) {
	if *torch == "" {
		t.Skip("needs -torch PYTHON")
	}
	j := begin(t, 1)
	for r := range ranks {
		s := proctest.Spec{Part: "python", Args: []string{*torch, "testdata/gloo.py"}, Via: j.spaces[0].Via, Env: []string{"MASTER_PORT=29500", "GLOO_SOCKET_IFNAME=lo"}}
		j.ps = append(j.ps, proctest.Rank(t, r, ranks, j.spaces[0].IP+":29431", s))
	}
	for _, p := range j.ps {
		p.Saw("begins")
	}
	j.asks("Calls go to gloo", `ranks 0, 1, 2 and 3: calls of all_reduce fall back to gloo, 800 in all: Switchyard does not reduce this element type with this operator`, "status")
}

func TestWrongSplits(t *testing.T) {
	start(t, 1, ranks, splits, 1).asks("A rank sends more than its peer expects", `rank 2: alltoallv 21 failed at .*rank 1`, "status")
}

func TestSkewedExperts(t *testing.T) {
	start(t, 1, ranks, skew, 3).asks("All tokens choose experts of one rank", `rank 3 gets 4\.0 times the tokens of the mean rank`, "top", "-n", "3")
}

func TestASlowLink(t *testing.T) {
	if testing.Short() {
		t.Skip("ranks on four hosts")
	}
	j := start(t, ranks, ranks, link, 2)
	j.spaces[2].Limit("20mbit")
	j.asks("The link of a rank's host carries 20 Mbit/s", `rank 2 is slow in calls that it has begun: the others wait for it \d\d% of the time`, "top", "-n", "5")
}

func TestAHeapThatIsNearlyFull(t *testing.T) {
	start(t, 1, ranks, heap, 0).asks("The heap is nearly full", `ranks 0, 1, 2 and 3: each has used \d+ of \d+ MiB of its heap on host; the largest buffer that fits has`, "status")
}

func TestARankWithoutDescriptors(t *testing.T) {
	j := start(t, 1, ranks, descriptors, 1)
	j.asks("A rank has no descriptor left", fmt.Sprintf(`rank 1, process %d, has 6\d of 64 file descriptors open`, j.ps[1].Pid()), "status")
}

func TestARankThatSwaps(t *testing.T) {
	if testing.Short() {
		t.Skip("reads a disk")
	}
	j := start(t, 1, ranks, swap, 2)
	j.asks("The memory of a rank is read from a disk again and again", fmt.Sprintf(`rank 2, process %d, reads memory from a disk \d+ times a second`, j.ps[2].Pid()), "status")
}

func TestARankWithoutACore(t *testing.T) {
	j := start(t, 1, ranks, core, 2)
	j.asks("The threads of a rank share one core", fmt.Sprintf(`rank 2, process %d, gets too few cores: its threads wait for one \d+ ms a second`, j.ps[2].Pid()), "top", "-n", "2")
}

func TestARankWhoseMetricsPortIsTaken(t *testing.T) {
	j := begin(t, 1)
	for r := range ranks {
		at := "SWITCHYARD_METRICS=:29500"
		if r == 3 {
			at = "SWITCHYARD_METRICS=:29499" // and so the port of rank 2
		}
		j.ps = append(j.ps, proctest.Rank(t, r, ranks, j.spaces[0].IP+":29431", proctest.Spec{Part: "rank", Args: []string{none, "0"}, Via: j.spaces[0].Via, Env: []string{at}}))
	}
	j.asks("The port of a rank's metrics is taken", `rank [23], process \d+, serves no metrics: port 29502, that of SWITCHYARD_METRICS and this rank's place on its host, is taken`, "status")
}

func TestAGroupThatNeverMeets(t *testing.T) {
	start(t, 1, ranks-1, none, 3).asks("A rank does not come to the join", `group world of 4 ranks has not met at .*: rank 3 is waited for; ranks 0, 1 and 2 wait here`, "status")
}

func TestAGroupWhoseFirstRankIsMissing(t *testing.T) {
	j := start(t, 1, 0, none, 0)
	for r := 1; r < ranks; r++ {
		j.ps = append(j.ps, proctest.Rank(t, r, ranks, j.spaces[0].IP+":29431", proctest.Spec{Part: "rank", Args: []string{none, "0"}, Via: j.spaces[0].Via}))
	}
	j.asks("Rank 0 does not come to the join", `group world of 4 ranks has not met at .*: rank 0 is waited for; ranks 1, 2 and 3 wait here`, "status")
}

// squat is another program at the port of a join, which says a line to everybody, or nothing.
func squat(args []string) int {
	l, err := net.Listen("tcp", args[0])
	if err != nil {
		panic(err)
	}
	fmt.Println("listens")
	for {
		c, err := l.Accept()
		if err != nil {
			panic(err)
		}
		_, _ = io.WriteString(c, args[1])
	}
}

// Rank 0 finds the port of the join taken, and ends; the others still look for it there.
func TestAJoinWhosePortIsTaken(t *testing.T) {
	for _, c := range []struct{ by, title, want string }{
		{"a program", "Another program has the port of the join", `another program listens there: malformed hello: it begins with "220 mail"`},
		{"a silent program", "A program that says nothing has the port of the join", `another program may listen there, or rank 0 is stopped: no hello`},
		{"a job", "Another job has the port of the join", `another job, or another start of this one, meets there`},
	} {
		t.Run(c.by, func(t *testing.T) {
			t.Parallel() // ranks mostly wait
			j := begin(t, 1)
			at := j.spaces[0].IP + ":29431"
			switch c.by {
			case "a job":
				other := proctest.Spec{Part: "rank", Args: []string{none, "0"}, Via: j.spaces[0].Via, Env: []string{"TORCHELASTIC_RUN_ID=other"}}
				proctest.Rank(t, 0, 2, at, other)
				j.asks("A rank of the other job is missing", `group world of 2 ranks has not met at .*: rank 1 is waited for; rank 0 waits here`, "status")
			default:
				said := map[string]string{"a program": "220 mail.example.com ready\r\n"}[c.by]
				proctest.Start(t, proctest.Spec{Part: "squatter", Args: []string{at, said}, Via: j.spaces[0].Via}).Saw("listens")
			}
			for r := range ranks {
				spec := proctest.Spec{Part: "rank", Args: []string{none, "0"}, Via: j.spaces[0].Via, Env: []string{"TORCHELASTIC_RUN_ID=this", endsVar + "=1"}}
				j.ps = append(j.ps, proctest.Rank(t, r, ranks, at, spec))
			}
			j.ps[0].Saw(`ended: comm: join: rank 0 cannot listen at ` + at + `, .*address already in use`)
			j.asks(c.title, `group world of 4 ranks has not met at `+at+` after .*: rank 0 is waited for; ranks 1, 2 and 3 wait here. rank 0 was not found there: `+c.want, "status")
		})
	}
}
