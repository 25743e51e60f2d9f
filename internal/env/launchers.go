package env

import (
	"os"
	"slices"
	"strings"
)

// Launcher is a program that starts the ranks of a job, and the variables by which it tells each who it is. The table of launchers is
// all that is known of them: ReadWorld reads by it, and the pages show it.
type Launcher struct {
	ID      string // what SWITCHYARD_LAUNCHER calls it
	Name    string
	Command string // starts 4 ranks of bin/worker

	// The variables. Of those with several names the first that is set counts.
	Rank, Size           string // without Size it does not tell the number of ranks
	LocalRank, LocalSize []string
	Host, Port           string   // of a store of rank 0's host; Host may have the port behind a colon
	Job                  []string // what tells one start of a job from all others
	HostJob              []string // what does so among the ranks of one host, and may differ between hosts
	Needs                []string // without these the others say nothing, as in a shell of an allocation
	More                 []string // what else is read

	// Marks are set by the launcher and by nobody's hand: the process was started by it, whatever other launchers say.
	Marks []string
	Level level
	// RankPerHost says that every rank has a host of its own, or a pod.
	RankPerHost bool
	// Cure says what to do where Size, or the place of rank 0, is not told.
	Cure string
}

// level orders launchers that start each other: one of a higher level runs in a task of one of a lower.
type level int

const (
	ofHosts level = iota
	ofTasks
	ofMPI
	ofSwitchyard
	ofTorch
)

// Launchers are in the order in which they are asked.
func Launchers() []Launcher {
	return []Launcher{
		{
			ID: "switchyard", Name: "Switchyard", Command: "bin/switchyard run -n 4 bin/worker",
			Rank: ownRank, Size: ownSize, LocalRank: []string{ownLocalRank}, LocalSize: []string{ownLocalSize},
			Host: masterAddr, Port: masterPort, Job: []string{ownRunID}, Marks: []string{ownRunID}, Level: ofSwitchyard,
		},
		{
			ID: "torchrun", Name: "torchrun", Command: "torchrun --nproc-per-node 4 --no-python bin/worker",
			Rank: rank, Size: worldSize, LocalRank: []string{localRank}, LocalSize: []string{localWorldSize},
			// Agents of several hosts count restarts for themselves.
			Host: masterAddr, Port: masterPort, HostJob: []string{restartCount}, Job: []string{runID}, Marks: []string{runID}, Level: ofTorch,
		},
		{
			ID: "slurm", Name: "Slurm", Command: "srun -n 4 bin/worker",
			Rank: "SLURM_PROCID", Size: "SLURM_STEP_NUM_TASKS", LocalRank: []string{"SLURM_LOCALID"},
			Job:   []string{"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"},
			Needs: []string{"SLURM_STEP_ID"}, More: []string{slurmNodes, slurmTasks, slurmNode}, Marks: []string{"SLURM_STEP_ID"}, Level: ofTasks,
		},
		{
			ID: "openmpi", Name: "Open MPI, PRRTE", Command: "mpirun -n 4 bin/worker",
			Rank: "OMPI_COMM_WORLD_RANK", Size: "OMPI_COMM_WORLD_SIZE",
			LocalRank: []string{"OMPI_COMM_WORLD_LOCAL_RANK"}, LocalSize: []string{"OMPI_COMM_WORLD_LOCAL_SIZE"},
			Job: []string{"PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"}, Marks: []string{"OMPI_COMM_WORLD_RANK"}, Level: ofMPI,
			Cure: "pass mpirun -x MASTER_ADDR=HOST, the host of rank 0",
		},
		{
			ID: "pmix", Name: "PMIx", Command: "prterun -n 4 -x SWITCHYARD_WORLD_SIZE=4 bin/worker",
			Rank: "PMIX_RANK", Job: []string{"PMIX_NAMESPACE"}, Level: ofMPI,
		},
		{
			ID: "pmi", Name: "PMI: MPICH, Intel MPI, Cray", Command: "mpiexec -n 4 bin/worker",
			Rank: "PMI_RANK", Size: "PMI_SIZE",
			LocalRank: []string{"MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"},
			LocalSize: []string{"MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"},
			Job:       []string{"PALS_APID", "PMI_JOBID"}, Marks: []string{"MPI_LOCALNRANKS", "PALS_APID"}, Level: ofMPI,
			Cure: "pass mpiexec -genv MASTER_ADDR HOST, the host of rank 0",
		},
		{
			ID: "lws", Name: "LeaderWorkerSet", Command: "kubectl apply -f workers.yaml",
			Rank: "LWS_WORKER_INDEX", Size: "LWS_GROUP_SIZE", Host: "LWS_LEADER_ADDRESS", Job: []string{"LWS_LEADER_ADDRESS"}, RankPerHost: true,
		},
		{
			ID: "job", Name: "indexed Job, JobSet", Command: "kubectl apply -f workers.yaml",
			Rank: "JOB_COMPLETION_INDEX", RankPerHost: true,
			Cure: "set SWITCHYARD_ADDR=HOST:PORT, the host name of the pod of index 0 and a port",
		},
		{
			ID: "jax", Name: "JAX", Command: "JAX_COORDINATOR_ADDRESS=127.0.0.1:1234 JAX_NUM_PROCESSES=1 JAX_PROCESS_ID=0 bin/worker",
			Rank: "JAX_PROCESS_ID", Size: "JAX_NUM_PROCESSES", Host: "JAX_COORDINATOR_ADDRESS",
			Cure: "set JAX_COORDINATOR_ADDRESS=HOST:PORT",
		},
	}
}

