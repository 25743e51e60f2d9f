package observe

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// recordNames are the names that torch's analyzer has for operations. It knows no dispatch: calls of these have names of other collectives, each
// its own.
var recordNames = map[string]string{
	"alltoallv":         "all_to_all",
	"barrier":           "barrier",
	"all-reduce":        "all_reduce",
	"all-gather":        "_all_gather_base",
	"reduce-scatter":    "_reduce_scatter_base",
	"broadcast":         "broadcast",
	"dispatch":          "all_to_all_single",
	"redispatch":        "all_to_all_single",
	"combine":           "all_to_all_v_single",
	"dispatch backward": "allgather_coalesced",
	"combine backward":  "allreduce_coalesced",
}

var recordStates = map[string]string{"enqueued": "scheduled", "started": "started", "finished": "completed", "failed": "completed"}

// WriteRecords writes the calls of one job in the form of torch's flight recorder, which torch.distributed.flight_recorder.fr_trace reads: a file
// for each rank, named by the prefix and the rank's number, and returns their names. Calls that not all ranks of a group make are left out, and
// ranks without others.
func WriteRecords(prefix string, calls []Call) (files []string, err error) {
	ranks := map[int][]Call{}
	var jobs []string
	for _, c := range calls {
		if c.Call == 0 || recordNames[c.Operation] == "" {
			continue
		}
		if ranks[c.Rank] = append(ranks[c.Rank], c); !slices.Contains(jobs, c.Job) {
			jobs = append(jobs, c.Job)
		}
	}
	if len(jobs) > 1 {
		return nil, fmt.Errorf("observe: records of calls: several jobs run, and one is to be chosen: %s", strings.Join(jobs, ", "))
	}
	for _, rank := range slices.Sorted(maps.Keys(ranks)) {
		name := prefix + strconv.Itoa(rank)
		if err := whole(name, 0o600, func(w io.Writer) error { return writeRecords(w, ranks[rank]) }); err != nil {
			return files, fmt.Errorf("observe: records of calls: %w", err)
		}
		files = append(files, name)
	}
	return files, nil
}

// writeRecords writes the calls of one rank.
func writeRecords(w io.Writer, calls []Call) error {
	groups, entries := object{}, make([]any, 0, len(calls))
	for i := range calls {
		c := &calls[i]
		id := strconv.FormatInt(c.ID, 10)
		described := fmt.Sprintf("switchyard %s, communicator %s", c.Group, id)
		if !slices.ContainsFunc(groups, func(f field) bool { return f.name == id }) {
			members := make([]string, len(c.Members))
			for k, m := range slices.Sorted(slices.Values(c.Members)) {
				members[k] = strconv.Itoa(m)
			}
			groups = append(groups, field{id, object{{"desc", described}, {"ranks", "[" + strings.Join(members, ", ") + "]"}}})
		}
		size := int64(0)
		if c.Operation == "all-reduce" { // the only one whose payloads are equal on all ranks, and as long as what it gives
			size = c.PayloadBytes
		}
		var took any
		if c.Started != nil && c.Finished != nil {
			took = float64(c.Finished.Sub(*c.Started)) / 1e6
		}
		entries = append(entries, object{
			{"record_id", int64(i)},
			{"pg_id", c.ID},
			{"process_group", pair{id, described}},
			{"collective_seq_id", int64(c.Call)},
			{"p2p_seq_id", int64(0)},
			{"op_id", int64(c.Seq)},
			{"profiling_name", "nccl:" + recordNames[c.Operation]}, // the only library that all versions of the analyzer take
			{"time_created_ns", c.Enqueued.UnixNano()},
			{"time_discovered_started_ns", nanoseconds(c.Started)},
			{"time_discovered_completed_ns", nanoseconds(c.Finished)},
			{"duration_ms", took},
			{"input_sizes", []any{[]any{size}}},
			{"output_sizes", []any{[]any{size}}},
			{"input_dtypes", []any{"Byte"}},
			{"output_dtypes", []any{"Byte"}},
			{"state", recordStates[c.State]},
			{"retired", c.State == "finished" || c.State == "failed"},
			{"timeout_ms", int64(0)},
			{"is_p2p", false},
			{"frames", []any{}},
		})
	}
	var b bytes.Buffer
	b.WriteString("\x80\x02") // the protocol
	pickle(&b, object{{"version", "2.10"}, {"pg_config", groups}, {"pg_status", object{}}, {"entries", entries}})
	b.WriteByte('.')
	_, err := w.Write(b.Bytes())
	return err
}

// nanoseconds is a time that may be missing.
func nanoseconds(t *time.Time) any {
	if t == nil {
		return nil
	}
	return t.UnixNano()
}

// object becomes a dict of Python's, and pair a tuple.
type (
	object []field
	field  struct {
		name  string
		value any
	}
	pair [2]string
)

// pickle writes a value by protocol 2 of Python's pickle.
func pickle(b *bytes.Buffer, value any) {
	switch v := value.(type) {
	case nil:
		b.WriteByte('N')
	case bool:
		b.WriteByte(map[bool]byte{true: 0x88, false: 0x89}[v])
	case int64:
		b.WriteString("\x8a\x08") // a number of 8 bytes
		b.Write(binary.LittleEndian.AppendUint64(nil, uint64(v)))
	case float64:
		b.WriteByte('G')
		b.Write(binary.BigEndian.AppendUint64(nil, math.Float64bits(v)))
	case string:
		v = strings.ToValidUTF8(v, "?")
		b.WriteByte('X')
		b.Write(binary.LittleEndian.AppendUint32(nil, uint32(len(v))))
		b.WriteString(v)
	case pair:
		pickle(b, v[0])
		pickle(b, v[1])
		b.WriteByte(0x86)
	case []any:
		b.WriteString("](")
		for _, x := range v {
			pickle(b, x)
		}
		b.WriteByte('e')
	case object:
		b.WriteString("}(")
		for _, f := range v {
			pickle(b, f.name)
			pickle(b, f.value)
		}
		b.WriteByte('u')
	default:
		panic(fmt.Sprintf("observe: a %T in a record", value))
	}
}
