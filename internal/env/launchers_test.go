package env

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// captured reads an environment of testdata, and what is wanted of it.
func captured(t *testing.T, file string) (env map[string]string, want string) {
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	env = map[string]string{}
	for _, line := range strings.Split(string(text), "\n") {
		if w, ok := strings.CutPrefix(line, "want "); ok {
			want = w
		} else if name, value, ok := strings.Cut(line, "="); ok && !strings.HasPrefix(line, "#") {
			env[name] = value
		}
	}
	require.NotEmpty(t, want, file)
	return env, want
}

// short is the address without what differs from job to job.
func short(w World) string {
	addr := regexp.MustCompile(`^@switchyard-meet-\d+-(\w+)-[0-9a-f]{16}$`).ReplaceAllString(w.Addr, "@$1")
	if w.Addr == fmt.Sprintf("%s:%d", strings.TrimSuffix(w.Addr, fmt.Sprintf(":%d", jobPort(w.Job))), jobPort(w.Job)) {
		addr = strings.TrimSuffix(w.Addr, fmt.Sprintf("%d", jobPort(w.Job))) + "PORT"
	}
	return fmt.Sprintf("rank=%d size=%d local=%d/%d launcher=%q addr=%s", w.Rank, w.Size, w.LocalRank, w.LocalSize, w.Launcher, addr)
}

func TestLaunchersByTheirEnvironments(t *testing.T) {
	files, err := filepath.Glob("testdata/launchers/*.txt")
	require.NoError(t, err)
	seen := map[string]bool{}
	for _, file := range files {
		env, want := captured(t, file)
		set(t, env)
		w, err := ReadWorld()
		require.NoError(t, err, file)
		require.Equal(t, want, short(w), file)
		seen[w.Launcher] = true
	}
	for _, l := range Launchers() {
		require.True(t, seen[l.Name], "no environment of %s in testdata", l.Name)
	}
}

