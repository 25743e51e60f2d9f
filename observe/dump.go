package observe

import (
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/switchyard-moe/switchyard/internal/flight"
)

// Call is one of the last calls of a rank.
type Call struct {
	Job       string `json:"job"`
	Rank      int    `json:"rank"`
	Host      int    `json:"host"`
	Seq       uint64 `json:"seq"` // among the calls of the rank
	Group     string `json:"group"`
	ID        int64  `json:"communicator"` // the same on all ranks of the group
	Members   []int  `json:"members"`      // the ranks of that group
	Call      uint64 `json:"call"`         // among the calls of the communicator, 0 for one that not all ranks make
	Operation string `json:"operation"`
	Algorithm string `json:"algorithm,omitempty"`
	// PayloadBytes is the length of the rank's input, -1 where it is not known.
	PayloadBytes int64 `json:"payload_bytes"`
	// Device is that of the communicator, such as cuda:0. Stream is the one on which the call was enqueued: its number in the process on the host,
	// the handle of the CUDA stream on a GPU, in hexadecimal; empty for a call that ran at once.
	Device string `json:"device"`
	Stream string `json:"stream,omitempty"`
	// Started and Finished are missing until then, and for calls on GPUs.
	Enqueued time.Time  `json:"enqueued"`
	Started  *time.Time `json:"started,omitempty"`
	Finished *time.Time `json:"finished,omitempty"`
	State    string     `json:"state"` // enqueued, started, finished, failed
	Error    string     `json:"error,omitempty"`
	// Absent are the ranks of its host that have not begun it, of a call that waits longer than 100 us, or that had not begun it when it failed,
	// by their numbers in the group that met. A call that has ended well has heard of all. Calls on GPUs do not tell.
	Absent []int `json:"absent,omitempty"`
	// Waits are those of the call for other ranks that took at least 20 us, as far as they are among the last 2,048 of the rank. Calls on GPUs
	// do not tell, nor those that not all ranks make.
	Waits []CallWait `json:"waits,omitempty"`
}

// CallWait is a time in which a call waited for a rank.
type CallWait struct {
	For     int       `json:"for"` // by its number in the group that met
	Began   time.Time `json:"began"`
	Seconds float64   `json:"seconds"`
}

// Calls are the last calls of the ranks of this process, up to 2,048 of each, oldest first.
func Calls() (calls []Call) {
	for _, r := range flight.Ranks() {
		s := r.State(true)
		for i := range s.Calls {
			calls = append(calls, callOf(&s, &s.Calls[i]))
		}
	}
	return calls
}

func callOf(s *flight.State, c *flight.Call) Call {
	at := func(d time.Duration) *time.Time {
		if d == 0 {
			return nil
		}
		t := s.Began.Add(d)
		return &t
	}
	k := Call{
		Job: jobOf(s), Rank: s.Number, Host: s.Host, Seq: c.Seq, Group: c.Group, ID: c.ID, Members: c.Members, Call: c.Number, Operation: c.Operation, Algorithm: c.Algorithm, PayloadBytes: c.Payload,
		Device: c.Device, Stream: streamOf(c), Enqueued: s.Began.Add(c.Enqueued), Started: at(c.Started), Finished: at(c.Finished), State: "enqueued", Absent: c.Absent,
	}
	for _, w := range c.Waits {
		k.Waits = append(k.Waits, CallWait{w.For, s.Began.Add(w.Began), w.Took.Seconds()})
	}
	switch {
	case c.Err != nil:
		k.State, k.Error = "failed", fmt.Sprint(c.Err)
	case c.Finished != 0:
		k.State = "finished"
	case c.Started != 0:
		k.State = "started"
	}
	return k
}

func streamOf(c *flight.Call) string {
	switch {
	case c.Stream == flight.NoStream:
		return ""
	case strings.HasPrefix(c.Device, "cuda:"):
		return fmt.Sprintf("%#x", c.Stream.Number())
	}
	return strconv.FormatUint(c.Stream.Number(), 10)
}

// Dump writes JSON lines: first the [State] of this process with its verdict, then a [Call] a line.
func Dump(w io.Writer) error {
	e := json.NewEncoder(w)
	if err := e.Encode(Snapshot()); err != nil {
		return err
	}
	for _, c := range Calls() {
		if err := e.Encode(c); err != nil {
			return err
		}
	}
	return nil
}

// dumpTo writes what a rank of this process knows to a folder when its group has failed: a dump, named by the rank, and the calls of its job in
// the form of torch's flight recorder. The names have the epoch of a group that came from another, whose dumps stay.
func dumpTo(dir string, r *flight.Rank) error {
	path, prefix := fmt.Sprintf("switchyard-rank%d.jsonl", r.Number), recordPrefix
	if epoch := r.Epoch(); epoch > 0 {
		path, prefix = fmt.Sprintf("switchyard-epoch%d-rank%d.jsonl", epoch, r.Number), fmt.Sprintf(laterRecordPrefix, epoch)
	}
	if err := whole(filepath.Join(dir, path), 0o600, Dump); err != nil {
		return err
	}
	s := r.State(false)
	job := jobOf(&s)
	_, err := WriteRecords(filepath.Join(dir, prefix), slices.DeleteFunc(Calls(), func(c Call) bool { return c.Job != job }))
	return err
}

// These begin the names of the files for torch's analyzer, behind which it takes nothing but a rank.
const (
	recordPrefix      = "torch_rank_"
	laterRecordPrefix = "torch_epoch%d_rank_"
)
