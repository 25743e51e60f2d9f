package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/switchyard-moe/switchyard/device"
)

// document is what `perf all` writes: everything that a machine has, and what it lacks.
type document struct {
	Schema  int       `json:"schema"`
	Date    time.Time `json:"date"`
	Commit  string    `json:"commit"`
	Machine machine   `json:"machine"`
	Runs    []section `json:"runs"`
	Missing []lack    `json:"missing"`
}

type machine struct {
	System    string   `json:"system"`
	Processor string   `json:"processor"`
	Cores     int      `json:"cores"`
	GPUs      []string `json:"gpus"`
	// Load is that of the last minute, before the first run and after the last.
	Load [2]float64 `json:"load"`
}

// section is one command's rows, as it prints them with -json.
type section struct {
	Title   string           `json:"title"`
	Command []string         `json:"command"`
	Seconds float64          `json:"seconds"`
	Rows    []map[string]any `json:"rows"`
}

// lack is something that was not measured.
type lack struct {
	What string `json:"what"`
	Why  string `json:"why"`
}

// benchmark is a command of `perf all`: of this program, or of python.
type benchmark struct {
	title  string
	args   []string
	python bool
	driver string // a program of test/peers, which python runs in place of bench.py
	module string // what the driver imports
	peer   string // a command for -peer; without it Switchyard is measured alone
	needs  []string
}

// effort is how much a run measures.
type effort int

const (
	quick  effort = iota // a few calls, to see that all of it runs
	short                // fewer sizes and calls
	normal               // what the commands do by themselves
)

// shortTime is how long a short measurement takes at most.
const shortTime = 3 * time.Minute

// benchmarks are the runs on a machine with this number of GPUs.
func benchmarks(gpus int, e effort) []benchmark {
	sizes := [...]string{"8KiB,64KiB", "8KiB,64KiB,512KiB,8MiB", ""}[e]
	seconds := [...]string{"0.1", "0.5", "3"}[e]
	iters := [...]string{"20", "100", "0"}[e]
	ours := func(title string, args ...string) benchmark {
		if sizes != "" && args[0] != "dispatch" {
			args = append(args, "-sizes", sizes)
		}
		return benchmark{title: title, args: append(args, "-iters", iters)}
	}
	all := []benchmark{
		ours("All-to-all on the host, from Go", "alltoallv", "-procs"),
		ours("All-reduce on the host, from Go", "allreduce", "-procs"),
		ours("Reduce-scatter on the host, from Go", "allreduce", "-procs", "-collective", "reduce-scatter"),
		ours("All-gather on the host, from Go", "allreduce", "-procs", "-collective", "all-gather"),
		ours("Dispatch and combine on the host, from Go", "dispatch"),
		withPeer(ours("Messages on the host next to gloo, from Go", "p2p", "-procs"), "python3 test/peers/gloo_pingpong.py {sizes}", "python3"),
		withPeer(ours("Messages on the host next to Open MPI, from Go", "p2p", "-procs"),
			"mpirun --allow-run-as-root -n 2 --oversubscribe --bind-to none {mpi_pingpong} {sizes}", "mpicc", "mpirun"),
		{title: "All-to-all between two hosts, which are network namespaces, next to gloo", args: hostArgs(e), needs: []string{"ip", "unshare", "nsenter", "python3"}},
	}
	for _, op := range []string{"all_to_all_single", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"} {
		args := []string{"--op", op, "--seconds", seconds}
		switch e {
		case quick:
			args = append(args, "--sizes", "8K,64K", "--ranks", "2")
		case short:
			args = append(args, "--sizes", "8K,64K,512K,8M")
		}
		all = append(all, benchmark{title: op + " on the host next to gloo, from Python", python: true, args: args})
	}
	tokens := []string{"--op", "dispatch"}
	switch e {
	case quick:
		tokens = append(tokens, "--ranks", "2", "--tokens", "16", "--rounds", "3")
	case short:
		tokens = append(tokens, "--rounds", "5")
	}
	all = append(all, benchmark{title: "Dispatch and combine on the host next to torch by hand, from Python", python: true, args: tokens})
	if gpus == 0 {
		return all
	}
	n := strconv.Itoa(gpus)
	all = append(all,
		ours("All-to-all on GPUs, from Go", "alltoallv", "-device", "cuda", "-ranks", n),
		ours("All-reduce on GPUs, from Go", "allreduce", "-device", "cuda", "-ranks", n),
		benchmark{title: "Dispatch and combine on GPUs, from Go", args: []string{"dispatch", "-device", "cuda", "-ranks", n}},
		benchmark{title: "all_to_all_single on GPUs next to NCCL, from Python", python: true, args: []string{"--device", "cuda"}},
		benchmark{title: "Dispatch and combine on GPUs next to torch by hand, from Python", python: true, args: []string{"--op", "dispatch", "--device", "cuda"}},
	)
	if gpus > 1 {
		all = append(all,
			benchmark{title: "Exchanges next to matrix products, and next to NCCL's, from Python", python: true, args: []string{"--beside"}},
			benchmark{title: "Messages on GPUs next to NCCL, from Python", driver: "messages.py", module: "torch"},
			benchmark{title: "All-reduce on GPUs next to torch's symmetric memory, from Python", driver: "symmetric_memory.py", module: "torch"},
			benchmark{title: "Dispatch and combine on GPUs next to FlashInfer, from Python", driver: "moe.py", module: "flashinfer", args: []string{"flashinfer"}},
			benchmark{title: "Dispatch and combine on GPUs next to DeepEP, from Python", driver: "moe.py", module: "deep_ep", args: []string{"deep_ep"}},
		)
	}
	return all
}

