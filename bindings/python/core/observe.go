package core

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

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
)

// Observe says what ranks do, as JSON or as a table.
func Observe(what Observed) ([]byte, error) {
	if what == OwnRanks {
		return json.Marshal(observe.Snapshot())
	}
	if what < OwnRanks || what > AllCalls {
		return nil, fmt.Errorf("switchyard: %w: observe %d", ErrInvalid, what)
	}
	s, err := observe.Everybody(context.Background(), 0)
	if err != nil {
		return nil, err
	}
	switch what {
	case AllRanks:
		return json.Marshal(s)
	case AllCalls:
		calls, err := s.Calls(context.Background())
		if len(calls) == 0 && err != nil {
			return nil, err
		}
		return json.Marshal(calls)
	}
	var b bytes.Buffer
	s.Table(&b)
	return b.Bytes(), nil
}