// Ranks of one start have the same job and place, those of another start others.
func TestStartsOfAJobDiffer(t *testing.T) {
	for file, changes := range map[string][]string{
		"slurm":    {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"},
		"openmpi":  {"PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"},
		"torchrun": {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"},
	} {
		env, _ := captured(t, "testdata/launchers/"+file+".txt")
		set(t, env)
		one, err := ReadWorld()
		require.NoError(t, err)
		require.NotEmpty(t, one.Job)
		for _, name := range changes {
			t.Setenv(name, "77")
			other, err := ReadWorld()
			require.NoError(t, err)
			require.NotEqual(t, one.Job, other.Job, name)
			require.NotEqual(t, one.Addr, other.Addr, name)
			t.Setenv(name, env[name])
		}
	}
	// Agents of several hosts count restarts each for itself.
	env, _ := captured(t, "testdata/launchers/torchrun-in-slurm.txt")
	set(t, env)
	one, err := ReadWorld()
	require.NoError(t, err)
	t.Setenv("TORCHELASTIC_RESTART_COUNT", "1")
	other, err := ReadWorld()
	require.NoError(t, err)
	require.Equal(t, one, other)
}

func TestLaunchersThatCannotBeRight(t *testing.T) {
	slurm, _ := captured(t, "testdata/launchers/slurm-2-nodes.txt") // rank 2 of 3
	with := func(of map[string]string, more ...string) map[string]string {
		env := map[string]string{}
		for name, value := range of {
			env[name] = value
		}
		for i := 0; i < len(more); i += 2 {
			env[more[i]] = more[i+1]
		}
		return env
	}
	for _, c := range []struct {
		env  map[string]string
		want string
	}{
		// Two that disagree.
		{with(slurm, "RANK", "0", "WORLD_SIZE", "1"), "RANK and WORLD_SIZE say rank 0 of 1, SLURM_PROCID and SLURM_STEP_NUM_TASKS say rank 2 of 3: unset the variables of one, or set SWITCHYARD_LAUNCHER to torchrun or slurm"},
		{with(slurm, "RANK", "0", "WORLD_SIZE", "3"), "RANK and WORLD_SIZE say rank 0 of 3, SLURM_PROCID and SLURM_STEP_NUM_TASKS say rank 2 of 3"},
		{with(slurm, "SWITCHYARD_RANK", "1", "SWITCHYARD_WORLD_SIZE", "3"), "SWITCHYARD_RANK and SWITCHYARD_WORLD_SIZE say rank 1 of 3, SLURM_PROCID"},
		{with(slurm, "JAX_PROCESS_ID", "1", "JAX_NUM_PROCESSES", "3"), "SLURM_PROCID and SLURM_STEP_NUM_TASKS say rank 2 of 3, JAX_PROCESS_ID and JAX_NUM_PROCESSES say rank 1 of 3"},
		{with(nil, "RANK", "0", "WORLD_SIZE", "2", "OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "2"), "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE say rank 1 of 2"},
		// Half of one.
		{with(nil, "SWITCHYARD_RANK", "1"), "SWITCHYARD_RANK is 1 but SWITCHYARD_WORLD_SIZE is not set: set both or neither"},
		{with(nil, "SWITCHYARD_WORLD_SIZE", "2"), "SWITCHYARD_WORLD_SIZE is 2 but SWITCHYARD_RANK is not set: set both or neither"},
		{with(slurm, "SLURM_STEP_NUM_TASKS", ""), "SLURM_PROCID is 2 but SLURM_STEP_NUM_TASKS is not set"},
		{with(nil, "OMPI_COMM_WORLD_SIZE", "2"), "OMPI_COMM_WORLD_SIZE is 2 but OMPI_COMM_WORLD_RANK is not set"},
		{with(nil, "PMI_RANK", "0"), "PMI_RANK is 0 but PMI_SIZE is not set"},
		{with(nil, "LWS_GROUP_SIZE", "2", "LWS_LEADER_ADDRESS", "a"), "LWS_GROUP_SIZE is 2 but LWS_WORKER_INDEX is not set"},
		{with(nil, "JAX_NUM_PROCESSES", "2"), "JAX_NUM_PROCESSES is 2 but JAX_PROCESS_ID is not set"},
		{with(nil, "JOB_COMPLETION_INDEX", "1"), "JOB_COMPLETION_INDEX is 1 but nothing tells the number of ranks: set SWITCHYARD_WORLD_SIZE"},
		{with(nil, "PMIX_RANK", "1"), "PMIX_RANK is 1 but nothing tells the number of ranks: set SWITCHYARD_WORLD_SIZE"},
		// No place to meet.
		{with(nil, "JOB_COMPLETION_INDEX", "1", "SWITCHYARD_WORLD_SIZE", "2"), "JOB_COMPLETION_INDEX is 1 of 2 ranks, and nothing tells where rank 0 is: set SWITCHYARD_ADDR=HOST:PORT, the host name of the pod of index 0 and a port"},
		{with(nil, "JAX_PROCESS_ID", "1", "JAX_NUM_PROCESSES", "2"), "nothing tells where rank 0 is: set JAX_COORDINATOR_ADDRESS=HOST:PORT"},
		{with(nil, "OMPI_COMM_WORLD_RANK", "1", "OMPI_COMM_WORLD_SIZE", "2", "OMPI_COMM_WORLD_LOCAL_SIZE", "1", "PMIX_NAMESPACE", "a"), "nothing tells where rank 0 is: pass mpirun -x MASTER_ADDR=HOST, the host of rank 0"},
		// Values that cannot be.
		{with(slurm, "SLURM_STEP_TASKS_PER_NODE", "2(x"), `SLURM_STEP_TASKS_PER_NODE is "2(x": not a list as Slurm writes it`},
		{with(slurm, "SLURM_NODEID", "5"), `SLURM_STEP_TASKS_PER_NODE is "2,1": it has no node 5`},
		{with(slurm, "SLURM_STEP_NODELIST", "n[1-2"), `SLURM_STEP_NODELIST is "n[1-2": not a list as Slurm writes it`},
		{with(nil, "PMI_RANK", "0", "PMI_SIZE", "0"), "PMI_SIZE is 0, want 1 or more"},
		{with(nil, "JAX_PROCESS_ID", "0", "JAX_NUM_PROCESSES", "2", "JAX_COORDINATOR_ADDRESS", "a:b"), `JAX_COORDINATOR_ADDRESS is "a:b", want a host and a port`},
		{with(nil, "SWITCHYARD_LAUNCHER", "pbs"), `SWITCHYARD_LAUNCHER is "pbs", want one of switchyard, torchrun, slurm, openmpi, pmix, pmi, lws, job, jax, none`},
	} {
		set(t, c.env)
		_, err := ReadWorld()
		require.ErrorContains(t, err, c.want)
		require.NotContains(t, err.Error(), "\n")
	}
}

// SWITCHYARD_LAUNCHER decides between launchers that disagree.
func TestOneLauncherCounts(t *testing.T) {
	env, _ := captured(t, "testdata/launchers/slurm-2-nodes.txt")
	for only, want := range map[string]string{"slurm": "Slurm 2 of 3", "Torchrun": "torchrun 0 of 4", "none": " 0 of 1", "jax": " 0 of 1"} {
		set(t, env)
		t.Setenv("RANK", "0")
		t.Setenv("WORLD_SIZE", "4")
		t.Setenv("SWITCHYARD_LAUNCHER", only)
		w, err := ReadWorld()
		require.NoError(t, err)
		require.Equal(t, want, fmt.Sprintf("%s %d of %d", w.Launcher, w.Rank, w.Size))
	}
}

func TestSlurmLists(t *testing.T) {
	for list, want := range map[string]string{"a": "a", "a,b": "a", "n[1-2]": "n1", "node[007-9,12],b": "node007", "a,n[1-2]": "a", "r[1,3]-x,b": "r1-x"} {
		host, err := firstHost(list)
		require.NoError(t, err)
		require.Equal(t, want, host, list)
	}
	for _, list := range []string{"n[", "n[]", "r[1-2]n[3-4]"} {
		_, err := firstHost(list)
		require.ErrorIs(t, err, errList, list)
	}
	for node, want := range []int{4, 4, 3, 2} {
		tasks, err := tasksOn("4(x2),3,2", node)
		require.NoError(t, err)
		require.Equal(t, want, tasks)
	}
}

// The process that started the ranks is found through programs between, and is not the same for two starts.
func TestStarterIsFoundThroughWrappers(t *testing.T) {
	if os.Getenv("PMI_RANK") != "" && os.Getenv("SWITCHYARD_LAUNCHER") == "pmi" {
		fmt.Println("starter", starter("PMI_RANK"))
		os.Exit(0)
	}
	me, err := os.Executable()
	require.NoError(t, err)
	start := func(script string) string {
		cmd := exec.Command("sh", "-c", script, me)
		cmd.Env = append(os.Environ(), "SWITCHYARD_LAUNCHER=pmi")
		out, err := cmd.Output()
		require.NoError(t, err)
		require.Regexp(t, `^(starter \d+ \d+\n)+$`, string(out))
		return string(out)
	}
	two := strings.SplitAfter(start(`PMI_RANK=0 $0 -test.run=WrappersX?$; PMI_RANK=1 sh -c "$0 -test.run=Wrappers; true"`), "\n")
	require.Equal(t, two[0], two[1])
	require.NotEqual(t, two[0], start(`PMI_RANK=0 $0 -test.run=Wrappers; true`))
}
