package core

import (
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/internal/env"
	"github.com/switchyard-moe/switchyard/kernels/plan"
)

// Options of a Comm and of a Listener. Zero values leave the environment's or the library's defaults.
type Options struct {
	// Rank, Size, LocalRank and LocalSize say who this rank is. With Env the launcher's variables do instead, and with Launched a process
	// that no launcher has started is an error.
	Rank, Size           int
	LocalRank, LocalSize int
	Env, Launched        bool
	// Late, Replaces and Replaceable are those of comm.Config.
	Late, Replaces, Replaceable bool
	// Addr is where the ranks meet, as in comm.Config. It is not used with a Listener. With Env it is that of the launcher, if empty.
	Addr   string
	Secret string
	Name   string
	// JoinSeconds, PeerSeconds and TimeoutSeconds bound the join, the silence of a peer and the waits of an operation.
	JoinSeconds, PeerSeconds, TimeoutSeconds float64
	// SegmentBytes is what each rank's heap has at first.
	SegmentBytes int64
	// Validate has the ranks compare every call before they make it; see alltoallv.Options and allreduce.Options.
	Validate bool
	// Plans and Algorithm are those of allreduce.Options. Exchanges are algorithms of exchanges, for the groups of one host that have as many
	// ranks; Algorithm may be the name of one.
	Plans     []PlanSource
	Exchanges []ExchangeSource
	Algorithm string
	inherited []*plan.Checked // of the Comm that this one comes from
	// Listener and Addrs, by rank, join ranks that have a store of their own to meet in.
	Listener uint64
	Addrs    []string
	// Environ is what the process's environment says by now. Go has its own, from when the process began.
	Environ map[string]string
}

// environment is held while the process's environment is being brought up to date and read.
var environment sync.Mutex

// refresh brings Go's environment up to date.
func refresh(environ map[string]string) error {
	if environ == nil {
		return nil
	}
	for _, v := range env.Variables() {
		name := v.Name
		value, set := environ[name]
		old, was := os.LookupEnv(name)
		var err error
		switch {
		case set && (!was || value != old):
			err = os.Setenv(name, value)
		case !set && was:
			err = os.Unsetenv(name)
		}
		if err != nil {
			return fmt.Errorf("core: environment: %s: %w", name, err)
		}
	}
	return nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// config is what the options mean to package comm. Where they say nothing, Switchyard's own variables do.
func (o *Options) config() (comm.Config, error) {
	environment.Lock()
	defer environment.Unlock()
	if err := refresh(o.Environ); err != nil {
		return comm.Config{}, err
	}
	log, err := env.Logger(os.Stderr)
	if err != nil {
		return comm.Config{}, badEnvironment(err)
	}
	if _, err := env.Profiler(); err != nil {
		return comm.Config{}, badEnvironment(err)
	}
	c := comm.Config{Rank: o.Rank, Size: o.Size, LocalRank: o.LocalRank, LocalSize: o.LocalSize, Addr: o.Addr, Logger: log}
	if o.Env {
		if c, err = comm.FromEnv(); err != nil {
			return comm.Config{}, fmt.Errorf("core: %w: %w", ErrInvalid, err)
		}
		if o.Launched && c.Launcher == "" {
			return comm.Config{}, fmt.Errorf("core: %w: no group: call switchyard.init(), start the ranks with torchrun, srun, mpirun or another "+
				"launcher, or initialise torch.distributed", ErrInvalid)
		}
	}
	if o.Env && o.Addr != "" {
		c.Addr = o.Addr
	}
	c.Late, c.Replaces, c.Replaceable = o.Late, o.Replaces, o.Replaceable
	settings, err := env.ReadSettings()
	if err != nil {
		return comm.Config{}, badEnvironment(err)
	}
	c.Secret, c.JoinTimeout, c.PeerTimeout = settings.Secret, settings.JoinTimeout, settings.PeerTimeout
	c.Sockets, c.Majority = settings.Sockets, settings.Majority
	if o.Secret != "" {
		c.Secret = []byte(o.Secret)
	}
	if o.JoinSeconds > 0 {
		c.JoinTimeout = seconds(o.JoinSeconds)
	}
	if o.PeerSeconds > 0 {
		c.PeerTimeout = seconds(o.PeerSeconds)
	}
	c.Name = o.Name
	return c, nil
}

// NewID makes an ID, see comm.NewID. A host that is not this one is the caller's mistake.
func NewID(host string) (string, error) {
	id, err := comm.NewID(host)
	if err != nil {
		return "", fmt.Errorf("core: %w: %w", ErrInvalid, err)
	}
	return string(id), nil
}

// Listen opens this rank's socket for callers with a store of their own.
func Listen(o Options) (*comm.Listener, error) {
	c, err := o.config()
	if err != nil {
		return nil, err
	}
	return comm.Listen(c)
}
