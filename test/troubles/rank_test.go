// Package troubles injects what goes wrong with jobs, and tests that switchyard status and top name the cause and the rank.
package troubles

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/switchyard-moe/switchyard/allreduce"
	"github.com/switchyard-moe/switchyard/alltoallv"
	"github.com/switchyard-moe/switchyard/comm"
	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/dispatch"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/memory"
	"github.com/switchyard-moe/switchyard/stack"
)

// The troubles that a rank makes itself.
const (
	late        = "late"        // it comes 40 ms late to every step
	calls       = "calls"       // it makes another call than the others
	kinds       = "kinds"       // it gathers where the others reduce, by one communicator
	splits      = "splits"      // it sends more than its peer expects
	skew        = "skew"        // all tokens choose its experts
	heap        = "heap"        // buffers take nearly all of the heap
	descriptors = "descriptors" // it has no descriptor left
	swap        = "swap"        // its memory is not there, again and again
	core        = "core"        // its threads have to share one core
	link        = "link"        // exchanges alone, of which some go over a slow link
	none        = "none"
)

const (
	experts = 8
	topK    = 2
	hidden  = 64
	tokens  = 64
	pair    = 8 << 10 // bytes of an exchange from a rank to a rank
	begins  = 20      // the step with which the trouble begins
	compute = 2 * time.Millisecond
)

// worker is a rank of a job: a step is an exchange, and a dispatch with its combine.
type worker struct {
	*stack.Stack
	trouble string
	culprit bool
	blame   int // the rank that is the culprit
	step    int
	paged   []byte
}

// endsVar has a rank end on its error at once, as programs do.
const endsVar = "TROUBLES_ENDS"

// play is a rank. Its arguments are the trouble and the rank that makes it.
func play(args []string) int {
	w := &worker{trouble: args[0]}
	if _, err := fmt.Sscan(args[1], &w.blame); err != nil {
		panic(err)
	}
	err := w.run(context.Background())
	fmt.Println("ended:", err)
	if os.Getenv(endsVar) != "" {
		return 1
	}
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n') // a job that goes on after its trouble is looked at then
	return 0
}

func (w *worker) run(ctx context.Context) error {
	conf, err := comm.FromEnv()
	if err != nil {
		return err
	}
	g, err := comm.Join(ctx, conf)
	if err != nil {
		return err
	}
	o := stack.Options{Exchanger: &alltoallv.Options{}}
	if w.trouble != link {
		o.Reducer, o.Dispatcher = &allreduce.Options{}, &dispatch.Options{Experts: experts, TopK: topK, Hidden: hidden, MaxTokens: tokens}
	}
	if w.Stack, err = stack.Open(ctx, g, device.Host(), o); err != nil {
		return err
	}
	w.culprit = g.Rank() == w.blame
	for ; ; w.step++ {
		if w.step == begins {
			if err := w.begin(); err != nil {
				return err
			}
			fmt.Println("begins in process", os.Getpid())
		}
		if err := w.exchange(); err != nil {
			return err
		}
		if w.Dispatcher != nil {
			if err := w.experts(); err != nil {
				return err
			}
		}
		time.Sleep(compute)
		if err := w.during(); err != nil {
			return err
		}
	}
}

// begin is what happens once.
func (w *worker) begin() error {
	switch {
	case w.trouble == heap: // on all ranks: they allocate together
		_, err := w.Heap.Alloc(w.Heap.Stats().LargestFree / 100 * 97)
		return err
	case w.trouble == kinds && w.culprit:
		return w.Reducer.AllGather(nil, memory.Wrap(make([]float32, 64*w.Group.Size())), memory.Wrap(make([]float32, 64)), kernels.Float32)
	case w.trouble == kinds:
		x := memory.Wrap(make([]float32, 64))
		return w.Reducer.AllReduce(nil, x, x, kernels.Float32, kernels.Sum)
	case !w.culprit:
		return nil
	case w.trouble == calls:
		x := memory.Wrap(make([]float32, 64))
		return w.Reducer.AllReduce(nil, x, x, kernels.Float32, kernels.Sum)
	case w.trouble == descriptors:
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 64, Max: 64}); err != nil {
			return err
		}
		for {
			if _, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0); err == unix.EMFILE {
				return nil
			} else if err != nil {
				return err
			}
		}
	case w.trouble == swap:
		return w.pageFile()
	case w.trouble == core:
		return shareOneCore()
	}
	return nil
}

