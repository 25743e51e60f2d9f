// Package env reads the environment, and says which variables there are. No other package of Switchyard reads it while a
// program runs: test/imports sees to that. Python's core only brings the environment up to date, which Go keeps a copy of.
//
// A variable that is set but empty counts as not set.
package env

import (
	"cmp"
	"fmt"
	"io"
	"log/slog"
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

	ownRank      = "SWITCHYARD_RANK"
	ownSize      = "SWITCHYARD_WORLD_SIZE"
	ownLocalRank = "SWITCHYARD_LOCAL_RANK"
	ownLocalSize = "SWITCHYARD_LOCAL_WORLD_SIZE"
	ownRunID     = "SWITCHYARD_RUN_ID"

	chosen      = "SWITCHYARD_LAUNCHER"
	addr        = "SWITCHYARD_ADDR"
	port        = "SWITCHYARD_PORT"
	secret      = "SWITCHYARD_SECRET"
	joinTimeout = "SWITCHYARD_JOIN_TIMEOUT"
	peerTimeout = "SWITCHYARD_PEER_TIMEOUT"
	majority    = "SWITCHYARD_MAJORITY"
	hostID      = "SWITCHYARD_HOSTID"
	sockets     = "SWITCHYARD_SOCKETS"
	debug       = "SWITCHYARD_DEBUG"
	nvtx        = "SWITCHYARD_NVTX"
	metrics     = "SWITCHYARD_METRICS"
	metricsHold = "SWITCHYARD_METRICS_HOLD"
	status      = "SWITCHYARD_STATUS"
	dump        = "SWITCHYARD_DUMP"
	cudaHeap    = "SWITCHYARD_CUDA_HEAP"
	olderCode   = "SWITCHYARD_OLDER_KERNELS"

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
	// Launcher names the launcher that sets it, where it is neither Switchyard's nor torchrun's.
	Launcher string
}

// Variables lists all variables that this package reads: first those in torchrun's words, which say who runs the ranks,
// then Switchyard's own, then those of other launchers.
func Variables() []Variable {
	all := known()
	listed := map[string]bool{}
	for _, v := range all {
		listed[v.Name] = true
	}
	for _, l := range Launchers() {
		for _, name := range l.Names() {
			if !listed[name] {
				listed[name] = true
				all = append(all, Variable{Name: name, Default: "not set", Meaning: l.meaning(name), Launcher: l.Name})
			}
		}
	}
	return all
}

