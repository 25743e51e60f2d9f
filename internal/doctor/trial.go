package doctor

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/loopback"
	"github.com/switchyard-moe/switchyard/memory"
)

const (
	trialRanks  = 2
	trialBytes  = 1 << 20 // for each rank
	trialCalls  = 20
	trialWithin = 20 * time.Second
)

// measured is what rank 0 of a trial prints.
type measured struct {
	Microseconds float64
	Devices      int
}

// Exchange has ranks, each a process of a command, exchange bytes on the host or on GPUs (cuda). The command, with host or cuda behind it, makes
// a [Trial].
func Exchange(command []string, where string) Finding {
	check := "exchange"
	out, err := start(append(slices.Clone(command), where))
	var got measured
	if err == nil {
		err = json.Unmarshal(out, &got)
	}
	if err != nil {
		return Finding{check, Problem, fmt.Sprintf("%d processes did not exchange bytes on %s: %v", trialRanks, where, err),
			"SWITCHYARD_DEBUG=info says what each rank does; docs/requirements.md says what a machine must have"}
	}
	on := "this host"
	if where == "cuda" {
		on = fmt.Sprintf("%d GPUs", got.Devices)
	}
	return Finding{check, Fine, fmt.Sprintf("%d processes exchanged %d KiB each in %.0f us on %s, every byte right", trialRanks, trialBytes>>10, got.Microseconds, on), ""}
}

// start runs a command as each of the ranks, and returns what they print. The first that fails ends the others, and the error has its words.
func start(command []string) ([]byte, error) {
	ctx, stop := context.WithTimeout(context.Background(), 2*trialWithin)
	defer stop()
	addr, secret := loopback.Addr(), rand.Text()
	type end struct {
		rank      int
		out, said bytes.Buffer
		err       error
	}
	ends := make(chan *end, trialRanks)
	for rank := range trialRanks {
		go func() {
			e := &end{rank: rank}
			c := exec.CommandContext(ctx, command[0], command[1:]...)
			c.Stdout, c.Stderr, c.WaitDelay = &e.out, &e.said, time.Second
			c.Env = os.Environ()
			c.Env = append(c.Env, "SWITCHYARD_ADDR="+addr, "SWITCHYARD_SECRET="+secret)
			for name, value := range map[string]int{"RANK": rank, "WORLD_SIZE": trialRanks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": trialRanks} {
				// What is left over of a launcher does not matter here: another check tells of it.
				c.Env = append(c.Env, fmt.Sprintf("SWITCHYARD_%s=%d", name, value), fmt.Sprintf("%s=%d", name, value))
			}
			e.err = c.Run()
			ends <- e
		}()
	}
	var out []byte
	var err error
	for range trialRanks {
		e := <-ends
		out = append(out, e.out.Bytes()...)
		if e.err != nil && err == nil {
			err = fmt.Errorf("rank %d: %w: %s", e.rank, e.err, strings.Join(strings.Fields(e.said.String()), " "))
			stop()
		}
	}
	return out, err
}

// Trial is one of the ranks that [Exchange] starts. Rank 0 gets a line to print.
func Trial(where string) (line []byte, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), trialWithin)
	defer cancel()
	got, err := exchange(ctx, where)
	if err != nil || got == nil {
		return nil, err
	}
	return json.Marshal(got)
}

// exchange joins the others and sends each as many bytes. Rank 0 gets the median time of a call.
func exchange(ctx context.Context, where string) (got *measured, err error) {
	cfg, err := comm.FromEnv()
	if err != nil {
		return nil, err
	}
	g, err := comm.Join(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	var d device.Device = device.Host()
	devices := 0
	switch where {
	case "host":
	case "cuda":
		count, err := device.CUDACount()
		if err != nil {
			return nil, err
		}
		gpu, err := device.CUDA(g.Rank() % count)
		if err != nil {
			return nil, err
		}
		defer gpu.Close()
		d, devices = gpu, min(count, g.Size())
	default:
		return nil, fmt.Errorf("doctor: -trial %s, want host or cuda", where)
	}
	heap, err := memory.NewHeap(ctx, g, d, memory.Options{SegmentBytes: 16 << 20})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, heap.Close(ctx)) }()
	x, err := alltoallv.New(ctx, heap, alltoallv.Options{Timeout: trialWithin / 2})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, x.Close(ctx)) }()
	times, err := calls(heap, x)
	if err != nil || g.Rank() != 0 {
		return nil, err
	}
	slices.Sort(times)
	return &measured{float64(times[len(times)/2].Nanoseconds()) / 1e3, devices}, nil
}

// calls makes exchanges and looks at every byte.
func calls(heap *memory.Heap, x *alltoallv.Exchanger) (times []time.Duration, err error) {
	g := heap.Group()
	s, err := heap.Device().NewStream()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	src, err := heap.Alloc(trialBytes)
	if err != nil {
		return nil, err
	}
	dst, err := heap.Alloc(trialBytes)
	if err != nil {
		return nil, err
	}
	part := trialBytes / g.Size()
	splits := &alltoallv.Splits{}
	for range g.Size() {
		splits.Send, splits.Recv = append(splits.Send, int64(part)), append(splits.Recv, int64(part))
	}
	for call := range trialCalls {
		sent, want := make([]byte, trialBytes), make([]byte, trialBytes)
		for i := range trialBytes {
			sent[i] = pattern(call, g.Rank(), i/part, i%part)
			want[i] = pattern(call, i/part, g.Rank(), i%part)
		}
		if err := memory.Copy(s, src.View(), memory.Host(sent)); err != nil {
			return nil, err
		}
		if err := s.Synchronize(); err != nil {
			return nil, err
		}
		began := time.Now()
		if err := x.Exchange(s, dst.View(), src.View(), splits); err != nil {
			return nil, err
		}
		if err := s.Synchronize(); err != nil {
			return nil, err
		}
		times = append(times, time.Since(began))
		came := make([]byte, trialBytes)
		if err := errors.Join(memory.Copy(s, memory.Host(came), dst.View()), s.Synchronize()); err != nil {
			return nil, err
		}
		if !bytes.Equal(came, want) {
			return nil, fmt.Errorf("doctor: exchange %d brought wrong bytes to rank %d", call, g.Rank())
		}
	}
	return times, errors.Join(src.Free(), dst.Free())
}

// pattern is byte i of what a rank sends to another.
func pattern(call, from, to, i int) byte { return byte(i*7 + from*31 + to*101 + call*13 + i>>8) }
