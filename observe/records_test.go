package observe_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/internal/worldtest"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/observe"
	"github.com/switchyard-moe/switchyard/p2p"
)

// records are what Python reads in a file of them.
type records struct {
	Version string
	Groups  map[string]struct{ Desc, Ranks string } `json:"pg_config"`
	Entries []struct {
		Group    []string `json:"process_group"`
		ID       int64    `json:"pg_id"`
		Call     int      `json:"collective_seq_id"`
		Name     string   `json:"profiling_name"`
		Created  int64    `json:"time_created_ns"`
		Started  *int64   `json:"time_discovered_started_ns"`
		Finished *int64   `json:"time_discovered_completed_ns"`
		Took     *float64 `json:"duration_ms"`
		Sizes    [][]int  `json:"input_sizes"`
		State    string
		Retired  bool
	}
}

// unpickled has Python read a file.
func unpickled(t testing.TB, path string) (r records) {
	t.Helper()
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("needs python3")
	}
	out, err := exec.Command(python, "-c", "import json, pickle, sys; print(json.dumps(pickle.load(open(sys.argv[1], 'rb'))))", path).CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.NoError(t, json.Unmarshal(out, &r))
	return r
}

func TestRecordsAreThoseOfTorch(t *testing.T) {
	at := time.Date(2026, 11, 26, 12, 0, 0, 123456789, time.UTC)
	later := at.Add(1500 * time.Microsecond)
	call := observe.Call{
		Job: "a", Rank: 1, Seq: 7, Group: "wörld", ID: 1 << 40, Members: []int{2, 0, 1}, Call: 3, Operation: "all-reduce", PayloadBytes: 4096,
		Enqueued: at, Started: &at, Finished: &later, State: "finished",
	}
	waits := call
	waits.Call, waits.Operation, waits.Finished, waits.State = 4, "dispatch", nil, "started"
	alone := call
	alone.Call = 0
	other := call
	other.Operation, other.Rank = "send", 2
	prefix := filepath.Join(t.TempDir(), "rank_")
	files, err := observe.WriteRecords(prefix, []observe.Call{call, alone, waits, other})
	require.NoError(t, err)
	require.Equal(t, []string{prefix + "1"}, files)
	r := unpickled(t, files[0])
	require.Equal(t, "2.10", r.Version)
	require.Len(t, r.Entries, 2, "calls that all ranks make")
	e := r.Entries[0]
	require.Equal(t, []string{"1099511627776", "switchyard wörld, communicator 1099511627776"}, e.Group)
	require.Equal(t, "[0, 1, 2]", r.Groups["1099511627776"].Ranks)
	require.Equal(t, []any{int64(1 << 40), 3, "nccl:all_reduce", "completed", true}, []any{e.ID, e.Call, e.Name, e.State, e.Retired})
	require.Equal(t, []int64{at.UnixNano(), at.UnixNano(), later.UnixNano()}, []int64{e.Created, *e.Started, *e.Finished})
	require.InDelta(t, 1.5, *e.Took, 1e-9)
	require.Equal(t, [][]int{{4096}}, e.Sizes)
	e = r.Entries[1]
	require.Equal(t, []any{4, "nccl:all_to_all_single", "started", false}, []any{e.Call, e.Name, e.State, e.Retired})
	require.Nil(t, e.Finished)
	require.Nil(t, e.Took)
	require.Equal(t, [][]int{{0}}, e.Sizes)

	waits.Job = "b"
	_, err = observe.WriteRecords(prefix, []observe.Call{call, waits})
	require.ErrorContains(t, err, "several jobs run, and one is to be chosen: a, b")
	_, err = observe.WriteRecords(filepath.Join(prefix, "missing", "rank_"), []observe.Call{call})
	require.ErrorIs(t, err, os.ErrNotExist)
}

// dumps is the folder that processes of a test dump to.
func dumps(t *testing.T) string {
	const folder = "SWITCHYARD_DUMP"
	if os.Getenv(folder) == "" {
		t.Setenv(folder, t.TempDir())
	}
	return os.Getenv(folder)
}