func known() []Variable {
	return []Variable{
		{Name: rank, Default: "0, in a group of one", Meaning: "This rank's number. It needs WORLD_SIZE too."},
		{Name: worldSize, Default: "1", Meaning: "The number of ranks. It needs RANK too."},
		{Name: localRank, Default: "RANK", Meaning: "This rank's number on its host. Programs choose their GPU by it."},
		{Name: localWorldSize, Default: "WORLD_SIZE", Meaning: "The number of ranks on this host."},
		{Name: masterAddr, Default: "127.0.0.1", Meaning: "The host of rank 0."},
		{Name: masterPort, Default: "29500", Meaning: "A port on that host. torchrun's own store listens there, so ranks meet at a name that is made of it, without a port."},
		{Name: runID, Default: "none", Meaning: "torchrun's name of the job, which is part of that name: jobs one after the other do not meet each other."},
		{Name: restartCount, Default: "none", Meaning: "How often torchrun has restarted the job, which is part of that name too."},
		{Name: ownRank, Default: "0, in a group of one", Meaning: "This rank's number, asked before RANK. switchyard run sets it. It needs SWITCHYARD_WORLD_SIZE too."},
		{Name: ownSize, Default: "1", Meaning: "The number of ranks. It may be set alone where a launcher tells ranks their number only: PMIx and indexed Jobs."},
		{Name: ownLocalRank, Default: "SWITCHYARD_RANK", Meaning: "This rank's number on its host, where the launcher does not tell it."},
		{Name: ownLocalSize, Default: "SWITCHYARD_WORLD_SIZE", Meaning: "The number of ranks on this host, where the launcher does not tell it."},
		{Name: ownRunID, Default: "none", Meaning: "The name that switchyard run gives to this start of the ranks, so that others do not meet them."},
		{Name: chosen, Default: "all are asked", Meaning: "The one launcher whose variables count: " + ids() + "."},
		{Name: addr, Default: "as the launcher says", Meaning: "Where ranks meet: host:port, @name, file:///path, or what comm.NewID made."},
		{Name: port, Default: "none: a name", Meaning: "The port on which rank 0 listens while ranks join. Without it they meet at a name on their host, where no port is needed. Ranks of several hosts take MASTER_PORT + 1."},
		{Name: secret, Default: "none", Meaning: "The secret that ranks prove to know when they join. Without it everybody who reaches the port counts as a rank, and at the name every process of the same user."},
		{Name: joinTimeout, Default: "2m", Meaning: "How long a join may take, such as 90s."},
		{Name: peerTimeout, Default: "10s", Meaning: "How long a rank may be silent before it counts as lost, at least 100ms."},
		{Name: majority, Default: "0", Meaning: "1 has a group on several hosts that has lost ranks go on only with more than half of them, or with half and rank 0, so that of hosts which no longer reach each other one part at most goes on. The same on all ranks."},
		{Name: hostID, Default: "none", Meaning: "A name in front of what tells hosts apart, the boot of the machine and the network namespace: ranks with different names are on different hosts. Ranks of one host have the same."},
		{Name: sockets, Default: "none", Meaning: "A folder that all ranks of a host have mounted, for their sockets. Ranks that share it are on one host, also in pods of their own."},
		{Name: debug, Default: "silent", Meaning: "Logs of this level and above go to standard error: warn, info or trace. With info a rank that waits on the host says every 5 seconds for whom; trace adds a line a call."},
		{Name: metrics, Default: "none", Meaning: "Where metrics can be had: :9400 is a port on this host's loopback, plus the local rank; 0.0.0.0:9400 serves other hosts too; a path names a file for node_exporter."},
		{Name: metricsHold, Default: "15s, when it is closed", Meaning: "How long a group that has failed, and that no other goes on from, waits until the port of SWITCHYARD_METRICS has been scraped: when it is closed, or Python ends. Where this is set it holds back its error too, for programs that end on that without closing it. Nothing waits where nobody has scraped before."},
		{Name: status, Default: "1", Meaning: "0 closes the socket by which switchyard status and switchyard dump ask a process of the same user, and serves no metrics."},
		{Name: dump, Default: "none", Meaning: "A folder for dumps: when a group or a call fails, every process that learns of it writes the last calls of its ranks there, as JSON lines and for torch's analyzer of flight records."},
		{Name: nvtx, Default: "0", Meaning: "1 puts an NVTX range around every call, so that Nsight Systems shows it by name. Its payload is the bytes of the input."},
		{Name: injection, Default: "no profiler", Meaning: "The library of a profiler, which sets it itself. It is opened only with SWITCHYARD_NVTX=1."},
		{Name: cudaHeap, Default: "36M and 20M a rank", Meaning: "Python only: what a group's heap on a GPU has at first, such as 256M or 1G. The same on all ranks."},
		{Name: olderCode, Default: "0", Meaning: "1 loads the machine code for drivers older than 580 on newer ones too."},
		{Name: ncclNVLS, Default: "1", Meaning: "NCCL's variable. 0 keeps Switchyard from NVLink multicast too, also where an option asks for it."},
		{Name: nvshmemMulticast, Default: "0", Meaning: "NVSHMEM's variable. 1 does the same."},
		{Name: torchMulticast, Default: "0", Meaning: "torch's variable. 1 does the same."},
	}
}

// Value is what the variable is set to, empty where it is not.
func (v Variable) Value() string { return os.Getenv(v.Name) }

// Secret is what ranks must prove to know when they join, empty where nobody has said.
func Secret() string { return os.Getenv(secret) }

// Metrics says where metrics are to be had, empty where nowhere.
func Metrics() string { return strings.TrimSpace(os.Getenv(metrics)) }

// endHold is how long the end of a group that has failed waits for a scrape where nobody has said.
const endHold = 15 * time.Second

// MetricsHold is how long a group that has failed waits for a scrape at its end, and how long before it tells its error.
func MetricsHold() (end, failure time.Duration, err error) {
	failure, err = duration(metricsHold)
	return cmp.Or(failure, endHold), failure, err
}

// Status reports whether a process shows what its ranks do.
func Status() bool { return strings.TrimSpace(os.Getenv(status)) != "0" }

// DumpFolder is where a process dumps its last calls when a group fails, empty where nowhere.
func DumpFolder() string { return os.Getenv(dump) }

// HostID is the name that the environment gives to this host, empty where it gives none.
func HostID() string { return os.Getenv(hostID) }

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
	on, err := zeroOrOne(nvtx)
	if !on {
		return "", err
	}
	return os.Getenv(injection), nil
}

// OlderKernels reports whether the kernels for older drivers are wanted whatever the driver is.
func OlderKernels() (bool, error) { return zeroOrOne(olderCode) }

func zeroOrOne(name string) (bool, error) {
	switch v := strings.TrimSpace(os.Getenv(name)); v {
	case "", "0":
		return false, nil
	case "1":
		return true, nil
	default:
		return false, fmt.Errorf("%s is %q, want 0 or 1", name, v)
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
	if c, err := who(); err == nil && c.launcher != nil {
		l = l.With("world_rank", c.rank)
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
