package observe

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var noonOfFindings = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

// fourRanks are a job after 10 s, in which rank p has waited for rank q as long as waited[p][q] says.
func fourRanks(waited func(r *Rank)) State {
	s := State{At: noonOfFindings.Add(10 * time.Second)}
	for p := range 4 {
		r := Rank{Rank: p, Size: 4, Group: "world", Job: "a", Pid: 100 + p, Began: noonOfFindings, Peers: make([]Peer, 4)}
		for q := range r.Peers {
			if q != p {
				r.Peers[q].Pid = 100 + q
			}
		}
		waited(&r)
		s.Ranks = append(s.Ranks, r)
	}
	return s
}

func kindsOf(s State) (kinds, texts string) {
	for _, f := range s.Findings {
		kinds += f.Kind + " "
		texts += f.Text + "\n"
	}
	return strings.TrimSpace(kinds), texts
}

// The ranks that rank 2 holds up come to the next call a little late themselves, and are not named.
func TestALateRankAndASlowOneAreToldApart(t *testing.T) {
	for _, absent := range []bool{true, false} {
		s := Merge(fourRanks(func(r *Rank) {
			for q := range 4 {
				w := Waited{Operation: "alltoallv", Peer: q, Seconds: 0.5, AbsentSeconds: 0.5}
				if q == 2 {
					w.Seconds, w.AbsentSeconds = 6, 1
					if absent {
						w.AbsentSeconds = 5
					}
				}
				if q != r.Rank {
					r.Waited = append(r.Waited, w)
				}
			}
		}))
		kinds, text := kindsOf(s)
		require.Equal(t, map[bool]string{true: "late", false: "slow"}[absent], kinds)
		require.Regexp(t, `^rank 2 .* 50% of the time.*alltoallv`, text)
		require.Equal(t, []int{2}, s.Findings[0].Ranks)
		s.At = s.At.Add(time.Second)
		require.Empty(t, s.Since(fourRanksAgain(s)).Findings, "nothing was waited for since")
	}
}

func fourRanksAgain(s State) State {
	s.At = s.At.Add(-time.Second)
	return s
}

func TestALoadIsFoundWhereItHasGrown(t *testing.T) {
	before := fourRanks(func(r *Rank) { r.Choices = []float64{100, 100, 100, 100} })
	now := fourRanks(func(r *Rank) { r.Choices = []float64{110, 110, 110, 170} })
	require.Empty(t, Merge(now).Findings)
	kinds, text := kindsOf(now.Since(before))
	require.Equal(t, "load", kinds)
	require.Contains(t, text, "rank 3 gets 2.8 times the tokens of the mean rank")
}

func TestFaultsFailedCallsAndHeapsAreFindings(t *testing.T) {
	s := Merge(fourRanks(func(r *Rank) {
		switch r.Rank {
		case 0, 1:
			r.LastFault = &Failure{Kind: "lost", Culprit: 3, At: noonOfFindings, Error: "peer lost"}
			r.LastFailed = &Call{Rank: r.Rank, Error: "peer lost"}
		case 2:
			r.LastFailed = &Call{Rank: 2, Operation: "alltoallv", Call: 21, Enqueued: noonOfFindings, Error: "rank 1 sends 8200 bytes"}
			r.Heaps = []Heap{{Device: "host", ReservedBytes: 64 << 20, UsedBytes: 60 << 20, LargestFreeBytes: 1 << 20}}
		}
	}))
	kinds, text := kindsOf(s)
	require.Equal(t, "fault failed heap", kinds)
	require.Equal(t, "rank 3 was lost at 12:00:00: peer lost\n"+
		"rank 2: alltoallv 21 failed at 12:00:00: rank 1 sends 8200 bytes\n"+
		"rank 2 has used 60 of 64 MiB of its heap on host; the largest buffer that fits has 1024 KiB\n", text)
}

// A process that does not answer is named by its rank, which the connections of others tell, and by what the kernel says of it.
func TestASilentProcessIsARank(t *testing.T) {
	for state, want := range map[string]string{"stopped": "is stopped: it got a signal", "traced": "debugger", "waiting for a device": "a disk or a driver", "sleeping": "gets no core"} {
		s := fourRanks(func(*Rank) {})
		s.Ranks = s.Ranks[:3]
		s.Silent = []Silent{{Pid: 103}}
		s.Processes = []Vitals{{Pid: 103, State: state, Files: 3, FileLimit: 1024}, {Pid: 101, State: "running", Files: 60, FileLimit: 64, SwapBytes: 24 << 20, DiskReadsASecond: 300, CoreWaits: 0.41}}
		kinds, text := kindsOf(Merge(s))
		require.Equal(t, "files core swap silent", kinds)
		require.Contains(t, text, "rank 3, process 103, ")
		require.Contains(t, text, want)
		require.Contains(t, text, "rank 1, process 101, has 60 of 64 file descriptors open")
		require.Contains(t, text, "rank 1, process 101, has 24 MiB of its memory swapped out, and reads memory from a disk 300 times a second")
		require.Contains(t, text, "rank 1, process 101, gets too few cores: its threads wait for one 410 ms a second")
		other := s
		other.Ranks = append([]Rank{{Job: "other", Pid: 99}}, s.Ranks...)
		other, err := Merge(other).OfJob("other")
		require.NoError(t, err)
		require.Empty(t, other.Findings, "another job's")
	}
}

