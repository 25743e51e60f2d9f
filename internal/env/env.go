// Package env reads the environment, and says which variables there are. No other package of Switchyard reads it while a
// program runs: test/imports sees to that. Python's core only brings the environment up to date, which Go keeps a copy of.
//
// A variable that is set but empty counts as not set.
package env

import (
	"crypto/sha256"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

const (
	rank           = "RANK"
	worldSize      = "WORLD_SIZE"
	localRank      = "LOCAL_RANK"
	localWorldSize = "LOCAL_WORLD_SIZE"
	masterAddr     = "MASTER_ADDR"
	masterPort     = "MASTER_PORT"
	runID          = "TORCHELASTIC_RUN_ID"
	restartCount   = "TORCHELASTIC_RESTART_COUNT"

	port        = "SWITCHYARD_PORT"
	secret      = "SWITCHYARD_SECRET"
	joinTimeout = "SWITCHYARD_JOIN_TIMEOUT"
	peerTimeout = "SWITCHYARD_PEER_TIMEOUT"
	debug       = "SWITCHYARD_DEBUG"
	nvtx        = "SWITCHYARD_NVTX"
	cudaHeap    = "SWITCHYARD_CUDA_HEAP"

	injection = "NVTX_INJECTION64_PATH"

	ncclNVLS         = "NCCL_NVLS_ENABLE"
	nvshmemMulticast = "NVSHMEM_DISABLE_NVLS"
	torchMulticast   = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
)

// Variable describes one environment variable.
type Variable struct {
	Name    string
	Default string // what holds where it is not set
	Meaning string // one sentence
}

// Variables lists all variables that this package reads: first those in torchrun's words, which say who runs the ranks,
// then Switchyard's own.
func Variables() []Variable {
	return []Variable{
		{rank, "0, in a group of one", "This rank's number. It needs WORLD_SIZE too."},
		{worldSize, "1", "The number of ranks. It needs RANK too."},
		{localRank, "RANK", "This rank's number on its host. Programs choose their GPU by it."},
		{localWorldSize, "WORLD_SIZE", "The number of ranks on this host."},
		{masterAddr, "127.0.0.1", "The host of rank 0."},
		{masterPort, "29500", "A port on that host. torchrun's own store listens there, so ranks meet at a name that is made of it, without a port."},
		{runID, "none", "torchrun's name of the job, which is part of that name: jobs one after the other do not meet each other."},
		{restartCount, "none", "How often torchrun has restarted the job, which is part of that name too."},
		{port, "none: a name", "The port on which rank 0 listens while ranks join. Without it they meet at a name on their host, where no port is needed. Ranks of several hosts take MASTER_PORT + 1."},
		{secret, "none", "The secret that ranks prove to know when they join. Without it everybody who reaches the port counts as a rank, and at the name every process of the same user."},
		{joinTimeout, "2m", "How long a join may take, such as 90s."},
		{peerTimeout, "10s", "How long a rank may be silent before it counts as lost, at least 100ms."},
		{debug, "silent", "Logs of this level and above go to standard error: warn, info or trace. With info a rank that waits on the host says every 5 seconds for whom; trace adds a line a call."},
		{nvtx, "0", "1 puts an NVTX range around every call, so that Nsight Systems shows it by name."},
		{injection, "no profiler", "The library of a profiler, which sets it itself. It is opened only with SWITCHYARD_NVTX=1."},
		{cudaHeap, "36M and 20M a rank", "Python only: what a group's heap on a GPU has at first, such as 256M or 1G. The same on all ranks."},
		{ncclNVLS, "1", "NCCL's variable. 0 keeps Switchyard from NVLink multicast too, also where an option asks for it."},
		{nvshmemMulticast, "0", "NVSHMEM's variable. 1 does the same."},
		{torchMulticast, "0", "torch's variable. 1 does the same."},
	}
}

// Value is what the variable is set to, empty where it is not.
func (v Variable) Value() string { return os.Getenv(v.Name) }

// Secret is what ranks must prove to know when they join, empty where nobody has said.
func Secret() string { return os.Getenv(secret) }

// World is who runs the ranks and where they meet. Zero durations and a nil
// secret mean that the variable is not set.
type World struct {
	Rank, Size           int
	LocalRank, LocalSize int
	Addr                 string // where ranks meet: host:port, or @ and a name on this host
	Secret               []byte
	JoinTimeout          time.Duration
	PeerTimeout          time.Duration
}

// ReadWorld reads the variables about the ranks. Without RANK and WORLD_SIZE
// it is a world of one, without an address; one without the other is an error.
func ReadWorld() (World, error) {
	var w World
	var err error
	if w.JoinTimeout, err = duration(joinTimeout); err != nil {
		return World{}, err
	}
	if w.PeerTimeout, err = duration(peerTimeout); err != nil {
		return World{}, err
	}
	if s := Secret(); s != "" {
		w.Secret = []byte(s)
	}
	hasRank, hasSize := os.Getenv(rank) != "", os.Getenv(worldSize) != ""
	switch {
	case !hasRank && !hasSize:
		w.Size, w.LocalSize = 1, 1
		return w, nil
	case !hasRank:
		return World{}, fmt.Errorf("%s is %s but %s is not set", worldSize, os.Getenv(worldSize), rank)
	case !hasSize:
		return World{}, fmt.Errorf("%s is %s but %s is not set", rank, os.Getenv(rank), worldSize)
	}
	if w.Rank, err = integer(rank, 0); err != nil {
		return World{}, err
	}
	if w.Size, err = integer(worldSize, 1); err != nil {
		return World{}, err
	}
	if w.LocalSize, err = integer(localWorldSize, w.Size); err != nil {
		return World{}, err
	}
	if w.LocalRank, err = integer(localRank, w.Rank); err != nil {
		return World{}, err
	}
	host := os.Getenv(masterAddr)
	if host == "" {
		host = "127.0.0.1"
	}
	p, err := integer(masterPort, 29500)
	if err != nil {
		return World{}, err
	}
	if p < 1 || p > 65535 {
		return World{}, fmt.Errorf("%s is %d, not a port", masterPort, p)
	}
	if os.Getenv(port) == "" && w.LocalSize == w.Size {
		w.Addr = meetingName(host, p)
		return w, nil
	}
	if p++; p > 65535 {
		p -= 2
	}
	if p, err = integer(port, p); err != nil {
		return World{}, err
	}
	if p < 1 || p > 65535 {
		return World{}, fmt.Errorf("%s is %d, not a port", port, p)
	}
	w.Addr = net.JoinHostPort(host, strconv.Itoa(p))
	return w, nil
}

// meetingName is where the ranks of one host meet if nobody has chosen a port: a
// unix socket in the abstract namespace. The port behind MASTER_PORT may be a
// connection's by then. All that tells jobs apart is part of the name: the user,
// the store's address, torchrun's job, and how often that was restarted.
func meetingName(host string, port int) string {
	if host == "localhost" {
		host = "127.0.0.1"
	}
	job := sha256.Sum256(fmt.Appendf(nil, "%q %q %q", host, os.Getenv(runID), os.Getenv(restartCount)))
	return fmt.Sprintf("@switchyard-meet-%d-%d-%x", os.Geteuid(), port, job[:8])
}

// CUDAHeap is the size in bytes that SWITCHYARD_CUDA_HEAP asks for, 0 if it is
// not set. The units K, M and G are powers of 1024.
func CUDAHeap() (int64, error) {
	s := os.Getenv(cudaHeap)
	if s == "" {
		return 0, nil
	}
	digits, shift := strings.TrimSpace(s), 0
	for i, unit := range []string{"K", "M", "G"} {
		if d, ok := strings.CutSuffix(digits, unit); ok {
			digits, shift = d, 10*(i+1)
			break
		}
	}
	v, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || v <= 0 || v > 1<<50>>shift {
		return 0, fmt.Errorf("%s is %q, not a size such as 256M", cudaHeap, s)
	}
	return v << shift, nil
}

// Profiler is the library of the profiler that runs this process, to which SWITCHYARD_NVTX=1 has ranges told; empty where it
// is not asked for or no profiler runs.
func Profiler() (string, error) {
	switch v := strings.TrimSpace(os.Getenv(nvtx)); v {
	case "", "0":
		return "", nil
	case "1":
		return os.Getenv(injection), nil
	default:
		return "", fmt.Errorf("%s is %q, want 0 or 1", nvtx, v)
	}
}

// MulticastDisabledBy is the setting that forbids NVLink multicast, such as "NCCL_NVLS_ENABLE=0", or "". A user who switches it off for
// one library has a reason that holds for all.
func MulticastDisabledBy() string {
	if v := strings.TrimSpace(os.Getenv(ncclNVLS)); v == "0" {
		return ncclNVLS + "=" + v
	}
	for _, name := range []string{nvshmemMulticast, torchMulticast} {
		switch v := strings.ToLower(strings.TrimSpace(os.Getenv(name))); v {
		case "", "0", "false", "no", "off", "n", "f":
		default:
			return name + "=" + v
		}
	}
	return ""
}

// LevelTrace is the level of what SWITCHYARD_DEBUG=trace adds: a line for every
// exchange, reduction, dispatch and combine. It is below [slog.LevelDebug].
const LevelTrace = slog.Level(-8)

// Logger returns the logger that SWITCHYARD_DEBUG asks for, writing to w, or
// nil if it is not set.
func Logger(w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	switch v := strings.ToLower(os.Getenv(debug)); v {
	case "":
		return nil, nil
	case "warn":
		level = slog.LevelWarn
	case "info":
		level = slog.LevelInfo
	case "trace":
		level = LevelTrace
	default:
		return nil, fmt.Errorf("%s is %q, want warn, info or trace", debug, v)
	}
	h := slog.NewTextHandler(w, &slog.HandlerOptions{
		Level: level,
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if l, ok := a.Value.Any().(slog.Level); ok && a.Key == slog.LevelKey && l <= LevelTrace {
				return slog.String(a.Key, "TRACE")
			}
			return a
		},
	})
	l := slog.New(h).With("lib", "switchyard")
	if r := os.Getenv(rank); r != "" {
		l = l.With("world_rank", r)
	}
	return l, nil
}

func integer(name string, missing int) (int, error) {
	s := os.Getenv(name)
	if s == "" {
		return missing, nil
	}
	v, err := strconv.Atoi(strings.TrimSpace(s))
	if err != nil {
		return 0, fmt.Errorf("%s is %q, not a number", name, s)
	}
	return v, nil
}

func duration(name string) (time.Duration, error) {
	s := os.Getenv(name)
	if s == "" {
		return 0, nil
	}
	v, err := time.ParseDuration(strings.TrimSpace(s))
	if err != nil || v <= 0 {
		return 0, fmt.Errorf("%s is %q, not a duration such as 10s", name, s)
	}
	return v, nil
}
