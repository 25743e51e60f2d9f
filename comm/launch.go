package comm

import (
	"context"
	"fmt"
	"log/slog"
	"os"

	"github.com/switchyard-moe/switchyard/internal/env"
)

// FromEnv returns the configuration that the environment describes. It asks
// these launchers in turn: Switchyard's own (switchyard run), torchrun, Slurm,
// Open MPI and PRRTE, PMIx, PMI (MPICH, Intel MPI, Cray), LeaderWorkerSet,
// indexed Jobs, JAX. The page docs/launchers.md has the variables of each. An
// environment of none gives a group of one.
//
// A launcher that says half of what it should is an error. So are two that
// disagree, unless one has started this process in a task of the other, as
// torchrun does in a task of srun. SWITCHYARD_LAUNCHER names the one that counts.
// [Config.Launcher] tells which it was.
//
// Ranks of one host meet at a name that is made of the user and the job, so no
// port is needed and jobs do not meet. Ranks of several hosts, or with
// SWITCHYARD_PORT, meet at a port of rank 0's host. SWITCHYARD_ADDR has them
// meet where it says, and SWITCHYARD_SOCKETS in a folder ([Config.Sockets]).
func FromEnv() (Config, error) {
	fail := func(err error) (Config, error) { return Config{}, fmt.Errorf("comm: environment: %w", err) }
	w, err := env.ReadWorld()
	if err != nil {
		return fail(err)
	}
	s, err := env.ReadSettings()
	if err != nil {
		return fail(err)
	}
	log, err := env.Logger(os.Stderr)
	if err != nil {
		return fail(err)
	}
	if _, err := env.Profiler(); err != nil {
		return fail(err)
	}
	if log != nil && w.Launcher != "" && log.Enabled(context.Background(), slog.LevelInfo) {
		log.Info("launched", "by", w.Launcher, "rank", w.Rank, "size", w.Size, "local_rank", w.LocalRank, "local_size", w.LocalSize,
			"addr", placeName(w.Addr))
	}
	return Config{
		Rank:        w.Rank,
		Size:        w.Size,
		LocalRank:   w.LocalRank,
		LocalSize:   w.LocalSize,
		Addr:        w.Addr,
		Sockets:     s.Sockets,
		Job:         w.Job,
		Launcher:    w.Launcher,
		Secret:      s.Secret,
		JoinTimeout: s.JoinTimeout,
		PeerTimeout: s.PeerTimeout,
		Majority:    s.Majority,
		Logger:      log,
	}, nil
}
