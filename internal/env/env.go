// Package env reads the environment. No other package of Switchyard does.
//
// Who runs the ranks, in torchrun's words:
//
//	RANK              this rank's number
//	WORLD_SIZE        the number of ranks
//	LOCAL_RANK        this rank's number on its host; default RANK
//	LOCAL_WORLD_SIZE  the number of ranks on the host; default WORLD_SIZE
//	MASTER_ADDR       the host of rank 0; default 127.0.0.1
//	MASTER_PORT       a port there, used by torchrun's own store; default 29500
//
// Switchyard's own:
//
//	SWITCHYARD_PORT          the port on which ranks meet; default MASTER_PORT + 1
//	SWITCHYARD_SECRET        what ranks that join must prove to know
//	SWITCHYARD_JOIN_TIMEOUT  how long a join may take, such as 90s
//	SWITCHYARD_PEER_TIMEOUT  how long a rank may be silent before it counts as lost, such as 10s
//	SWITCHYARD_DEBUG         warn, info or trace: logs of that level and above go to standard error
//	SWITCHYARD_CUDA_HEAP     what the Python package's heap on a GPU has at first, such as 256M or 1G
//
// A variable that is set but empty counts as not set.
package env

import (
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

	port        = "SWITCHYARD_PORT"
	secret      = "SWITCHYARD_SECRET"
	joinTimeout = "SWITCHYARD_JOIN_TIMEOUT"
	peerTimeout = "SWITCHYARD_PEER_TIMEOUT"
	debug       = "SWITCHYARD_DEBUG"
	cudaHeap    = "SWITCHYARD_CUDA_HEAP"
)

// World is who runs the ranks and where they meet. Zero durations and a nil
// secret mean that the variable is not set.
type World struct {
	Rank, Size           int
	LocalRank, LocalSize int
	Addr                 string // host:port where ranks meet
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
	if s := os.Getenv(secret); s != "" {
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

// LevelTrace is the level of what SWITCHYARD_DEBUG=trace adds: a line an
// operation. It is below [slog.LevelDebug].
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
