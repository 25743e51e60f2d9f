package cuda_test

import (
	"debug/elf"
	"encoding/json"
	"errors"
	"flag"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/cuda/emulated"
	"github.com/switchyard-moe/switchyard/internal/proctest"
	"github.com/switchyard-moe/switchyard/kernels/cuda/internal/fatbin"
)

// The head of a scenario's file is its kernels; this line ends it.
const endOfKernels = "#include \"fibers.h\"\n"

// emulator compiles the kernels of a family for this processor, with testdata/emulate in place of a GPU.
type emulator struct{ dir string }

func newEmulator(t *testing.T) emulator {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("the emulation switches stacks in the instructions of amd64")
	}
	needSources(t)
	if _, err := emulated.Compiler(); err != nil {
		t.Skip("needs a C++ compiler")
	}
	return emulator{t.TempDir()}
}

func needSources(t *testing.T) {
	t.Helper()
	if _, err := os.Stat("dispatch.cu"); err != nil {
		t.Skip("the sources are not next to the test binary")
	}
}

// compile is what the compiler makes of the kernels, with bugs put into them, each an old text and a new one, and of what paths name, whose
// sources are in inputs and testdata/emulate. What the same sources have become before is taken again.
func (e emulator) compile(t *testing.T, what string, bugs, inputs, flags, paths []string) string {
	t.Helper()
	dir := e.sources(t, bugs)
	headers := []string{"-Itestdata/emulate", "-I" + filepath.Join(dir, "kernels/cuda"), "-I" + filepath.Join(dir, "kernels/cuda/include"),
		"-I" + filepath.Join(dir, "examples/kernels")}
	made, err := emulated.Compile(e.dir, what, append(inputs, dir, "testdata/emulate"), append(dialect, flags...), append(headers, paths...))
	require.NoError(t, err)
	return made
}

// dialect has the flags of all that is compiled.
var dialect = []string{"-std=c++20", "-Wno-unknown-pragmas", `-DSW_EMULATED="emulated.h"`}

// texts are the sources of the kernels by their names.
var texts = sync.OnceValues(func() (map[string]string, error) {
	names, err := fatbin.Tree(os.DirFS("../.."))
	if err != nil {
		return nil, err
	}
	all := make(map[string]string)
	for _, name := range append(names, "examples/kernels/all_gather.cu") { // of a user's
		b, err := os.ReadFile(filepath.Join("../..", name))
		if err != nil {
			return nil, err
		}
		all[name] = string(b)
	}
	return all, nil
})

// edited are the sources with edits, each an old text that occurs once and a new one.
func edited(t *testing.T, edits []string) map[string]string {
	t.Helper()
	sources, err := texts()
	require.NoError(t, err)
	changed, found := make(map[string]string), make([]int, len(edits))
	for name, text := range sources {
		for i := 0; i < len(edits); i += 2 {
			found[i] += strings.Count(text, edits[i])
			text = strings.Replace(text, edits[i], edits[i+1], 1)
		}
		changed[name] = text
	}
	for i := 0; i < len(edits); i += 2 {
		require.Equal(t, 1, found[i], "%q in the sources", edits[i])
	}
	return changed
}

// sources is a folder of the sources of the kernels, changed so that runs are short, and with bugs.
func (e emulator) sources(t *testing.T, bugs []string) string {
	t.Helper()
	dir := t.TempDir()
	short := []string{"constexpr u32 steps = 8;", "constexpr u32 steps = 2;", "host_polls = 8192", "host_polls = 256", "moved_tiles = 512", "moved_tiles = 4"}
	for name, text := range edited(t, append(short, bugs...)) {
		to := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(to), 0o777))
		require.NoError(t, os.WriteFile(to, []byte(text), 0o666))
	}
	return dir
}

// program is a family's kernels and its scenario.
func (e emulator) program(t *testing.T, family string) string {
	t.Helper()
	return e.compile(t, family, nil, nil, []string{"-Og"}, []string{"testdata/emulate/" + family + ".cpp"})
}

