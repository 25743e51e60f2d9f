package observe

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Vitals are what the kernel tells of a process, from outside: a process that is stopped does not have to answer.
type Vitals struct {
	Pid int `json:"pid"`
	// State is one word: running, sleeping, stopped, traced, "waiting for a device", dead.
	State string `json:"state"`
	// SwapBytes of its memory are swapped out. It has read memory from a disk DiskReads times: a page that was swapped out, or one of a file.
	SwapBytes int64  `json:"swap_bytes"`
	DiskReads uint64 `json:"disk_reads"`
	// DiskReadsASecond is how often it has done so while it was asked.
	DiskReadsASecond float64 `json:"disk_reads_a_second"`
	// Delayed is how long its threads have waited for a core, all together, and CoreWaits how many of them did so in the mean while it was asked.
	Delayed   time.Duration `json:"-"`
	CoreWaits float64       `json:"core_waits"`
	// Files are its open descriptors, of which it may have FileLimit; 0 where the kernel does not say.
	Files     int `json:"files"`
	FileLimit int `json:"file_limit"`
}

var processStates = map[string]string{"R": "running", "S": "sleeping", "I": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "traced", "Z": "dead", "X": "dead"}

// look reads what a folder such as /proc/self tells. Descriptors of processes of other users are not told.
func look(folder string) (p Vitals, err error) {
	read := func(name string) []byte {
		b, e := os.ReadFile(filepath.Join(folder, name))
		err = errors.Join(err, e)
		return b
	}
	stat, status, limits := read("stat"), read("status"), read("limits")
	if err != nil {
		return p, fmt.Errorf("observe: %w", err)
	}
	// The name of the program is in parentheses and may hold any character.
	name, rest := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
	fields := strings.Fields(string(stat[rest+1:]))
	if name < 0 || len(fields) < 10 {
		return p, fmt.Errorf("observe: %s: %q is not in the kernel's format", filepath.Join(folder, "stat"), stat)
	}
	p.Pid, _ = strconv.Atoi(strings.TrimSpace(string(stat[:name])))
	if p.State = processStates[fields[0]]; p.State == "" {
		p.State = fields[0]
	}
	p.DiskReads, _ = strconv.ParseUint(fields[9], 10, 64)
	for line := range strings.Lines(string(status)) {
		if kb, ok := strings.CutPrefix(line, "VmSwap:"); ok {
			n, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(kb), "kB")), 10, 64)
			p.SwapBytes = n << 10
		}
	}
	for line := range strings.Lines(string(limits)) {
		if of, ok := strings.CutPrefix(line, "Max open files"); ok {
			p.FileLimit, _ = strconv.Atoi(strings.Fields(of)[0]) // "unlimited" is no limit
		}
	}
	if threads, err := os.ReadDir(filepath.Join(folder, "task")); err == nil {
		for _, thread := range threads {
			text, _ := os.ReadFile(filepath.Join(folder, "task", thread.Name(), "schedstat")) // it may have ended, and not all kernels tell it
			if words := strings.Fields(string(text)); len(words) > 1 {
				n, _ := strconv.ParseInt(words[1], 10, 64)
				p.Delayed += time.Duration(n)
			}
		}
	}
	if open, err := os.ReadDir(filepath.Join(folder, "fd")); err == nil {
		p.Files = len(open)
	}
	return p, nil
}

// programOf is the name of a process's program: of a Python that of its script or module.
func programOf(folder string) string {
	b, err := os.ReadFile(filepath.Join(folder, "cmdline"))
	if err != nil {
		return ""
	}
	words := strings.Split(strings.TrimRight(string(b), "\x00"), "\x00")
	name := filepath.Base(words[0])
	if strings.HasPrefix(name, "python") {
		for i, w := range words[1:] {
			if w == "-m" && i+2 < len(words) {
				name = words[i+2]
				break
			}
			if !strings.HasPrefix(w, "-") {
				name = filepath.Base(w)
				break
			}
		}
	}
	letters := []rune(strings.Map(func(r rune) rune { // it is printed in a table
		if r <= ' ' || r == 0x7f {
			return '_'
		}
		return r
	}, name))
	return string(letters[:min(len(letters), longestName)])
}

func procOf(pid int) string { return filepath.Join("/proc", strconv.Itoa(pid)) }
