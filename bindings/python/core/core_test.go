package core

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"context"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
)

// words is memory for a queue's words.
func words() []byte { return shm.Bytes(make([]uint64, WordBytes/8)) }

// given is the memory that buf has told the address of.
var given struct {
	sync.Mutex
	memory [][]byte
}

// buf says where v is. An address alone keeps nothing alive, and a stack moves while calls that have returned still write: what is kept in given
// is on the heap and stays.
func buf[T shm.Number](v []T) Buffer {
	b := shm.Bytes(v)
	given.Lock()
	defer given.Unlock()
	given.memory = append(given.memory, b)
	return Buffer{shm.Addr(b), int64(len(b))}
}

// await waits for a ticket as callers do, in slices.
func await(c *Comm, t Ticket, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	for {
		done, value, err := c.Wait(t, 10*time.Millisecond)
		if done || err != nil {
			return value, err
		}
	}
}

// each runs f on the Comms of n ranks in this process.
func each(t *testing.T, n int, f func(c *Comm) error) {
	t.Helper()
	eachWith(t, n, Options{TimeoutSeconds: 10}, f)
}

func eachWith(t *testing.T, n int, o Options, f func(c *Comm) error) {
	t.Helper()
	groups, err := comm.Local(n)
	require.NoError(t, err)
	errs := make([]error, n)
	var wg, opened sync.WaitGroup
	opened.Add(n)
	for r, g := range groups {
		wg.Go(func() {
			c, err := open(o, words(), func(context.Context) (*comm.Group, error) { return g, nil })
			if err == nil {
				_, err = await(c, 1, nil)
			}
			opened.Done()
			opened.Wait() // a rank that ends at once may take along the opening of the others
			if err == nil {
				err = f(c)
			}
			errs[r] = err
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
}

// What is made or closed together waits no longer for a rank that does not come than exchanges do.
func TestF1_WhatIsMadeTogetherHasADeadline(t *testing.T) {
	t.Parallel() // it mostly waits
	for name, f := range map[string]func(c *Comm) (Ticket, error){
		"split":  func(c *Comm) (Ticket, error) { return c.Split(0, 0, words(), func(*Comm) uint64 { return 1 }) },
		"verify": (*Comm).Verify,
		"dispatcher": func(c *Comm) (Ticket, error) {
			return c.NewDispatcher(DispatcherOptions{Options: dispatch.Options{Experts: 2, TopK: 1, Hidden: 8}}, func(*Dispatcher) uint64 { return 1 })
		},
		"close": func(c *Comm) (Ticket, error) { return c.Close(false) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			over := make(chan struct{})
			eachWith(t, 2, Options{TimeoutSeconds: 2}, func(c *Comm) error {
				defer c.Abandon(0, false)
				if rank, _, err := c.Rank(); rank != 0 || err != nil {
					<-over // it lives, and does not come
					return err
				}
				defer close(over)
				began := time.Now()
				ticket, err := f(c)
				_, err = await(c, ticket, err)
				if code, about := Classify(err); code != Timeout || about != 1 || time.Since(began) > 30*time.Second {
					return fmt.Errorf("after %v: code %d, rank %d: %w", time.Since(began), code, about, err)
				}
				return nil
			})
		})
	}
}

func TestOperationsRunInOrderAndHaveTheirOwnErrors(t *testing.T) {
	each(t, 3, func(c *Comm) error {
		rank, size, err := c.Rank()
		if err != nil {
			return err
		}
		// Twenty operations at once, one of them wrong.
		var tickets []Ticket
		src, dst := make([][]int64, 20), make([][]int64, 20)
		for k := range src {
			src[k], dst[k] = make([]int64, size), make([]int64, size)
			for p := range src[k] {
				src[k][p] = int64(1000*k + 10*rank + p)
			}
			d := buf(dst[k])
			if k == 7 {
				d.Bytes -= 3
			}
			shape := Shape{ShapeHead: &ShapeHead{Row: 8, DstBytes: d.Bytes, SrcBytes: int64(8 * size)}}
			for range 2 * size { // splits of both sides
				shape.Ranks = append(shape.Ranks, 1)
			}
			ticket, err := c.AllToAll(0, d.Addr, buf(src[k]).Addr, shape)
			if err != nil {
				return err
			}
			tickets = append(tickets, ticket)
		}
		for k, ticket := range tickets {
			_, err := await(c, ticket, nil)
			if code, _ := Classify(err); k == 7 && code != Invalid || k != 7 && err != nil {
				return fmt.Errorf("operation %d: %w", k, err)
			}
			for p, v := range dst[k] {
				if want := int64(1000*k + 10*p + rank); k != 7 && v != want {
					return fmt.Errorf("operation %d got %d from %d, want %d", k, v, p, want)
				}
			}
		}
		if _, _, err := c.Wait(1000, 0); !errors.Is(err, ErrInvalid) {
			return fmt.Errorf("a ticket of nobody: %w", err)
		}
		ticket, err := c.Close(false)
		_, err = await(c, ticket, err)
		if _, late := c.Barrier(); !errors.Is(late, ErrClosed) {
			return fmt.Errorf("a barrier after the end: %w", late)
		}
		return err
	})
}

func TestF3_WhatOnlyGPUsHaveIsRefusedOnTheHost(t *testing.T) {
	each(t, 1, func(c *Comm) error {
		for name, call := range map[string]func() error{
			"a stream":      func() error { _, err := c.AllToAll(7, 0, 0, nothing(ShapeHead{})); return err },
			"live splits":   func() error { _, err := c.AllToAll(0, 0, 0, nothing(ShapeHead{Live: 8})); return err },
			"displacements": func() error { _, err := c.AllToAll(0, 0, 0, nothing(ShapeHead{Placed: 1})); return err },
			"limits":        func() error { _, err := c.AllToAll(0, 0, 0, nothing(ShapeHead{MaxSMs: 4})); return err },
			"alloc":         func() error { _, err := c.Alloc(7, 1, func(*Block) uint64 { return 1 }); return err },
		} {
			if err := call(); !errors.Is(err, ErrInvalid) {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		why, err := c.Explain(0, nothing(ShapeHead{}))
		if err != nil || why == "" {
			return fmt.Errorf("explain: %q, %w", why, err)
		}
		c.Abandon(time.Second, false)
		return nil
	})
}

func TestSymmetricBuffersAreFoundByAddress(t *testing.T) {
	handles := NewHandles()
	each(t, 2, func(c *Comm) error {
		var blocks []*Block
		for _, n := range []int64{1 << 20, 0, 512, 100 << 20} { // the last one makes the heap grow
			ticket, err := c.Alloc(0, n, func(b *Block) uint64 { return handles.Put(b) })
			id, err := await(c, ticket, err)
			if err != nil {
				return err
			}
			b, err := Get[*Block](handles, uint64(id))
			if err != nil {
				return err
			}
			blocks = append(blocks, b)
		}
		h, _, err := c.ready()
		if err != nil {
			return err
		}
		for _, b := range []*Block{blocks[0], blocks[2], blocks[3]} {
			v, err := c.view(Buffer{b.Addr() + 16, b.Len() - 16})
			if off, ok := v.Symmetric(h); err != nil || !ok || off != b.Offset()+16 {
				return fmt.Errorf("a view of a block of %d bytes: offset %d, %v, %w", b.Len(), off, ok, err)
			}
		}
		v, err := c.view(buf(make([]byte, 10)))
		if _, ok := v.Symmetric(h); err != nil || ok {
			return fmt.Errorf("Go memory: symmetric %v, %w", ok, err)
		}
		ticket, err := blocks[0].Free(0)
		if _, err := await(c, ticket, err); err != nil {
			return err
		}
		if _, err := blocks[0].Free(0); !errors.Is(err, memory.ErrFreed) {
			return fmt.Errorf("a second free: %w", err)
		}
		ticket, err = c.Verify()
		if _, err := await(c, ticket, err); err != nil {
			return err
		}
		ticket, err = c.Close(false)
		_, err = await(c, ticket, err)
		return err
	})
}

func TestWaitsEndWhenAPeerHasLeft(t *testing.T) {
	each(t, 3, func(c *Comm) error {
		rank, _, err := c.Rank()
		if err != nil {
			return err
		}
		if rank == 1 {
			c.Abandon(time.Second, false)
			return nil
		}
		ticket, err := c.Barrier()
		began := time.Now()
		_, err = await(c, ticket, err)
		code, about := Classify(err)
		c.Abandon(0, false)
		// Rank 0 or 2 notices first, and the other may hear of it from that one.
		if code != PeerLost || about != 1 || time.Since(began) > time.Minute {
			return fmt.Errorf("after %v: code %d, rank %d: %w", time.Since(began), code, about, err)
		}
		return nil
	})
}

func TestPanicsAreErrors(t *testing.T) {
	each(t, 1, func(c *Comm) error {
		ticket, err := c.do(func() (int64, error) { panic("oh") })
		_, err = await(c, ticket, err)
		if code, _ := Classify(err); code != Panic || !strings.Contains(err.Error(), "oh") {
			return fmt.Errorf("code %d: %w", code, err)
		}
		c.Abandon(time.Second, false)
		return nil
	})
}

func TestHandlesAreNeverUsedTwice(t *testing.T) {
	h := NewHandles()
	a := h.Put(1)
	h.Drop(a)
	b := h.Put("two")
	require.NotEqual(t, a, b)
	_, err := Get[int](h, a)
	require.ErrorIs(t, err, ErrInvalid)
	_, err = Get[int](h, b)
	require.ErrorIs(t, err, ErrInvalid)
	s, err := Get[string](h, b)
	require.NoError(t, err)
	require.Equal(t, "two", s)
	require.Equal(t, 1, h.Len())
}

// nothing is an exchange of nothing in a group of one rank.
func nothing(head ShapeHead) Shape {
	head.Row = 1
	return Shape{&head, make([]int64, head.Behind(1))}
}

// The structures that C callers fill are those of the header, field by field.
func TestTheHeaderDescribesTheStructures(t *testing.T) {
	header, err := os.ReadFile("../abi/switchyard.h")
	require.NoError(t, err)
	for name, v := range map[string]any{
		"buffer": Buffer{}, "shape_head": ShapeHead{}, "dispatch_call": DispatchCall{}, "combine_call": CombineCall{}, "backward_call": BackwardCall{},
	} {
		body := regexp.MustCompile(`(?s)struct switchyard_` + name + ` \{(.*?)\n\};`).FindSubmatch(header)
		require.NotNil(t, body, name)
		var want, got []string
		for _, line := range strings.Split(strings.TrimSpace(string(body[1])), ";") {
			fields := regexp.MustCompile(`\w+(\[\d\])?`).FindAllString(line, -1)
			kind := 1
			if len(fields) > 0 && fields[0] == "struct" {
				kind = 2
			}
			for _, f := range fields[min(kind, len(fields)):] {
				want = append(want, fmt.Sprint(f, " ", 8*kind))
			}
		}
		for _, f := range reflect.VisibleFields(reflect.TypeOf(v)) {
			size := f.Type.Size()
			if f.Type.Kind() == reflect.Array {
				f.Name, size = fmt.Sprintf("%s[%d]", f.Name, f.Type.Len()), f.Type.Elem().Size()
			}
			got = append(got, fmt.Sprint(f.Name, " ", size))
		}
		require.Equal(t, want, got, name)
	}
}

func TestErrorsAreClassified(t *testing.T) {
	for _, c := range []struct {
		err  error
		code Code
		rank int
	}{
		{nil, OK, -1},
		{errors.New("new"), Failed, -1},
		{&comm.PeerError{Rank: 3, Err: comm.ErrPeerLost}, PeerLost, 3},
		{fmt.Errorf("wrapped: %w", &comm.PeerError{Rank: 2, Err: comm.ErrTimeout}), Timeout, 2},
		{&comm.PeerError{Rank: 1, Err: fmt.Errorf("%w: rank 1 waits in dispatch", comm.ErrOutOfStep)}, OutOfStep, 1},
		{&kernels.CountMismatchError{}, Mismatch, -1},
		{&kernels.CallMismatchError{}, Mismatch, -1},
		{fmt.Errorf("wrapped: %w", &kernels.SplitsError{Rank: 5}), Invalid, 5},
		{&dispatch.OverflowError{}, Overflow, -1},
		{dispatch.ErrNoHandle, NoHandle, -1},
		{fmt.Errorf("wrapped: %w", &kernels.MaskedError{Rank: 4}), Masked, 4},
		{memory.ErrOutOfMemory, OutOfMemory, -1},
		{fmt.Errorf("no driver: %w", device.ErrUnavailable), Unsupported, -1},
		{&memory.DivergenceError{}, Diverged, -1},
	} {
		code, rank := Classify(c.err)
		require.Equal(t, c.code, code, "%v", c.err)
		require.Equal(t, c.rank, rank, "%v", c.err)
	}
}

// TestTheLibraryDoesNotImportNVML keeps go-nvml out of the shared library, which would not load with it.
func TestTheLibraryDoesNotImportNVML(t *testing.T) {
	list := exec.Command("go", "list", "-deps", "../abi")
	list.Env = append(os.Environ(), "CGO_ENABLED=1") // also where there is no C compiler
	out, err := list.Output()
	require.NoError(t, err)
	require.Contains(t, string(out), "bindings/python/core")
	require.NotContains(t, strings.ToLower(string(out)), "nvml")
}

// TestTheNoticeNamesWhatTheLibraryIsLinkedWith looks at every module in the shared library, and at Go itself: NOTICE, which the wheel
// carries, has the name and the licence of each.
func TestTheNoticeNamesWhatTheLibraryIsLinkedWith(t *testing.T) {
	notice, err := os.ReadFile("../../../NOTICE")
	require.NoError(t, err)
	words := func(text []byte) string { return strings.Join(strings.Fields(string(text)), " ") }
	list := exec.Command("go", "list", "-deps", "-f", "{{with .Module}}{{if not .Main}}{{.Path}} {{.Dir}}{{end}}{{end}}", "../abi")
	list.Env = append(os.Environ(), "CGO_ENABLED=1")
	out, err := list.Output()
	require.NoError(t, err)
	root, err := exec.Command("go", "env", "GOROOT").Output()
	require.NoError(t, err)
	modules := map[string]string{"The Go programming language": strings.TrimSpace(string(root))}
	for line := range strings.Lines(string(out)) {
		if path, dir, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			modules[path] = dir
		}
	}
	require.Greater(t, len(modules), 1)
	for name, dir := range modules {
		require.Contains(t, string(notice), "\n"+name)
		files, err := filepath.Glob(filepath.Join(dir, "LICENSE*"))
		require.NoError(t, err)
		if len(files) == 0 && name == "The Go programming language" {
			continue // a distribution that keeps it elsewhere
		}
		require.NotEmpty(t, files, dir)
		text, err := os.ReadFile(files[0])
		require.NoError(t, err)
		require.Contains(t, words(notice), words(text), "the licence of %s", name)
	}
}

func TestTheEnvironmentIsThatOfTheProcess(t *testing.T) {
	t.Setenv("SWITCHYARD_NVTX", "")
	_, err := (&Options{Environ: map[string]string{"SWITCHYARD_NVTX": "1", "NVTX_INJECTION64_PATH": "/nowhere"}}).config()
	require.NoError(t, err)
	require.Equal(t, "/nowhere", os.Getenv("NVTX_INJECTION64_PATH"))
	_, err = (&Options{Environ: map[string]string{"SWITCHYARD_NVTX": "yes"}}).config()
	require.ErrorContains(t, err, `SWITCHYARD_NVTX is "yes", want 0 or 1`)
	_, set := os.LookupEnv("NVTX_INJECTION64_PATH")
	require.False(t, set)
}

func TestF3_WithValidateARefusalIsEveryRanksError(t *testing.T) {
	eachWith(t, 3, Options{TimeoutSeconds: 10, Validate: true}, func(c *Comm) error {
		rank, _, err := c.Rank()
		if err != nil {
			return err
		}
		for _, code := range []Code{Invalid, Unsupported} {
			var ticket Ticket
			if rank == 1 {
				ticket, err = c.Refuse(Refusal(code, "no such splits"))
			} else {
				ticket, err = c.Barrier()
			}
			_, err = await(c, ticket, err)
			got, of := Classify(err)
			if got != code || !strings.Contains(err.Error(), "no such splits") || rank != 1 && of != 1 {
				return fmt.Errorf("code %d, rank %d: %w", got, of, err)
			}
		}
		ticket, err := c.Barrier() // which it has not broken
		_, err = await(c, ticket, err)
		return err
	})
}

// A rank whose call ends since another goes on without a third hears of that third one, which hangs.
func TestThoseWhoWaitHearWhoIsLeftOut(t *testing.T) {
	const hangs = 2
	each(t, 4, func(c *Comm) error {
		rank, _, err := c.Rank()
		if err != nil {
			return err
		}
		var leaveOut []int
		switch rank {
		case 0:
			leaveOut = []int{hangs}
		case hangs:
			<-c.group.Done()
		default:
			ticket, err := c.Barrier()
			_, err = await(c, ticket, err)
			if code, of := Classify(err); code != Aborted || of != hangs {
				return fmt.Errorf("rank %d: code %d, rank %d: %w", rank, code, of, err)
			}
		}
		var next *Comm
		ticket, err := c.Shrink(leaveOut, 0, words(), func(made *Comm) uint64 { next = made; return 1 })
		_, err = await(c, ticket, err)
		if rank == hangs {
			if code, of := Classify(err); code != PeerLost || of != hangs {
				return fmt.Errorf("code %d, rank %d: %w", code, of, err)
			}
		} else if err == nil {
			_, err = await(next, 1, nil)
			next.Abandon(time.Second, false)
			if err != nil {
				return err
			}
		} else {
			return err
		}
		c.Abandon(0, false)
		return nil
	})
}

// What ends the operations of a group leaves those that wait for each other able to go on: a rank that is lost, one that leaves in good
// order and one that is left out.
func TestThoseThatAreLeftGoOn(t *testing.T) {
	for name, end := range map[string]func(c *Comm){
		"lost":     func(c *Comm) { c.root.Kill() },
		"leaves":   func(c *Comm) { c.Abandon(time.Second, false) },
		"left out": func(*Comm) {},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, 4, func(c *Comm) error {
				rank, _, err := c.Rank()
				if err != nil {
					return err
				}
				var leaveOut []int
				switch {
				case rank == 1:
					end(c)
					if name != "left out" {
						return nil
					}
				case name == "left out":
					leaveOut = []int{1}
				default:
					ticket, err := c.Barrier()
					_, err = await(c, ticket, err)
					if code, of := Classify(err); code != PeerLost || of != 1 {
						return fmt.Errorf("code %d, rank %d: %w", code, of, err)
					}
				}
				var next *Comm
				ticket, err := c.Shrink(leaveOut, 0, words(), func(made *Comm) uint64 { next = made; return 1 })
				_, err = await(c, ticket, err)
				if rank == 1 {
					if code, of := Classify(err); code != PeerLost || of != 1 {
						return fmt.Errorf("code %d, rank %d: %w", code, of, err)
					}
					c.Abandon(0, false)
					return nil
				}
				if err != nil {
					return err
				}
				if _, err := await(next, 1, nil); err != nil {
					return err
				}
				x := make([]int64, 1000*next.Size()) // too large for a stack, which may move
				x[0] = int64(rank)
				ticket, err = next.AllReduce(0, buf(x), buf(x), kernels.Int64, kernels.Sum)
				if _, err = await(next, ticket, err); err != nil || x[0] != 0+2+3 || next.Size() != 3 {
					return fmt.Errorf("%d ranks have %d: %w", next.Size(), x[0], err)
				}
				ticket, err = c.Close(false)
				if _, err = await(c, ticket, err); err != nil {
					return err
				}
				ticket, err = next.Close(false)
				_, err = await(next, ticket, err)
				return err
			})
		})
	}
}
