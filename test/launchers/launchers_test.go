// Package launchers starts ranks by the launchers that are installed here. Those that are not are skipped, by name.
package launchers

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/env"
	"github.com/switchyard-moe/switchyard/internal/proctest"
)

func TestMain(m *testing.M) {
	proctest.Play(proctest.Parts{"rank": playRank})
	os.Exit(m.Run())
}

// playRank joins as the launcher says, and tells what it was told.
func playRank([]string) int {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cfg, err := comm.FromEnv()
	if err != nil {
		fmt.Println(err)
		return 1
	}
	cfg.JoinTimeout = time.Minute
	g, err := comm.Join(ctx, cfg)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer g.Close()
	all, err := g.AllGather(ctx, []byte{byte('a' + g.Rank())})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Printf("%s: rank %d of %d, %d of %d here, met %s\n", cfg.Launcher, g.Rank(), g.Size(), cfg.LocalRank, cfg.LocalSize, bytes.Join(all, nil))
	return 0
}

// launch runs a launcher's command, with this test's ranks behind it, and wants these lines in any order.
func launch(t *testing.T, environ []string, command []string, want ...string) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, command[0], append(command[1:], self)...)
	for _, name := range os.Environ() {
		word, _, _ := strings.Cut(name, "=")
		if !slices.ContainsFunc(env.Variables(), func(v env.Variable) bool { return v.Name == word }) {
			cmd.Env = append(cmd.Env, name)
		}
	}
	cmd.Env = append(append(cmd.Env, proctest.As("rank")), environ...)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s: %s", command, out)
	var lines []string
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, ": rank ") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	slices.Sort(lines)
	require.Equal(t, want, lines, string(out))
}

// need is the path of a program, without which the test is skipped.
func need(t *testing.T, program, of string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		path, err = exec.LookPath("/usr/sbin/" + program)
	}
	if err != nil {
		t.Skipf("%s is not installed, which %s brings", program, of)
	}
	return path
}

func TestOpenMPI(t *testing.T) {
	mpirun := need(t, "mpirun.openmpi", "Debian's openmpi-bin")
	root := []string{"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"}
	launch(t, root, []string{mpirun, "--oversubscribe", "-n", "3"},
		"Open MPI, PRRTE: rank 0 of 3, 0 of 3 here, met abc", "Open MPI, PRRTE: rank 1 of 3, 1 of 3 here, met abc", "Open MPI, PRRTE: rank 2 of 3, 2 of 3 here, met abc")
}

// Hydra names no jobs. Two at a time do not meet.
func TestMPICH(t *testing.T) {
	mpiexec := need(t, "mpiexec.hydra", "Debian's mpich")
	for i := range 2 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			launch(t, nil, []string{mpiexec, "-n", "2"},
				"PMI: MPICH, Intel MPI, Cray: rank 0 of 2, 0 of 2 here, met ab", "PMI: MPICH, Intel MPI, Cray: rank 1 of 2, 1 of 2 here, met ab")
		})
	}
}

func TestSlurm(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a cluster")
	}
	srun := need(t, "srun", "Debian's slurm-wlm")
	conf := "SLURM_CONF=" + cluster(t)
	launch(t, []string{conf}, []string{srun, "-n", "2"}, "Slurm: rank 0 of 2, 0 of 2 here, met ab", "Slurm: rank 1 of 2, 1 of 2 here, met ab")
	launch(t, []string{conf}, []string{srun, "--mpi=pmi2", "-n", "2"}, "Slurm: rank 0 of 2, 0 of 2 here, met ab", "Slurm: rank 1 of 2, 1 of 2 here, met ab")
	// MPICH's Hydra in an allocation starts its proxy by srun, and the ranks in its one task.
	if mpiexec, err := exec.LookPath("mpiexec.hydra"); err == nil {
		launch(t, []string{conf}, []string{need(t, "salloc", "Debian's slurm-client"), "-n", "2", mpiexec, "-n", "2"},
			"PMI: MPICH, Intel MPI, Cray: rank 0 of 2, 0 of 2 here, met ab", "PMI: MPICH, Intel MPI, Cray: rank 1 of 2, 1 of 2 here, met ab")
	}
}