func withPeer(b benchmark, command string, needs ...string) benchmark {
	b.peer, b.needs = command, needs
	return b
}

func hostArgs(e effort) []string {
	switch e {
	case quick:
		return []string{"hosts", "-per-host", "1", "-sizes", "4KiB", "-blocks", "3"}
	case short:
		return []string{"hosts", "-per-host", "2", "-sizes", "1KiB,64KiB,2MiB", "-blocks", "5"}
	}
	return []string{"hosts"}
}

// measureAll is `perf all`. A run that fails becomes an entry of document.Missing, and the others go on.
func measureAll(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet("perf all", flag.ContinueOnError)
	out := fs.String("o", "bench", "the folder for bench.json and bench.html")
	python := fs.String("python", "python3", "a Python that has switchyard, and torch for its peers")
	few := fs.Bool("quick", false, "a few short calls of two sizes, to see that all of it runs")
	long := fs.Bool("long", false, "all sizes, also without a GPU, where it is done after 3 minutes otherwise")
	only := fs.String("only", "", "the runs whose titles have this in them")
	from := fs.String("from", "", "measure nothing: make the page of this bench.json")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if fs.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	var d document
	if *from != "" {
		text, err := os.ReadFile(*from)
		if err == nil {
			err = json.Unmarshal(text, &d)
		}
		if err == nil && d.Schema != 1 {
			err = fmt.Errorf("schema %d, want 1", d.Schema)
		}
		if err != nil {
			return fmt.Errorf("-from %s: %w", *from, err)
		}
		return d.write(*out)
	}
	gpus := 0
	d = document{Schema: 1, Date: time.Now().UTC().Truncate(time.Second), Commit: commit(ctx)}
	d.Machine, gpus = thisMachine()
	if gpus == 0 {
		d.Missing = append(d.Missing, lack{"everything on GPUs", "this machine has no NVIDIA GPU with a driver"})
	} else if gpus == 1 {
		d.Missing = append(d.Missing, lack{"peers of several GPUs", "this machine has one"})
	}
	folder, err := os.MkdirTemp("", "switchyard-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	e := normal
	switch {
	case *few:
		e = quick
	case gpus == 0 && !*long:
		e = short
	}
	runs := slices.DeleteFunc(benchmarks(gpus, e), func(b benchmark) bool { return !strings.Contains(b.title, *only) })
	within := ctx
	if e == short {
		var done context.CancelFunc
		within, done = context.WithTimeout(ctx, shortTime)
		defer done()
	}
	d.measure(within, runs, *python, folder)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	d.Machine.Load[1] = load()
	return d.write(*out)
}

// measure adds what the runs tell, as far as ctx goes.
func (d *document) measure(ctx context.Context, runs []benchmark, python, folder string) {
	for _, b := range runs {
		fmt.Fprintln(os.Stderr, "perf:", b.title)
		s, err := b.run(ctx, python, folder)
		if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
			err = fmt.Errorf("not done after %v: use -long, or -only", shortTime)
		}
		if err != nil {
			d.Missing = append(d.Missing, lack{b.title, err.Error()})
			fmt.Fprintln(os.Stderr, "perf: not measured:", err)
			continue
		}
		d.Runs = append(d.Runs, *s)
	}
}

// run starts the benchmark and reads its rows.
func (b *benchmark) run(ctx context.Context, python, folder string) (*section, error) {
	for _, program := range b.needs {
		if _, err := exec.LookPath(program); err != nil {
			return nil, fmt.Errorf("%s is not installed", program)
		}
	}
	command, err := b.command(ctx, python, folder)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	// Its processes end together, or a peer would run on behind the next run.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 5 * time.Second
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	began := time.Now()
	if err := cmd.Run(); err != nil {
		return nil, errors.New(lastLine(stderr.String(), err))
	}
	command[0] = filepath.Base(command[0])
	s := &section{Title: b.title, Command: command, Seconds: time.Since(began).Seconds()}
	if s.Rows, err = rowsOf(&stdout); err == nil && len(s.Rows) == 0 {
		err = errors.New("the benchmark printed no row")
	}
	return s, err
}