// The variables of Slurm that say where tasks are.
const (
	slurmNodes = "SLURM_STEP_NODELIST"
	slurmTasks = "SLURM_STEP_TASKS_PER_NODE"
	slurmNode  = "SLURM_NODEID"
)

// Names are the variables that a launcher sets, and that are read, each once.
func (l *Launcher) Names() []string {
	all := []string{l.Rank, l.Size}
	for _, more := range [][]string{l.LocalRank, l.LocalSize, {l.Host, l.Port}, l.Job, l.HostJob, l.Needs, l.More, l.Marks} {
		all = append(all, more...)
	}
	var names []string
	for _, name := range all {
		if name != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// meaning says what a variable of the launcher's tells.
func (l *Launcher) meaning(name string) string {
	whose := func(what string) string { return l.Name + ": " + what + "." }
	switch {
	case name == l.Rank:
		return whose("this rank's number")
	case name == l.Size:
		return whose("the number of ranks")
	case slices.Contains(l.LocalRank, name):
		return whose("this rank's number on its host")
	case slices.Contains(l.LocalSize, name):
		return whose("the number of ranks on this host")
	case name == l.Host:
		return whose("the host of rank 0")
	case name == slurmNodes:
		return whose("the hosts, of which the first has rank 0")
	case name == slurmTasks:
		return whose("the number of ranks on each host")
	case name == slurmNode:
		return whose("this host's place in the two lists")
	case slices.Contains(l.Job, name) || slices.Contains(l.HostJob, name):
		return whose("part of the job's name, so that ranks of another job, or of another start of this one, are refused")
	}
	return whose("it has started this process")
}

// anySet reports whether one of the variables is set.
func anySet(names []string) bool {
	return slices.ContainsFunc(names, func(name string) bool { return os.Getenv(name) != "" })
}

// first is the first of the variables that is set, or "".
func first(names []string) string {
	for _, name := range names {
		if os.Getenv(name) != "" {
			return name
		}
	}
	return ""
}

// ids lists what SWITCHYARD_LAUNCHER may be.
func ids() string {
	var all []string
	for _, l := range Launchers() {
		all = append(all, l.ID)
	}
	return strings.Join(append(all, noLauncher), ", ")
}