// standard is a precompiled header of the standard headers of emulated.h.
func (e emulator) standard(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("testdata/emulate/emulated.h")
	require.NoError(t, err)
	header := filepath.Join(e.dir, "standard.h")
	includes := regexp.MustCompile(`(?m)^#include <.*\n`).FindAllString(string(text), -1)
	require.NoError(t, os.WriteFile(header, []byte(strings.Join(includes, "")), 0o666))
	made, err := emulated.Compile(e.dir, "standard.h", []string{header}, append(dialect, "-x", "c++-header"), []string{header})
	require.NoError(t, err)
	require.NoError(t, os.Symlink(made, header+".gch"))
	return header
}

// scenario is an object of a family's scenario, and the source of an object of the kernels that it launches. A program of both takes kernels,
// and functions of their headers, from the object that comes first (-z muldefs).
func (e emulator) scenario(t *testing.T, family string) (object, kernels string) {
	t.Helper()
	source := "testdata/emulate/" + family + ".cpp"
	object = e.compile(t, family+".o", nil, nil, []string{"-Og", "-fno-inline", "-c"}, []string{source})
	text, err := os.ReadFile(source)
	require.NoError(t, err)
	head, _, found := strings.Cut(string(text), endOfKernels)
	require.True(t, found, "%s has no line %s", source, endOfKernels)
	compiled, err := elf.Open(object)
	require.NoError(t, err)
	defer compiled.Close()
	symbols, err := compiled.Symbols()
	require.NoError(t, err)
	head += "extern \"C\" { [[gnu::used]] void *const launched[] = {\n"
	n := 0
	for _, s := range symbols {
		if elf.ST_BIND(s.Info) == elf.STB_WEAK && elf.ST_TYPE(s.Info) == elf.STT_FUNC && !strings.HasPrefix(s.Name, "_Z") {
			head += "(void *)" + s.Name + ",\n"
			n++
		}
	}
	require.NotZero(t, n, "%s launches no kernel", source)
	kernels = filepath.Join(e.dir, family+"_kernels.cpp")
	require.NoError(t, os.WriteFile(kernels, []byte(head+"}; }\n"), 0o666))
	return object, kernels
}

// searched is the number of rounds in which the emulation has to find a bug.
const searched = 2000

func emulate(program string, seed, rounds int) (string, error) {
	out, err := exec.Command(program, strconv.Itoa(seed), strconv.Itoa(rounds)).CombinedOutput()
	return string(out), err
}

// Exchanges of any counts and alignments, calls in a row, disagreements on sizes, missing ranks, aborts and splits that reach
// outside; reductions of any counts, alignments, types and operators, the ranks' buffers in reach of peers or not, with the same
// disturbances. Each in a random order of all threads.
func TestKernelsKeepTheirPromisesInAnyOrderOfThreads(t *testing.T) {
	if proctest.Race {
		t.Skip("the kernels run in a process of their own, of which the race detector sees nothing")
	}
	e := newEmulator(t)
	families, err := fatbin.Families(os.DirFS("."))
	require.NoError(t, err)
	for _, family := range append(families, "devcomm") {
		if _, err := os.Stat("testdata/emulate/" + family + ".cpp"); err != nil {
			continue // a kernel of tests
		}
		t.Run(family, func(t *testing.T) {
			t.Parallel()
			program := e.program(t, family)
			rounds := 120
			if testing.Short() {
				rounds = 16
			}
			out, err := emulate(program, 1, rounds)
			require.NoError(t, err, out)
		})
	}
}

var update = flag.Bool("update", false, "write anew by which seeds the emulation finds bugs")