func (b *benchmark) command(ctx context.Context, python, folder string) ([]string, error) {
	if b.python {
		return append([]string{python, filepath.Join("bindings", "python", "bench.py"), "--json"}, b.args...), nil
	}
	if b.driver != "" {
		if !installed(ctx, python, b.module) {
			return nil, fmt.Errorf("%s has no %s", python, b.module)
		}
		return slices.Concat([]string{python, filepath.Join("test", "peers", b.driver)}, b.args, []string{"--json"}), nil
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	command := append([]string{self}, b.args...)
	if b.args[0] == "hosts" {
		peer := ""
		if installed(ctx, python, "torch") {
			peer = python + " test/peers/gloo_alltoall.py {op}"
		}
		command = append(command, "-peer", peer)
	}
	if b.peer != "" {
		peer := b.peer
		switch {
		case strings.HasPrefix(peer, "python3 "):
			if !installed(ctx, python, "torch") {
				return nil, fmt.Errorf("%s has no torch", python)
			}
			peer = python + strings.TrimPrefix(peer, "python3") + " | grep -v Gloo"
		case strings.Contains(peer, "{mpi_pingpong}"):
			program := filepath.Join(folder, "mpi_pingpong")
			if text, err := exec.CommandContext(ctx, "mpicc", "-O2", "-o", program, "test/peers/mpi_pingpong.c").CombinedOutput(); err != nil {
				return nil, errors.New(lastLine(string(text), err))
			}
			peer = strings.ReplaceAll(peer, "{mpi_pingpong}", program)
		}
		sizes := "8B,1KiB,8KiB,64KiB,256KiB,1MiB,8MiB,64MiB"
		for i, a := range b.args {
			if a == "-sizes" {
				sizes = b.args[i+1]
			}
		}
		var numbers []string
		for s := range strings.SplitSeq(sizes, ",") {
			n, err := parseSize(s)
			if err != nil {
				return nil, err
			}
			numbers = append(numbers, strconv.FormatInt(n, 10))
		}
		command = append(command, "-sizes", sizes, "-peer", strings.ReplaceAll(peer, "{sizes}", strings.Join(numbers, " ")))
	}
	return append(command, "-json"), nil
}

// installed reports whether a Python can import a module.
func installed(ctx context.Context, python, module string) bool {
	return exec.CommandContext(ctx, python, "-c", "import "+module).Run() == nil
}

// rowsOf reads the lines that are JSON objects. Libraries may print lines of their own between them.
func rowsOf(r io.Reader) (rows []map[string]any, err error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if !bytes.HasPrefix(lines.Bytes(), []byte("{")) {
			continue
		}
		var row map[string]any
		if err := json.Unmarshal(lines.Bytes(), &row); err != nil {
			return nil, fmt.Errorf("the benchmark printed %q: %w", lines.Text(), err)
		}
		rows = append(rows, row)
	}
	return rows, lines.Err()
}

// lastLine is what a program has said at last, or its error.
func lastLine(text string, err error) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return cmp.Or(strings.TrimSpace(lines[len(lines)-1]), err.Error())
}

func thisMachine() (m machine, gpus int) {
	m = machine{System: runtime.GOOS + "/" + runtime.GOARCH, Processor: "unknown", Cores: runtime.NumCPU(), GPUs: []string{}}
	if text, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m.System += ", " + strings.TrimSpace(string(text))
	}
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(text)) {
			if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
				m.Processor = strings.TrimSpace(value)
				break
			}
		}
	}
	m.Load[0] = load()
	n, err := device.CUDACount()
	for i := range n {
		if err != nil {
			break
		}
		d, err := device.CUDA(i)
		if err != nil {
			break
		}
		name, err := d.Name()
		if err != nil {
			name = d.String()
		}
		m.GPUs = append(m.GPUs, name)
		_ = d.Close()
	}
	return m, len(m.GPUs)
}

func commit(ctx context.Context) string {
	text, err := exec.CommandContext(ctx, "git", "describe", "--always", "--dirty").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(text))
}

// write makes the files.
func (d *document) write(folder string) error {
	text, err := json.MarshalIndent(d, "", " ")
	if err != nil {
		return err
	}
	page, err := d.page()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(folder, 0o777); err != nil {
		return err
	}
	for name, content := range map[string][]byte{"bench.json": append(text, '\n'), "bench.html": page} {
		if err := os.WriteFile(filepath.Join(folder, name), content, 0o666); err != nil {
			return err
		}
	}
	fmt.Printf("%d runs in %s; %d things were not measured\n", len(d.Runs), filepath.Join(folder, "bench.html"), len(d.Missing))
	for _, l := range d.Missing {
		fmt.Printf("  not measured: %s: %s\n", l.What, l.Why)
	}
	return nil
}
