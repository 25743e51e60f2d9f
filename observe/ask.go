package observe

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/switchyard-moe/switchyard"
)

// process is a process of this user that has a socket.
type process struct {
	pid int
	// state is what its ranks know. err says why it did not tell it; a process that is stopped has not answered in time.
	state State
	err   error
	// vitals are what the kernel tells of it, with the number 0 where it tells nothing.
	vitals Vitals
}

// lookFor is the least time between two looks at a process, from which its rates come.
const lookFor = 100 * time.Millisecond

// askWithin bounds the time that a process gets to answer.
const askWithin = 2 * time.Second

// processes asks these processes for their state, side by side. One that does not answer within 2 s has an error.
func processes(ctx context.Context, pids []int) []process {
	ps := make([]process, len(pids))
	var all sync.WaitGroup
	for i, pid := range pids {
		ps[i].pid = pid
		all.Go(func() {
			was, _ := look(procOf(pid)) // it may have ended
			from := time.Now()
			ps[i].err = Ask(ctx, pid, "/state", func(r io.Reader) error { return json.NewDecoder(r).Decode(&ps[i].state) })
			select {
			case <-ctx.Done():
			case <-time.After(lookFor - time.Since(from)):
			}
			now, _ := look(procOf(pid))
			if now.Pid == was.Pid && now.DiskReads > was.DiskReads {
				now.DiskReadsASecond = float64(now.DiskReads-was.DiskReads) / time.Since(from).Seconds()
			}
			if now.Pid == was.Pid && now.Delayed > was.Delayed { // a thread that has ended takes its time along
				now.CoreWaits = (now.Delayed - was.Delayed).Seconds() / time.Since(from).Seconds()
			}
			ps[i].vitals = now
		})
	}
	all.Wait()
	return ps
}

// ErrNobody is the error where no process of this user has ranks that answer.
var ErrNobody = errors.New("no process of this user with ranks answers on this host")

// Everybody is the state of all processes of this user, as one, or of the one with a number that is not 0, which alone is asked then. Those
// that do not answer are named in it.
func Everybody(ctx context.Context, pid int) (State, error) {
	pids, err := listening()
	if err != nil {
		return State{}, fmt.Errorf("observe: %w", err)
	}
	if pid != 0 {
		pids = slices.DeleteFunc(pids, func(p int) bool { return p != pid })
	}
	var states []State
	var silent []Silent
	var vitals []Vitals
	for _, p := range processes(ctx, pids) {
		if p.vitals.Pid != 0 {
			vitals = append(vitals, p.vitals)
		}
		switch {
		case p.err != nil:
			silent = append(silent, Silent{Pid: p.pid, Error: p.err.Error()})
		default:
			states = append(states, p.state)
		}
	}
	if len(states)+len(silent) == 0 {
		return State{}, fmt.Errorf("observe: %w", ErrNobody)
	}
	return Merge(append(states, State{Version: switchyard.Version, Silent: silent, Processes: vitals})...), nil
}

// OfJob is the state of one job, of all where name is empty. name is the identity of the job or the name of its program, or the beginning of one.
// Where it begins several jobs the error names them; jobs of the same processes count as one, as before and after an Admit.
func (s State) OfJob(name string) (State, error) {
	if name == "" {
		return s, nil
	}
	jobs, several := s.named(name)
	if several {
		var names []string
		for _, job := range jobs {
			names = append(names, s.jobName(job))
		}
		return State{}, fmt.Errorf("observe: %q may be any of these jobs: %s", name, strings.Join(names, ", "))
	}
	if len(jobs) == 0 {
		return State{}, fmt.Errorf("observe: job %q: %w", name, ErrNobody)
	}
	s.Joins = nil // they have no job yet
	s.Ranks = slices.DeleteFunc(slices.Clone(s.Ranks), func(r Rank) bool { return !slices.Contains(jobs, r.Job) })
	s.Silent = slices.DeleteFunc(slices.Clone(s.Silent), func(p Silent) bool { return !slices.Contains(jobs, p.Job) })
	s.Processes = slices.DeleteFunc(slices.Clone(s.Processes), func(v Vitals) bool {
		return !slices.ContainsFunc(s.Ranks, func(r Rank) bool { return r.Pid == v.Pid }) && !slices.ContainsFunc(s.Silent, func(p Silent) bool { return p.Pid == v.Pid })
	})
	return Merge(s), nil
}