// A program may end on an error that leaves its communicator usable: its dump is there when it gets that.
func TestAnErrorThatHarmsNothingIsDumped(t *testing.T) {
	dir := dumps(t)
	worldtest.Procs(t, 2, 16<<20, func(r *worldtest.Rank) {
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		pair, err := p2p.New(r.Ctx, r.Heap, p2p.Options{})
		r.Must(err)
		dump := filepath.Join(dir, fmt.Sprintf("switchyard-rank%d.jsonl", r.Rank()))
		if r.Rank() == 0 {
			r.Must(pair.SetTimeout(time.Millisecond))
			require.ErrorIs(r.T, pair.Recv(nil, 1, 7, memory.Host(make([]byte, 8))), comm.ErrTimeout)
			b, err := os.ReadFile(dump)
			r.Must(err)
			require.Contains(r.T, string(b), comm.ErrTimeout.Error())
		}
		r.Must(r.Group.Barrier(r.Ctx))
		sp := &alltoallv.Splits{Send: []int64{64, 64}, Recv: []int64{64, 64}}
		if r.Rank() == 0 {
			sp.Send[1] = 48
		}
		err = x.Exchange(nil, memory.Host(make([]byte, 128)), memory.Host(make([]byte, 128)), sp)
		if r.Rank() == 1 {
			require.ErrorContains(r.T, err, "rank 0 sends 48 bytes to rank 1, which expects 64")
			b, rerr := os.ReadFile(dump)
			r.Must(rerr)
			require.Contains(r.T, string(b), "rank 0 sends 48 bytes to rank 1, which expects 64")
		}
		r.Must(r.Group.Barrier(r.Ctx))
	})
}

// When a group fails each process leaves its calls in both forms.
func TestAFaultIsDumped(t *testing.T) {
	dir := dumps(t)
	worldtest.Procs(t, 2, 16<<20, func(r *worldtest.Rank) {
		appears := func(name string) {
			path := filepath.Join(dir, name)
			require.Eventually(r.T, func() bool { _, err := os.Stat(path); return err == nil }, time.Minute, time.Millisecond, path)
		}
		x, err := alltoallv.New(r.Ctx, r.Heap, alltoallv.Options{})
		r.Must(err)
		exchanges(r, x, 3)
		r.Must(r.Group.Barrier(r.Ctx))
		if r.Rank() == 0 { // past the barrier, which would end with the abort
			r.Must(os.WriteFile(filepath.Join(dir, "past"), nil, 0o666))
		} else {
			appears("past")
			r.Group.Abort(errors.New("pulled the plug"))
		}
		<-r.Group.Done() // a program may end now
		dump := fmt.Sprintf("switchyard-rank%d.jsonl", r.Rank())
		require.FileExists(r.T, filepath.Join(dir, dump))
		require.FileExists(r.T, filepath.Join(dir, fmt.Sprintf("torch_rank_%d", r.Rank())))
		if r.Rank() > 0 {
			return
		}
		// The next group of the one that is left fails too, and leaves that as it is.
		first, err := os.ReadFile(filepath.Join(dir, dump))
		r.Must(err)
		alone, err := r.Group.Shrink(r.Ctx)
		r.Must(err)
		alone.Abort(errors.New("pulled it again"))
		require.FileExists(r.T, filepath.Join(dir, "switchyard-epoch1-rank0.jsonl"))
		require.FileExists(r.T, filepath.Join(dir, "torch_epoch1_rank_0"))
		now, err := os.ReadFile(filepath.Join(dir, dump))
		r.Must(err)
		require.Equal(r.T, string(first), string(now))
	})
	if proctest.Again() {
		return // it is one of the ranks
	}
	for rank := range 2 {
		r := unpickled(t, filepath.Join(dir, fmt.Sprintf("torch_rank_%d", rank)))
		require.Len(t, r.Entries, 3)
		require.Equal(t, "nccl:all_to_all", r.Entries[2].Name)
		require.Equal(t, "completed", r.Entries[2].State)
	}
}
