package env

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Settings are Switchyard's own variables about joins, whoever starts the ranks. Zero durations and a nil secret mean that the
// variable is not set.
type Settings struct {
	Secret      []byte
	Sockets     string // the folder of sockets, "" without one
	JoinTimeout time.Duration
	PeerTimeout time.Duration
	Majority    bool
}

// ReadSettings reads them.
func ReadSettings() (Settings, error) {
	var s Settings
	var err error
	if s.JoinTimeout, err = duration(joinTimeout); err != nil {
		return Settings{}, err
	}
	if s.PeerTimeout, err = duration(peerTimeout); err != nil {
		return Settings{}, err
	}
	if s.Majority, err = zeroOrOne(majority); err != nil {
		return Settings{}, err
	}
	s.Sockets = os.Getenv(sockets)
	if text := Secret(); text != "" {
		s.Secret = []byte(text)
	}
	return s, nil
}

// World is who runs the ranks and where they meet.
type World struct {
	Launcher             string // its name, "" without one
	Rank, Size           int
	LocalRank, LocalSize int
	Addr                 string // where ranks meet: host:port, @ and a name on this host, file:///path, or an id
	Job                  string // the same for all ranks of one start of a job, and for no others; "" if the launcher does not tell
}

// ReadWorld asks the launchers of the table. Without one it is a world of one, without an address.
func ReadWorld() (World, error) {
	c, err := who()
	if err != nil {
		return World{}, err
	}
	if c.launcher == nil {
		return World{Size: 1, LocalSize: 1}, nil
	}
	l := c.launcher
	w := World{Launcher: l.Name, Rank: c.rank, Size: c.size}
	if err := w.local(l); err != nil {
		return World{}, err
	}
	w.Job = w.job(l)
	if w.Addr, err = w.place(l); err != nil {
		return World{}, err
	}
	return w, nil
}

const noLauncher = "none"

// claim is what one launcher says of this process.
type claim struct {
	launcher   *Launcher // nil: none has started it
	rank, size int
}

// who asks the launchers in turn. Those that disagree are an error, unless one has started this process in a task of the other.
func who() (claim, error) {
	only := strings.ToLower(strings.TrimSpace(os.Getenv(chosen)))
	if only == noLauncher {
		return claim{}, nil
	}
	var best, unsized claim
	found := false
	for _, l := range Launchers() {
		if only != "" && l.ID != only {
			continue
		}
		found = true
		c, err := l.claim()
		switch {
		case err != nil:
			return claim{}, err
		case c.launcher == nil:
		case c.size == 0:
			if unsized.launcher == nil {
				unsized = c
			}
		case best.launcher == nil, c.inside(best):
			best = c
		case best.rank == c.rank && best.size == c.size, best.inside(c):
		default:
			return claim{}, fmt.Errorf("%v, %v: unset the variables of one, or set %s to %s or %s", best, c, chosen, best.launcher.ID, c.launcher.ID)
		}
	}
	switch {
	case !found:
		return claim{}, fmt.Errorf("%s is %q, want one of %s", chosen, only, ids())
	case best.launcher != nil:
		return best, nil
	case unsized.launcher != nil:
		return unsized.sized()
	case os.Getenv(ownSize) != "":
		return claim{}, fmt.Errorf("%s is %s but %s is not set: set both or neither", ownSize, os.Getenv(ownSize), ownRank)
	}
	return claim{}, nil
}

func (c claim) String() string {
	return fmt.Sprintf("%s and %s say rank %d of %d", c.launcher.Rank, c.launcher.Size, c.rank, c.size)
}

// claim is what the launcher says, the zero claim where it says nothing.
func (l *Launcher) claim() (claim, error) {
	for _, name := range l.Needs {
		if os.Getenv(name) == "" {
			return claim{}, nil
		}
	}
	hasRank, hasSize := os.Getenv(l.Rank) != "", l.Size != "" && os.Getenv(l.Size) != ""
	switch {
	case !hasRank && !hasSize, !hasRank && l.Size == ownSize: // which may belong to a launcher that tells no size
		return claim{}, nil
	case !hasRank:
		return claim{}, fmt.Errorf("%s is %s but %s is not set: set both or neither", l.Size, os.Getenv(l.Size), l.Rank)
	case !hasSize && l.Size != "":
		return claim{}, fmt.Errorf("%s is %s but %s is not set: set both or neither", l.Rank, os.Getenv(l.Rank), l.Size)
	}
	c := claim{launcher: l}
	var err error
	if c.rank, err = integer(l.Rank, 0); err != nil || !hasSize {
		return c, err
	}
	if c.size, err = integer(l.Size, 1); err == nil && c.size < 1 {
		err = fmt.Errorf("%s is %d, want 1 or more", l.Size, c.size)
	}
	return c, err
}

