package observe

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/switchyard-moe/switchyard/internal/flight"
)

// Call is one of the last calls of a rank.
type Call struct {
	Job       string `json:"job"`
	Rank      int    `json:"rank"`
	Seq       uint64 `json:"seq"` // among the calls of the rank
	Group     string `json:"group"`
	ID        int64  `json:"communicator"` // the same on all ranks of the group
	Members   []int  `json:"members"`      // the ranks of that group
	Call      uint64 `json:"call"`         // among the calls of the communicator, 0 for one that not all ranks make
	Operation string `json:"operation"`
	Algorithm string `json:"algorithm,omitempty"`
	// PayloadBytes is the length of the rank's input, -1 where it is not known.
	PayloadBytes int64 `json:"payload_bytes"`
	Streamed     bool  `json:"streamed"`
	// Started and Finished are missing until then, and for calls on GPUs.
	Enqueued time.Time  `json:"enqueued"`
	Started  *time.Time `json:"started,omitempty"`
	Finished *time.Time `json:"finished,omitempty"`
	State    string     `json:"state"` // enqueued, started, finished, failed
	Error    string     `json:"error,omitempty"`
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
		Job: jobOf(s), Rank: s.Number, Seq: c.Seq, Group: c.Group, ID: c.ID, Members: c.Members, Call: c.Number, Operation: c.Operation, Algorithm: c.Algorithm, PayloadBytes: c.Payload,
		Streamed: c.Streamed, Enqueued: s.Began.Add(c.Enqueued), Started: at(c.Started), Finished: at(c.Finished), State: "enqueued",
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

// dumpTo writes a dump to a file of the directory, named by the first rank of this process.
func dumpTo(dir string, rank int) error {
	f, err := os.CreateTemp(dir, ".switchyard-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }() // it is gone, once it has its name
	if err := Dump(f); err != nil {
		_ = f.Close()
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), fmt.Sprintf("%s/switchyard-rank%d.jsonl", dir, rank))
}