// findsBugs puts bugs into a family's kernels, one at a time, and requires that the emulation finds each. A bug is an old text and a new one,
// or several such pairs; the old texts occur once in the sources of all families. The round that found a bug before, as the family's file of
// seeds says, comes first: it is one of the rounds that a search goes through, and most searches are much longer.
func findsBugs(t *testing.T, family string, bugs map[string][]string) {
	t.Run(family, func(t *testing.T) {
		t.Parallel()                          // so that families are compiled side by side
		if testing.Short() || proctest.Race { // which sees nothing of it
			needSources(t)
			for _, bug := range bugs {
				edited(t, bug) // texts get stale
			}
			t.Skip("compiles the kernels several times")
		}
		file, before := filepath.Join("testdata/emulate", family+".seeds.json"), map[string]int{}
		if b, err := os.ReadFile(file); err == nil {
			require.NoError(t, json.Unmarshal(b, &before))
		}
		for what := range before {
			require.Contains(t, bugs, what, "%s has a bug that is not there", file)
		}
		now := maps.Clone(before) // with those that -run leaves out
		e := newEmulator(t)
		standard, sound := e.standard(t), e.sources(t, nil)
		scenario, kernels := e.scenario(t, family)
		var mu sync.Mutex
		for what, bug := range bugs {
			t.Run(what, func(t *testing.T) {
				t.Parallel()
				// A found bug takes one round, which is less than an optimizing compiler.
				program := e.compile(t, family+" with a bug", bug, []string{kernels, sound}, []string{"-Wl,-z,muldefs"}, []string{"-include", standard, kernels, scenario})
				var exit *exec.ExitError
				if seed, ok := before[what]; ok {
					if _, err := emulate(program, seed, 1); errors.As(err, &exit) {
						return
					}
					mu.Lock()
					delete(now, what)
					mu.Unlock()
				}
				out, err := emulate(program, 1, searched)
				require.True(t, errors.As(err, &exit), "not found: %s", out)
				t.Logf("found by a search: %s", out)
				if m := regexp.MustCompile(`, seed (\d+)\n$`).FindStringSubmatch(out); m != nil {
					mu.Lock()
					defer mu.Unlock()
					now[what], _ = strconv.Atoi(m[1])
				}
			})
		}
		t.Cleanup(func() {
			if *update && !t.Failed() {
				b, err := json.MarshalIndent(now, "", "\t")
				require.NoError(t, err)
				require.NoError(t, os.WriteFile(file, append(b, '\n'), 0o666))
			}
		})
	})
}