// named are the jobs that have this name or identity, or where none has, those of which one begins so. several says that they have no process in
// common.
func (s State) named(name string) (jobs []string, several bool) {
	programs, pids := map[string]string{}, map[string][]int{}
	for _, r := range s.Ranks {
		programs[r.Job] = cmp.Or(programs[r.Job], r.Program)
		pids[r.Job] = append(pids[r.Job], r.Pid)
	}
	for _, p := range s.Silent {
		if p.Job != "" {
			programs[p.Job] = cmp.Or(programs[p.Job], "")
			pids[p.Job] = append(pids[p.Job], p.Pid)
		}
	}
	for _, fits := range []func(word string) bool{
		func(word string) bool { return word == name },
		func(word string) bool { return strings.HasPrefix(word, name) },
	} {
		for _, job := range slices.Sorted(maps.Keys(programs)) {
			if fits(job) || fits(programs[job]) {
				shared := slices.ContainsFunc(jobs, func(other string) bool {
					return slices.ContainsFunc(pids[job], func(pid int) bool { return slices.Contains(pids[other], pid) })
				})
				several = several || len(jobs) > 0 && !shared
				jobs = append(jobs, job)
			}
		}
		if len(jobs) > 0 {
			return jobs, several
		}
	}
	return nil, false
}

// Calls asks the processes of a state for the last calls of their ranks, and returns those of the ranks that the state has. An error of some
// processes comes with the calls of the others.
func (s State) Calls(ctx context.Context) (calls []Call, err error) {
	asked := map[int]bool{}
	for _, r := range s.Ranks {
		if asked[r.Pid] {
			continue
		}
		asked[r.Pid] = true
		err = errors.Join(err, Ask(ctx, r.Pid, "/dump", func(body io.Reader) error {
			d := json.NewDecoder(body)
			var state json.RawMessage // of this process alone
			if err := d.Decode(&state); err != nil {
				return err
			}
			for {
				var c Call
				if err := d.Decode(&c); err == io.EOF {
					return nil
				} else if err != nil {
					return err
				}
				if slices.ContainsFunc(s.Ranks, func(r Rank) bool { return r.Job == c.Job }) {
					calls = append(calls, c)
				}
			}
		}))
	}
	return calls, err
}

// Ask gets a path of a process's [Handler] by its socket.
func Ask(ctx context.Context, pid int, path string, read func(io.Reader) error) error {
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socketPrefix(os.Geteuid())+strconv.Itoa(pid))
	}}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://switchyard"+path, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("observe: process %d: %w", pid, err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("observe: process %d: %s", pid, resp.Status)
	}
	if err := read(resp.Body); err != nil {
		return fmt.Errorf("observe: process %d: %w", pid, err)
	}
	return nil
}

// listening are the processes of this user whose sockets are in the kernel's list.
func listening() (pids []int, err error) {
	f, err := os.Open("/proc/net/unix")
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	prefix := socketPrefix(os.Geteuid())
	for lines := bufio.NewScanner(f); lines.Scan(); {
		words := strings.Fields(lines.Text())
		if number, ok := strings.CutPrefix(words[len(words)-1], prefix); ok {
			if pid, err := strconv.Atoi(number); err == nil && !slices.Contains(pids, pid) {
				pids = append(pids, pid)
			}
		}
	}
	slices.SortFunc(pids, cmp.Compare[int])
	return pids, nil
}