// sized is the claim of a launcher that does not tell the number of ranks, which SWITCHYARD_WORLD_SIZE does.
func (c claim) sized() (claim, error) {
	if os.Getenv(ownSize) == "" {
		return claim{}, fmt.Errorf("%s is %d but nothing tells the number of ranks: set %s", c.launcher.Rank, c.rank, ownSize)
	}
	var err error
	c.size, err = integer(ownSize, 1)
	return c, err
}

// inside reports whether c's launcher has started this process in a task of outer's, so that c's word counts. Such a launcher marks the
// process as its own. Variables that a script or another program set in its place count where they tell of more ranks than outer has
// tasks: several in each.
func (c claim) inside(outer claim) bool {
	if c.launcher.Level <= outer.launcher.Level || !anySet(outer.launcher.Marks) && !outer.launcher.RankPerHost {
		return false
	}
	return anySet(c.launcher.Marks) || c.size > outer.size
}

// local finds this rank's place on its host.
func (w *World) local(l *Launcher) error {
	size, sizes := w.Size, append(slices.Clone(l.LocalSize), ownLocalSize)
	place, places := w.Rank, append(slices.Clone(l.LocalRank), ownLocalRank)
	if l.RankPerHost {
		size, place = 1, 0
	}
	var err error
	if tasks := os.Getenv(slurmTasks); l.Level == ofTasks && tasks != "" {
		node, err := integer(slurmNode, 0)
		if err != nil {
			return err
		}
		if size, err = tasksOn(tasks, node); err != nil {
			return fmt.Errorf("%s is %q: %w", slurmTasks, tasks, err)
		}
		sizes = nil
	}
	if w.LocalSize, err = integer(first(sizes), size); err != nil {
		return err
	}
	w.LocalRank, err = integer(first(places), place)
	return err
}

// job is the name of this start of the job.
func (w *World) job(l *Launcher) string {
	here := w.LocalSize == w.Size
	names := slices.Clone(l.Job)
	if here {
		names = append(names, l.HostJob...)
	}
	var parts []string
	for _, name := range names {
		parts = append(parts, os.Getenv(name))
	}
	switch {
	case strings.Join(parts, "") != "":
		return fmt.Sprintf("%s %q", l.ID, parts)
	case here && l.Level == ofMPI: // a launcher without names for its jobs
		return fmt.Sprintf("%s %s", l.ID, starter(l.Rank))
	}
	return ""
}

// starter names the process that started the ranks: the nearest ancestor that does not have their variable.
func starter(variable string) string {
	for pid := os.Getppid(); ; {
		dir := filepath.Join("/proc", strconv.Itoa(pid))
		environ, err := os.ReadFile(filepath.Join(dir, "environ"))
		inherited := err == nil && strings.Contains("\x00"+string(environ), "\x00"+variable+"=")
		stat, err := os.ReadFile(filepath.Join(dir, "stat"))
		// Behind the name, which may hold anything, come the state, the parent, and as the 20th word the time of its start.
		words := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		if err != nil || len(words) < 20 {
			return strconv.Itoa(pid)
		}
		parent, err := strconv.Atoi(words[1])
		if !inherited || err != nil || parent <= 0 {
			return fmt.Sprintf("%d %s", pid, words[19])
		}
		pid = parent
	}
}

// place is where the ranks meet: where SWITCHYARD_ADDR says; at a name, if all are on this host and nobody chose a port; else on a
// port of rank 0's host.
func (w *World) place(l *Launcher) (string, error) {
	if at := os.Getenv(addr); at != "" {
		return at, nil
	}
	host, store, err := storeOf(l)
	if err != nil {
		return "", err
	}
	p, err := portOf(port, 0)
	if err != nil {
		return "", err
	}
	asked := p != 0
	folder := os.Getenv(sockets)
	here := w.LocalSize == w.Size && !l.RankPerHost
	if folder != "" && w.LocalSize == w.Size && w.Size > 1 && !asked {
		return "file://" + filepath.Join(folder, fmt.Sprintf("meet-%d-%s", os.Geteuid(), digest(fmt.Sprintf("%q %d %s", host, store, w.Job)))), nil
	}
	switch {
	case here && !asked && l.Port != "":
		return meetingName(host, store), nil
	case here && !asked && w.Job != "":
		return fmt.Sprintf("@switchyard-meet-%d-%s-%s", os.Geteuid(), l.ID, digest(w.Job)), nil
	case here && asked:
		host = cmp.Or(host, "127.0.0.1")
	}
	switch {
	case asked:
	case store == 65535:
		p = store - 1
	case store != 0:
		p = store + 1
	case w.Job != "":
		p = jobPort(w.Job)
	}
	if host != "" && p != 0 {
		return net.JoinHostPort(host, strconv.Itoa(p)), nil
	}
	if w.Size == 1 {
		return "", nil
	}
	return "", fmt.Errorf("%s is %d of %d ranks, and nothing tells where rank 0 is: %s", l.Rank, w.Rank, w.Size,
		cmp.Or(l.Cure, "set "+addr+"=HOST:PORT, the host of rank 0 and a port"))
}