func TestRanksThatMakeDifferentCallsAreNamed(t *testing.T) {
	s := Merge(fourRanks(func(r *Rank) {
		w := Waiting{Group: "world", Operation: "dispatch", Call: 12, For: 2, Absent: []int{2}, Seconds: 0.6}
		if r.Rank == 2 {
			w = Waiting{Group: "world", Operation: "all-reduce", Call: 3, For: 0, Absent: []int{0, 1, 3}, Seconds: 0.6}
		}
		r.Waiting = []Waiting{w}
	}))
	require.Equal(t, "ranks make different calls, and wait for each other: rank 2 in all-reduce 3 of group world; ranks 0, 1 and 3 in dispatch 12 of group world", s.Verdict)
	for i := range s.Ranks {
		s.Ranks[i].Waiting[0].Seconds = 0.1
	}
	require.NotContains(t, Merge(s).Verdict, "different", "threads may be apart for a moment")
}

func TestWhoHasNotJoinedIsNamed(t *testing.T) {
	join := func(rank int) Join {
		return Join{Group: "world", At: "@job", Rank: rank, Size: 4, Seconds: 3, What: "ranks [2 3] have not come"}
	}
	zero := join(0)
	zero.Missing = []int{2, 3}
	kinds, text := kindsOf(Merge(State{Joins: []Join{join(1)}}, State{Joins: []Join{zero}}))
	require.Equal(t, "joining", kinds)
	require.Equal(t, "group world of 4 ranks has not met at @job after 3.0s: ranks 2 and 3 are waited for; ranks 0 and 1 wait here. ranks [2 3] have not come\n", text)
	_, text = kindsOf(Merge(State{Joins: []Join{join(1)}}))
	require.Contains(t, text, "rank 0 is waited for; rank 1 waits here")

	zero.Missing, zero.What = nil, "all ranks have come"
	_, text = kindsOf(Merge(State{Joins: []Join{join(1)}}, State{Joins: []Join{zero}}))
	require.Equal(t, "group world of 4 ranks has not met at @job after 3.0s: ranks 0 and 1 wait here. all ranks have come\n", text)

	// Rank 0 finds its port taken, by another job.
	zero.Missing, zero.What = []int{0}, "rank 0 cannot listen there"
	other := Join{Group: "world", At: "@job", Size: 2, Seconds: 3, Missing: []int{1}, What: "ranks [1] have not come"}
	_, text = kindsOf(Merge(State{Joins: []Join{join(1)}}, State{Joins: []Join{zero}}, State{Joins: []Join{other}}))
	require.Equal(t, "group world of 2 ranks has not met at @job after 3.0s: rank 1 is waited for; rank 0 waits here. ranks [1] have not come\n"+
		"group world of 4 ranks has not met at @job after 3.0s: rank 0 is waited for; rank 1 waits here. rank 0 cannot listen there\n", text)
	_, text = kindsOf(Merge(State{Joins: []Join{zero}}))
	require.Equal(t, "group world of 4 ranks has not met at @job after 3.0s: rank 0 is waited for. rank 0 cannot listen there\n", text)
	zero.Size = 2
	_, text = kindsOf(Merge(State{Joins: []Join{other}}, State{Joins: []Join{zero}}))
	require.Contains(t, text, "rank 1 is waited for; rank 0 waits here. ranks [1] have not come\n")
	require.Contains(t, text, "rank 0 is waited for. rank 0 cannot listen there\n")
}

func TestVitalsAreReadFromTheKernel(t *testing.T) {
	own, err := look("/proc/self")
	require.NoError(t, err)
	require.Equal(t, os.Getpid(), own.Pid)
	require.Positive(t, own.Files)
	require.GreaterOrEqual(t, own.FileLimit, own.Files)

	dir := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666))
	}
	_, err = look(dir)
	require.ErrorIs(t, err, os.ErrNotExist)
	write("stat", "4242 (a) b (c)) T 1 4242 4242 0 -1 4194304 100 0 77 0 1 2\n")
	write("status", "Name:\ta\nVmSwap:\t   2048 kB\n")
	write("limits", "Limit                     Soft Limit           Hard Limit           Units\nMax open files            64                   64                   files\n")
	p, err := look(dir)
	require.NoError(t, err)
	require.Equal(t, Vitals{Pid: 4242, State: "stopped", SwapBytes: 2 << 20, DiskReads: 77, FileLimit: 64}, p)
	write("stat", "nothing")
	_, err = look(dir)
	require.ErrorContains(t, err, "not in the kernel's format")
}