// Bugs that the kernels have had, put back.
func TestTheEmulationFindsBugs(t *testing.T) {
	findsBugs(t, "alltoallv", map[string][]string{
		"a chunk is signalled as another one": {
			"if (chunks != 0 && before + chunks > from", "if (before + chunks > from",
		},
		"a warp leaves a chunk one tile too early": {
			"mine >= first + each;", "mine + 1 >= first + each;",
		},
		"the end of a message is signalled before all warps have written it": {
			"part_sync(send_part, 32 * senders(a));", "",
		},
		"a chunk is signalled before all warps of a block that only sends have written it": {
			"expect(senders(a))", "expect(send_warps)",
		},
		"a slot is given back before all warps of a block that only copies have read it": {
			"expect(takers(a))", "expect(recv_warps)",
		},
		"a tile in place belongs to no stripe": {
			"(whole - o.stripe + o.stripes - 1) / o.stripes", "whole / o.stripes",
		},
		"a message for staging is passed over by some warps only": {
			"mine += (last - 1 - mine) / warps * warps; //", "mine = last; //",
		},
		"a slot is written before it has been read": {
			"c > slots + room && ", "false && ",
		},
		"a sender waits for a credit that its receiver has given up and written over": {
			"bool past = x.past(epoch);", "bool past = false;",
		},
		"the sender of a packet does not hear that another length was expected": {
			"hear(a, header, peer, epoch);\n\tif", "if",
		},
		"who receives large messages does not hear what their senders say of its own": {
			"\t\t\thear_of_large(a, r, epoch, lane, 32);", "\t\t\t;",
		},
		"who complains has forgotten the call before": {
			"8 * packet::parity(epoch), epoch); // for", "8, epoch); // for", "packet::parity(epoch) != 0 ? last.a : last.b", "last.b",
		},
		"complaints of two calls share a place": {
			"(packet::parity(epoch) * a.world.size + dst) * SW_LINE_BYTES", "dst * SW_LINE_BYTES",
		},
		"a sender whose receiver has given its message up does not hear why": {
			"\t\t\thear_why(a, r[s].to, epoch, true);", "\t\t\t;",
		},
		"a rank that refuses its splits goes on before its peers have come": {
			"\tawait_peers(s, a, epoch);", "",
		},
		"who waits for a credit is not told of refused splits": {
			"credit::signal(a, p, epoch, SW_NOWHERE, refused);", "",
		},
	})
	findsBugs(t, "allreduce", map[string][]string{
		"staged input is reduced before it is there": {
			"ready = b.pushing != 0 ? 0 : no_limit", "ready = no_limit",
		},
		"input is pushed into a slot that is not empty": {
			"if (room < j + 1 && (room = b.await(&b.push_room,", "if (false && (room = b.await(&b.push_room,",
		},
		"a result is handed out into a slot that is not empty": {
			"if (room < j + 1 && (room = b.await(&b.room,", "if (false && (room = b.await(&b.room,",
		},
		"a slot is given back before it has been read": {
			"r[given % a.slots].all(given / a.slots)", "1",
		},
		"staged results are taken before they are there": {
			"if (!pulled && b.await", "if (false && b.await",
		},
		"peers are told of the end before all warps are there": {
			"part_sync(end_of_work,", "emu::draw(",
		},
		"a rank ends before its peers are done with its memory": {
			"if ((b.touched >> p & 1) &&", "if (false &&",
		},
		"a result is stored before the ranks' calls have been compared": {
			"while (!agreed) {", "while (false) {",
		},
		"packets of two calls share a place": {
			"segment(a.world, dst) + region + (packet::parity(epoch)", "segment(a.world, dst) + region + (packet::parity(0)",
		},
		"the entries of two calls share a place": {
			"a.block.entries +\n\t       (packet::parity(epoch)", "a.block.entries +\n\t       (packet::parity(0)",
		},
		"operators are not compared": {
			"e.call != a.call || ", "",
		},
		"waits go on after a disagreement": {
			"if (epoch != 0 && load_relaxed_sys(own + w.control", "if (false && load_relaxed_sys(own + w.control",
		},
		"rows are combined from the last": {
			"E::widen(a, load_piece(t.row(0, f.at", "E::widen(a, load_piece(t.row(t.rows - 1, f.at",
		},
		"warps that take without waiting overrun those that report": {
			"staged = most_chunks(a, b.taking);", "staged = most;", "most = most_chunks(a, b.taking);", "most = most_chunks(a, all_peers(a));",
		},
	})
	findsBugs(t, "multicast", map[string][]string{
		"a piece is reduced before all ranks have staged it": {
			"if (!await(inputs_pushed, j + 1, true))", "if (!await(inputs_pushed, j + 1, false))",
		},
		"a slot is staged before what was in it has been taken": {
			"takes ? await(results_taken, through, false)", "takes ? true",
		},
		"a slot is staged while ranks still reduce what is in it": {
			": await(results_pushed, through, true)))", ": true))",
		},
		"a slot is taken before all ranks have reduced their pieces": {
			"if (!await(results_pushed, j + 1, true))", "if (!await(results_pushed, j + 1, false))",
		},
		"results go to slots that ranks have not taken": {
			"takes && through > 0 && !await(results_taken, through, true)", "takes && through > 0 && !await(results_taken, through, false)",
		},
		"a rank ends before its peers are done with its buffers": {
			"if (role == reducer && !takes && count > 0)", "if (false)",
		},
		"inputs at different places are taken for one": {
			"from &= e.src == a.src_place;", "",
		},
		"outputs at different places are taken for one": {
			"to &= e.dst == a.dst_place;", "",
		},
		"the ends of slices are taken for whole vectors": {
			"bool whole = (a.bounds[p + 1] & 15) == 0;", "bool whole = true;",
		},
		"the bytes behind a slice of the output are written": {
			"store_piece(p + i, min(16u, bytes - i), v)", "store_piece(p + i, 16, v)",
		},
		"the first slice is taken for the longest": {
			"longest = max(longest, a.bounds[p + 1] - a.bounds[p]);", "longest = a.bounds[1] - a.bounds[0];",
		},
		"a slice that has ended has pieces of less than no bytes": {
			"bytes(max(i64{0}, min(each,", "bytes((min(each,",
		},
		"a team tells of its work before all of its warps have done it": {
			"sync();\n\t\tif (warp != 0)", "if (warp != 0)",
		},
		"averages are sums": {
			"if (end.op != SW_OP_AVG)\n\t\t\treturn v;", "if (end.op != SW_OP_PROD)\n\t\t\treturn v;",
		},
		"half of two packets is taken for both": {
			"all &= p.a >> 32 == flag && p.b >> 32 == flag;", "all &= p.a >> 32 == flag;",
		},
		"the second two packets of a lane are not looked at": {
			"two(place + wire + 512, v.z, v.w);", "{ bool before = all; two(place + wire + 512, v.z, v.w); all = before; }",
		},
		"packets by multicast of two calls share a place": {
			"a.block.results + (packet::parity(epoch) * a.world.size + src) * a.block.packet_stride;", "a.block.results + src * a.block.packet_stride;",
		},
		"packets by multicast lie where those of other ranks do": {
			"x.put(multicast + place(a.world.rank),", "x.put(multicast + place(0),",
		},
		"packets by multicast become a result before the ranks' calls have been compared": {
			"if (!go_on(good))\n\t\t\t\treturn;\n\t\t\tx.store", "if (!good)\n\t\t\t\treturn;\n\t\t\tx.store",
		},
		"packets of this call are wiped": {
			"(used + SW_PACKET_GROUP_BYTES - 1) / SW_PACKET_GROUP_BYTES)", "0 * used)",
		},
		"a slice that a rank keeps does not get to its output": {
			"else if (p.take())\n\t\t\tp.keep();", "else\n\t\t\tp.take();",
		},
		// in place of the second reducer's words, which lie in its control block, those of the first, whose block begins at 65536
		"two reducers have one set of lines": {
			"* a.lines + row) * SW_REDUCE_LINE_BYTES + which}", "* a.lines + row) * SW_REDUCE_LINE_BYTES + which - a.world.control + 65536}",
		},
		"two reducers have one number of calls": {
			"own_segment(w) + w.control + zero_of_lane()", "own_segment(w) + 65536 + zero_of_lane()",
			"sw_control *c = reinterpret_cast<sw_control *>(own_segment(w) + w.control);", "sw_control *c = reinterpret_cast<sw_control *>(own_segment(w) + 65536);",
		},
		"two reducers have one set of entries": {
			"segment(a.world, dst) + a.block.entries +", "segment(a.world, dst) + a.block.entries - a.world.control + 65536 +",
		},
		"two reducers have one staging": {
			"u64 slots = a.block.input_slots + static_cast<u64>(row)", "u64 slots = a.block.input_slots - a.world.control + 65536 + static_cast<u64>(row)",
		},
	})
	findsBugs(t, "dispatch", map[string][]string{
		"the beginnings of two calls share a place": {
			"a.state.begins + ((epoch & 1)", "a.state.begins + ((epoch & 0)",
		},
		"rows of ranks for ranks of two calls share a place": {
			"(((epoch & 1) * a.world.size + src) * a.world.size + dst) * 8", "(static_cast<u64>(src) * a.world.size + dst) * 8",
		},
		"places of few tokens stay those among this rank's where outputs have no gaps": {
			"\t\tif (!t.cached && f.tells_rows())\n\t\t\tf.place();\n", "",
		},
		"a rank goes on behind a wrong choice while rows are on their way": {
			"complain(a, src, epoch), good = false;\n\t\t}\n\t\treturn good;", "return complain(a, src, epoch), false;\n\t\t}\n\t\treturn good;",
		},
		"rows go where a rank has its own, and not where the peer wants them": {
			"await_begin(a, d, epoch, word, place)", "true",
		},
		"rows of few tokens are written where the caller has no room": {
			"if (row < a.out.room)", "if (true)",
		},
		"a row goes behind the room that its rank has said": {
			"room = room_of(word);", "room = most_room;",
		},
		"a row of one's own goes behind the room": {
			"room = static_cast<u32>(a.out.room);", "room = most_room;",
		},
		"numbers of an earlier call are taken for this one's": {
			"return static_cast<u32>(word >> 32) == static_cast<u32>(epoch);", "return word != 0;",
		},
		"rows are written before the peer has begun the call": {
			"while (line.a < epoch) {", "while (false) {",
		},
		"rows are taken before all blocks of a peer have sent theirs": {
			"v.a < epoch || (!is_all(v.b)", "v.a + 2 < epoch || (!is_all(v.b)",
		},
		"a block does not count the rows of those before it": {
			"i < blockIdx.x * n; i += blockDim.x) {", "i < 0 * n; i += blockDim.x) {",
		},
		"counts are told before all blocks have counted": {
			"i < blockIdx.x * a.slots; i += threads)", "i < 0 * a.slots; i += threads)",
		},
		"the host hears of counts though a choice is no expert": {
			"wrong |= (rows & some_wrong) != 0;", "",
		},
		"a block does not hear of wrong choices of those before it": {
			"\t\t\t\t\tb.wrong = some_wrong;", "\t\t\t\t\t;",
		},
		"a second half waits for rows of a dispatch that has no room": {
			"end_waits(a, epoch); // of a second half", "; // of a second half",
		},
		"the host hears of counts though an output is too small": {
			"b.total[threadIdx.x] > a.out.most;", "false;",
		},
		"a place is loaded again before its row has been sent": {
			"if (a.depth == 1)\n\t\t\t\tbulk_await_read<0>();\n\t\t\telse\n\t\t\t\tbulk_await_read<1>();", "",
		},
		"choices of one expert get their rows in another order": {
			"s.before[slot] + earlier;", "s.before[slot] + __popc(alike) - 1 - earlier;",
		},
		"a thread counts its choices before others have ranked theirs": {
			"s.before[slot] + earlier;\n\t\t\t__syncwarp();", "s.before[slot] + earlier;",
		},
		"rows are summed before their rank has made them": {
			"first.a < epoch || second.a < epoch", "first.a + 2 < epoch || second.a + 2 < epoch",
		},
		"rows are spread before they are written": {
			"constexpr u32 behind = 4;", "constexpr u32 behind = 0;", "bulk_await_written<behind>();", "",
		},
		"a window is told before all of it is made": {
			"+ 1 == order.rows_in(k.src, k.window) * a.parts", "== 0",
		},
		"a window is told before the warps of a block have made their parts": {
			"while (good && !b.made[round % pass_board::rounds].all(round / pass_board::rounds))", "while (false)",
		},
		"what has landed is counted before the words are zero": {
			"while (good && load_acquire_sys(own(a.state.landing)) != epoch)", "while (false)",
		},
		"rows are summed before their window is made": {
			"while (load_acquire_sys(word) < epoch)", "while (load_acquire_sys(word) == 0)",
		},
		"rows of this rank's own tokens are read where nobody has put them": {
			"bool own = threadIdx.x == a.world.rank && a.sum.own != 0;", "bool own = false;",
		},
		"weights of this rank's own rows are read where nobody has put them": {
			"bool own = static_cast<u32>(d) == a.world.rank && a.sum.own != 0;", "bool own = false;",
		},
		"a rank's windows begin with its first row": {
			"(((place >> a.sum.window) + window) << a.sum.window) - place", "window << a.sum.window",
		},
		"a copy leaves out the last part of a row": {
			"if (part + 1 < end)\n\t\t\t\tload(v, row, part + 1);\n\t\t\tput(next);", "break;",
		},
		"rows in staging are made anew before peers have read them": {
			"op_of(line.b) < SW_DISPATCH_SUMS)", "true)",
		},
		"a rank's rows are its own again before peers have read them": {
			"i = threadIdx.x; i < blocks; i += blockDim.x)", "i = blocks; i < blocks; i += blockDim.x)",
		},
		"a combine leaves memory to other shapes before peers have read it": {
			"signal_read(a, epoch);\n\tif ((a.mode & SW_DISPATCH_KEEP) == 0)\n\t\tawait_read(a, epoch);\n}\n\n// The weights", "signal_read(a, epoch);\n}\n\n// The weights",
		},
		"rows are sent to memory that a rank still has for other shapes": {
			"before.a + 1 == epoch && frees(before.b)", "before.a + 1 == epoch && op_of(before.b) >= SW_DISPATCH_SUMS",
		},
		"the second half of a combine is taken for one block": {
			"signal_begin(a, threadIdx.x, epoch, 0);", "signal_begin(a, threadIdx.x, epoch, 1);",
		},
		"a float8 sum is scaled by half of its block": {
			"most_of(most, 128 / numbers", "most_of(most, 64 / numbers",
		},
		"parts of float8 sums are taken for as long as what they become": {
			"at = part * part_bytes<type, float8>(a)", "at = part * a.part",
		},
		"packets of rows of two calls share a place": {
			"a.state.packets +\n\t       ((packet::parity(epoch)", "a.state.packets +\n\t       ((packet::parity(0)",
		},
		"counts of slots of two calls share a place": {
			"a.state.slot_counts + (((epoch & 1)", "a.state.slot_counts + (((epoch & 0)",
		},
		"a row is taken when some of its packets are there": {
			"all &= has(v[i], flag);", "all |= has(v[i], flag);",
		},
		"a float8 row is taken before its packets are there": {
			"all &= v[i].has(flag);", "",
		},
		"choices of few tokens are numbered by stretch": {
			"of[j * a.slots] = rows;", "of[j * a.slots] = 0;",
		},
		"two blocks that tell of few rows tell of the same ones": {
			"i = threadIdx.x * parts() + part(); i < a.max_tokens", "i = threadIdx.x * parts(); i < a.max_tokens",
		},
		"the ends of two vectors are swapped": {
			"ends[2] | ends[3] << 16", "ends[3] | ends[2] << 16",
		},
		"places that nobody uses are not wiped": {
			"wipe(a, src, k, epoch, 16, a.state.note_stride, lane);", ";",
		},
		"rows there and back have flags alike": {
			"packet::flag(epoch) | 0x80000000", "packet::flag(epoch)",
		},
		"the same token is wiped in every call": {
			"next(epoch) + 1 < a.max_tokens ? next(epoch) + 1 : 0;", "0;",
		},
		"places that are in use are wiped": {
			"if ((come >> src & 1) == 0)", "if (true)",
		},
		"a rank goes on before its peers have begun a combine of few tokens": {
			"if (p != a.world.rank && !await_begin(a, p, epoch, word, place, gone) && !gone)", "if (false && !await_begin(a, p, epoch, word, place))",
		},
		"weights of tokens are written before a peer has begun the call": {
			"__syncthreads_or(talks && !await_begin(a, peer, epoch, word, place))", "__syncthreads_or(talks && false)",
		},
		"a combine begins before its weights of tokens are there": {
			"op_of(line.b) < SW_DISPATCH_SUMS)", "op_of(line.b) != SW_DISPATCH_SUMS)",
		},
		"weights of tokens are told of before all threads have written theirs": {
			"	__threadfence_system();\n	__syncthreads();\n	if (talks)", "	if (talks)",
		},
		"half of the lanes lack the ends of their sums": {
			"w[11] |= third & 0xffff0000;", ";",
		},
		"few rows are weighted before their weights are there": {
			"(v = packet::get(place + 16 * (k / 3)), !v.has(flag))", "(v = packet::get(place + 16 * (k / 3)), false)",
		},
		"weights of few tokens are forgotten in the call that they come in": {
			"if ((weighed >> src & 1) == 0)", "if (true)",
		},
		"weights of few tokens are never forgotten": {
			"if ((weighed >> src & 1) == 0)", "if (false)",
		},
		"rows are copied for the caller before their ranks have told of them": {
			"word = v.a >= epoch ? v.b : 0;", "word = v.a + 2 >= epoch ? v.b : 0;",
		},
		"what a dispatch leaves is copied before it has ended": {
			"	await_stream();\n	c.run(t.results);", "	c.run(t.results);",
		},
		"a dispatch that its copy counts is counted twice": {
			"		release_stream(); // for the kernel that takes or tells of the rows, which counts the call\n	else", "		release_stream(), now.advance_by_last();\n	else",
		},
	})
	findsBugs(t, "expand", map[string][]string{
		"a choice has a row behind the last": {
			"slot < a.length ? static_cast<int>(slot) : -1", "static_cast<int>(slot)",
		},
		"a warp numbers choices as if it were the first": {
			"u32 next = b.first + b.before[warp];", "u32 next = b.first;",
		},
		"an expert begins behind the last row of the one before": {
			"sum += (counts[e] + a.align - 1) / a.align * a.align;", "sum += counts[e];",
		},
		"an expert has room behind the last row": {
			"min(end, a.length) - min(first, a.length)", "end - min(first, a.length)",
		},
		"padding is not cleared": {
			"if (behind >= room)", "if (true)",
		},
		"a choice of no expert has a row": {
			"some ? __fadd_rn(sum[i], f[i]) : sum[i]", "__fadd_rn(sum[i], 1)",
		},
		"a choice whose slot is no row has one": {
			"bool some = slot < a.length;", "bool some = static_cast<int>(slot) >= 0;",
		},
	})
	findsBugs(t, "results", map[string][]string{
		"rows that did not come are copied": {
			"u64 bytes = came * p.row;", "u64 bytes = p.bytes;",
		},
		"a dispatch that was given up has rows": {
			"u64 came = failed ? 0 : ", "u64 came = ",
		},
		"a column is copied to the place of another": {
			"p.from + column * p.pitch", "p.from + column * p.bytes",
		},
		"nothing is written behind the last row": {
			"if (p.fills == 0)\n				continue;", "continue;",
		},
	})
}