// storeOf is the host of rank 0 and the port of a store there, "" and 0 where they are not known.
func storeOf(l *Launcher) (host string, p int, err error) {
	switch nodes := os.Getenv(slurmNodes); {
	case l.Port != "":
		p, err = portOf(l.Port, 29500)
		return cmp.Or(os.Getenv(l.Host), "127.0.0.1"), p, err
	case l.Host != "":
		host = os.Getenv(l.Host)
		if h, behind, err := net.SplitHostPort(host); err == nil {
			p, err := strconv.Atoi(behind)
			if err != nil || p < 1 || p > 65535 {
				return "", 0, fmt.Errorf("%s is %q, want a host and a port", l.Host, host)
			}
			return h, p, nil
		}
		return host, 0, nil
	case os.Getenv(masterAddr) != "":
		p, err = portOf(masterPort, 0)
		return os.Getenv(masterAddr), p, err
	case l.Level == ofTasks && nodes != "":
		if host, err = firstHost(nodes); err != nil {
			err = fmt.Errorf("%s is %q: %w", slurmNodes, nodes, err)
		}
	}
	return host, 0, err
}

// portOf reads a port.
func portOf(name string, missing int) (int, error) {
	p, err := integer(name, missing)
	if err == nil && (p < 1 || p > 65535) && os.Getenv(name) != "" {
		err = fmt.Errorf("%s is %d, not a port", name, p)
	}
	return p, err
}

// meetingName is where the ranks of one host meet if nobody has chosen a port: a
// unix socket in the abstract namespace. The port behind MASTER_PORT may be a
// connection's by then. All that tells jobs apart is part of the name: the user,
// the store's address, torchrun's job, and how often that was restarted.
func meetingName(host string, port int) string {
	if host == "localhost" {
		host = "127.0.0.1"
	}
	job := digest(fmt.Sprintf("%q %q %q %q", host, os.Getenv(runID), os.Getenv(restartCount), os.Getenv(ownRunID)))
	return fmt.Sprintf("@switchyard-meet-%d-%d-%s", os.Geteuid(), port, job)
}

func digest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return fmt.Sprintf("%x", sum[:8])
}

// jobPort is a port that all ranks of a job find by themselves, above those that Linux gives to connections.
func jobPort(job string) int {
	const lowest = 61440
	sum := sha256.Sum256([]byte(job))
	return lowest + int(binary.LittleEndian.Uint16(sum[:]))%(65536-lowest)
}

var errList = errors.New("not a list as Slurm writes it")

// firstHost is the first of a list of hosts, such as "node[07-09,12],gpu3".
func firstHost(list string) (string, error) {
	head, rest, ranges := strings.Cut(list, "[")
	if name, _, more := strings.Cut(head, ","); more || !ranges {
		return name, nil
	}
	inner, tail, closed := strings.Cut(rest, "]")
	number := inner[:strings.IndexAny(inner+"-", "-,")]
	if !closed || number == "" {
		return "", errList
	}
	suffix, _, _ := strings.Cut(tail, ",")
	if strings.Contains(suffix, "[") {
		return "", errList
	}
	return head + number + suffix, nil
}

// tasksOn is the number of tasks on a node, from a list such as "4(x2),3".
func tasksOn(list string, node int) (int, error) {
	before := 0
	for _, word := range strings.Split(list, ",") {
		count, times, repeated := strings.Cut(strings.TrimSuffix(word, ")"), "(x")
		n := 1
		tasks, err := strconv.Atoi(count)
		if err == nil && repeated {
			n, err = strconv.Atoi(times)
		}
		if err != nil || n < 1 {
			return 0, errList
		}
		if before += n; node < before {
			return tasks, nil
		}
	}
	return 0, fmt.Errorf("it has no node %d", node)
}
