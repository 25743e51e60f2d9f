package core

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/internal/doctor"
	"github.com/switchyard-moe/switchyard/observe"
)

// Observed says whose ranks to look at, and how to tell.
type Observed int32

// The answers.
const (
	OwnRanks Observed = iota
	AllRanks
	AllRanksTable
	AllCalls
	WhySlow
	WhySlowTable
	Trace
	Recent
	RecentTable
)

// How long an explanation looks at ranks, and the time from which recent findings are.
const (
	explainWindow = time.Second
	recentWindow  = time.Second
)

// Observe says what ranks do, as JSON or as a table: those of a job as in [observe.State.OfJob], except for OwnRanks. A job of
// which no rank answers is an error.
func Observe(what Observed, job string) ([]byte, error) {
	switch what {
	case OwnRanks:
		return json.Marshal(observe.Snapshot())
	case WhySlow, WhySlowTable:
		return explain(what, job)
	}
	if what < OwnRanks || what > RecentTable {
		return nil, fmt.Errorf("switchyard: %w: observe %d", ErrInvalid, what)
	}
	s, err := everybody(job)
	if err != nil {
		return nil, err
	}
	if what == Recent || what == RecentTable {
		time.Sleep(recentWindow)
		now, err := everybody(job)
		if err != nil {
			return nil, err
		}
		s = now.Since(s)
	}
	var b bytes.Buffer
	switch what {
	case AllRanks, Recent:
		return json.Marshal(s)
	case AllCalls, Trace:
		calls, err := s.Calls(context.Background())
		if len(calls) == 0 && err != nil {
			return nil, err
		}
		if what == AllCalls {
			return json.Marshal(calls)
		}
		err = observe.Timeline(&b, calls, time.Time{})
		return b.Bytes(), err
	}
	s.Table(&b)
	return b.Bytes(), nil
}

// everybody is the state of the ranks of a job, and of all ranks where it has no name.
func everybody(job string) (observe.State, error) {
	s, err := observe.Everybody(context.Background(), 0)
	if err != nil {
		return s, err
	}
	return s.OfJob(job)
}

// Records writes the last calls of a job of this user, as in [observe.State.OfJob], for torch's analyzer, and returns the names of the files
// as a list in JSON.
func Records(prefix, job string) ([]byte, error) {
	s, err := everybody(job)
	if err != nil {
		return nil, err
	}
	calls, err := s.Calls(context.Background())
	if len(calls) == 0 && err != nil {
		return nil, err
	}
	files, err := observe.WriteRecords(prefix, calls)
	if err != nil {
		return nil, err
	}
	return json.Marshal(slices.Concat([]string{}, files))
}

// DoctorOptions ask for all findings, with two processes that Command starts, or for the part of one of these.
type DoctorOptions struct {
	Command []string // gets host or cuda as one more argument, and calls Doctor with it as Trial
	Trial   string
}

// Doctor is what switchyard doctor finds, but for links and the health of GPUs, as a list in JSON; of a trial what rank 0 has measured.
func Doctor(o DoctorOptions) ([]byte, error) {
	if o.Trial != "" {
		return doctor.Trial(o.Trial)
	}
	if len(o.Command) == 0 {
		return nil, fmt.Errorf("switchyard: %w: no command", ErrInvalid)
	}
	count, err := device.CUDACount()
	all := append(doctor.Host(), doctor.Driver(count, err, errLinks))
	doctor.Rest(all, o.Command, func(f doctor.Finding) { all = append(all, f) })
	return json.Marshal(all)
}

var errLinks = errors.New("the command switchyard, built from a clone, tells of links and the health of GPUs")

// explain says why steps of a job of this user, or of all of them, take their time.
func explain(what Observed, job string) ([]byte, error) {
	x, err := observe.ExplainFor(context.Background(), 0, job, explainWindow)
	if err != nil {
		return nil, err
	}
	if what == WhySlow {
		return json.Marshal(x)
	}
	var b bytes.Buffer
	x.Table(&b)
	return b.Bytes(), nil
}