// shareOneCore has all threads of this process run on its first core, and some of them keep it busy.
func shareOneCore() error {
	var may, first unix.CPUSet
	if err := unix.SchedGetaffinity(0, &may); err != nil {
		return err
	}
	for cpu := range 1024 {
		if may.IsSet(cpu) {
			first.Set(cpu)
			break
		}
	}
	runtime.GOMAXPROCS(4) // else Go runs no more threads than the process has cores
	for range 3 {
		go func() {
			for n := 0; ; n++ { // without end
			}
		}()
	}
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	for _, t := range threads { // later ones are made by these
		tid, err := strconv.Atoi(t.Name())
		if err != nil {
			return err
		}
		if err := unix.SchedSetaffinity(tid, &first); err != nil && err != unix.ESRCH {
			return err
		}
	}
	return nil
}

// during is what happens in every step of the culprit, once the trouble has begun.
func (w *worker) during() error {
	if w.step < begins || !w.culprit {
		return nil
	}
	switch w.trouble {
	case late:
		time.Sleep(40 * time.Millisecond)
	case swap:
		// The kernel takes the pages away, as it does where memory is short, and every one of them is read again.
		if err := unix.Madvise(w.paged, unix.MADV_PAGEOUT); err != nil {
			return err
		}
		sum := byte(0)
		for at := 0; at < len(w.paged); at += os.Getpagesize() {
			sum += w.paged[at]
		}
		if sum != 0 {
			return fmt.Errorf("the file's bytes sum to %d, want 0", sum)
		}
	}
	return nil
}

// pageFile maps a file whose pages the kernel can take away without a swap device.
func (w *worker) pageFile() error {
	f, err := os.Create(filepath.Join(os.Getenv("TROUBLES_FOLDER"), "paged"))
	if err != nil {
		return err
	}
	const size = 16 << 20
	_, err = f.Write(make([]byte, size))
	if err == nil {
		err = f.Sync() // a page that is not on the disk yet cannot be taken
	}
	if err == nil {
		w.paged, err = unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ, unix.MAP_PRIVATE)
	}
	if err == nil {
		err = unix.Madvise(w.paged, unix.MADV_RANDOM)
	}
	return err
}

func (w *worker) exchange() error {
	n, me := w.Group.Size(), w.Group.Rank()
	sp := &alltoallv.Splits{Send: make([]int64, n), Recv: make([]int64, n)}
	size := int64(pair)
	if w.trouble == link {
		size = 256 << 10
	}
	for p := range n {
		sp.Send[p], sp.Recv[p] = size, size
	}
	if w.trouble == splits && w.culprit && w.step == begins {
		sp.Send[(me+1)%n] += 8
	}
	return w.Exchanger.Exchange(nil, memory.Host(make([]byte, size*int64(n))), memory.Host(make([]byte, size*int64(n)+8)), sp)
}

func (w *worker) experts() error {
	x := memory.NewMatrix[float32](tokens, hidden)
	chosen, weights := memory.NewMatrix[int32](tokens, topK), memory.NewMatrix[float32](tokens, topK)
	per := experts / w.Group.Size()
	for t := range tokens {
		for k := range topK {
			chosen.Row(t)[k], weights.Row(t)[k] = int32((t+k)%experts), 1.0/topK
			if w.trouble == skew && w.step >= begins {
				chosen.Row(t)[k] = int32(w.blame*per + k)
			}
		}
	}
	h, err := w.Dispatcher.Dispatch(nil, dispatch.Tokens{X: x.View(), Experts: chosen.View(), Weights: weights.View()})
	if err != nil {
		return err
	}
	defer h.Release()
	rows, err := memory.MatrixOf[float32](h.Rows(), hidden)
	if err != nil {
		return err
	}
	return w.Dispatcher.Combine(nil, memory.NewMatrix[float32](tokens, hidden).View(), rows.View(), h, dispatch.CombineOptions{})
}