// cluster starts a Slurm of one node until the test ends, and returns its configuration.
func cluster(t *testing.T) string {
	munged, ctld, slurmd := need(t, "munged", "Debian's munge"), need(t, "slurmctld", "Debian's slurmctld"), need(t, "slurmd", "Debian's slurmd")
	who, err := user.Current()
	require.NoError(t, err)
	name, err := os.Hostname()
	require.NoError(t, err)
	name, _, _ = strings.Cut(name, ".")
	dir, err := os.MkdirTemp("", "slurm") // a socket's path is short
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	for _, sub := range []string{"munge", "state", "spool"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, sub), 0o700))
	}
	require.NoError(t, os.Chmod(dir, 0o755))
	require.NoError(t, os.Chmod(filepath.Join(dir, "munge"), 0o711))
	in := func(names ...string) string { return filepath.Join(append([]string{dir}, names...)...) }
	require.NoError(t, os.WriteFile(in("munge", "key"), bytes.Repeat([]byte("not a secret"), 100), 0o400))
	var ports [2]int
	var held [2]net.Listener
	for i := range ports {
		held[i], err = net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		ports[i] = held[i].Addr().(*net.TCPAddr).Port
	}
	for _, l := range held {
		require.NoError(t, l.Close())
	}
	conf := in("slurm.conf")
	require.NoError(t, os.WriteFile(conf, fmt.Appendf(nil, `ClusterName=test
SlurmctldHost=%[1]s(127.0.0.1)
SlurmUser=%[2]s
SlurmdUser=%[2]s
AuthType=auth/munge
AuthInfo=socket=%[3]s/munge/socket
CredType=cred/munge
SlurmctldPort=%[4]d
SlurmdPort=%[5]d
StateSaveLocation=%[3]s/state
SlurmdSpoolDir=%[3]s/spool
SlurmctldPidFile=%[3]s/ctld.pid
SlurmdPidFile=%[3]s/d.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=%[1]s NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=p Nodes=ALL Default=YES
`, name, who.Username, dir, ports[0], ports[1]), 0o644))
	daemon := func(path string, args ...string) {
		cmd := exec.Command(path, args...)
		cmd.Env = append(os.Environ(), "SLURM_CONF="+conf)
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		require.NoError(t, cmd.Start())
		t.Cleanup(func() {
			_ = cmd.Process.Signal(syscall.SIGTERM)
			ended := time.AfterFunc(5*time.Second, func() { _ = cmd.Process.Kill() })
			_ = cmd.Wait()
			ended.Stop()
			if t.Failed() {
				t.Logf("%s: %s", path, out.String())
			}
		})
	}
	daemon(munged, "--foreground", "--force", "--socket="+in("munge", "socket"), "--key-file="+in("munge", "key"), "--pid-file="+in("munge", "pid"),
		"--log-file="+in("munge", "log"), "--seed-file="+in("munge", "seed"))
	require.Eventually(t, func() bool { _, err := os.Stat(in("munge", "socket")); return err == nil }, time.Minute, 10*time.Millisecond)
	daemon(ctld, "-D")
	daemon(slurmd, "-D")
	sinfo := need(t, "sinfo", "Debian's slurm-client")
	idle := regexp.MustCompile(`\bidle\n`)
	require.Eventually(t, func() bool {
		cmd := exec.Command(sinfo, "-h", "-o", "%t")
		cmd.Env = append(os.Environ(), "SLURM_CONF="+conf)
		out, err := cmd.Output()
		return err == nil && idle.Match(out)
	}, 2*time.Minute, 200*time.Millisecond, "the node does not become idle")
	return conf
}
