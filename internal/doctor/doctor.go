// Package doctor looks at a machine: its limits, what joins ranks, its driver, and ranks that exchange bytes.
package doctor

import (
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/device"
)

// State is how bad a finding is.
type State string

// The states. A problem keeps something from working; a note says what is slower, or not there.
const (
	Fine    State = "ok"
	Note    State = "note"
	Problem State = "problem"
)

// Finding is what a check found.
type Finding struct {
	Check string `json:"check"` // its name, one word
	State State  `json:"state"`
	Says  string `json:"says"`           // one sentence with the values
	Cure  string `json:"cure,omitempty"` // what to do, of what is not fine
}

// Found is a finding. Cure is empty where it is fine.
func Found(check string, state State, says, cure string) Finding {
	return Finding{check, state, says, cure}
}

// Driver says of the GPUs' driver what a process can find out without NVIDIA's management library: count GPUs are for this process, or err says
// why none. Unasked says why that library does not tell the links.
func Driver(count int, err, unasked error) Finding {
	switch {
	case errors.Is(err, device.ErrUnavailable):
		return Finding{"driver", Note, err.Error(), "nothing is to be done where only processors are used; GPUs need NVIDIA's driver 550 or newer, and a build with cgo"}
	case err != nil:
		return Finding{"driver", Problem, err.Error(), "nvidia-smi says more; GPUs need NVIDIA's driver 550 or newer"}
	}
	return Finding{"driver", Fine, fmt.Sprintf("%d GPUs for this process; links are unknown: %v", count, unasked), ""}
}

// Rest has ranks of a command exchange bytes, as [Exchange] does: on the host, and on GPUs where the findings so far have some.
func Rest(found []Finding, command []string, show func(Finding)) {
	show(Exchange(command, "host"))
	for _, f := range found {
		if f.Check == "gpu" || f.Check == "driver" && f.State == Fine {
			show(Exchange(command, "cuda"))
			return
		}
	}
}
