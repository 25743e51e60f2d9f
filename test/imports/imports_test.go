// Package imports tests what packages of Switchyard may depend on.
package imports

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/switchyard-moe/switchyard"

// goList runs go list from the root of the module.
func goList(t *testing.T, args ...string) []string {
	t.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("needs the go command")
	}
	cmd := exec.Command("go", append([]string{"list"}, args...)...)
	cmd.Dir = filepath.Join("..", "..")
	if _, err := os.Stat(filepath.Join(cmd.Dir, "go.mod")); err != nil {
		t.Skipf("needs the sources: %v", err)
	}
	watch(t, cmd.Dir)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(t, err, stderr.String())
	return strings.Split(strings.TrimSpace(string(out)), "\n")
}

// watch looks at every source, so that go test does not take a result from its cache that they have outdated.
func watch(t *testing.T, root string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		switch name := d.Name(); {
		case err != nil:
			return err
		case d.IsDir() && path != root && strings.HasPrefix(name, "."):
			return filepath.SkipDir
		case strings.HasSuffix(name, ".go"):
			_, err = os.Stat(path)
		}
		return err
	}))
}

// A c-shared object with go-nvml in it does not load: its symbols are not resolved. Only programs may import it.
func TestNothingDependsOnNVML(t *testing.T) {
	const report = module + "/device/nvml"
	for _, line := range goList(t, "-e", "-f", "{{.ImportPath}} {{.Name}} {{join .Deps \" \"}}", "./...") {
		words := strings.Fields(line)
		if len(words) < 2 || words[0] == report {
			continue
		}
		path, name, deps := words[0], words[1], words[2:]
		bindings := strings.HasPrefix(path, module+"/bindings/")
		if name == "main" && !bindings {
			continue // a program may want the report
		}
		for _, d := range deps {
			require.False(t, d == report || strings.HasPrefix(d, "github.com/NVIDIA/"), "%s depends on %s", path, d)
		}
	}
}

// floors is the house from the ground up. A package imports only packages of floors below its own, and of its own unit: what a
// line names is a unit with all packages below it, unless they have a line themselves. make docs copies the table to ARCHITECTURE.md.
var floors = [][]string{
	{"internal/env", "internal/loopback", "internal/platform", "internal/curve", "internal/proctest", "."}, // the process around the library, and the version
	{"internal/fingerprint"}, // what tells builds of a release apart
	{"internal/flight"},      // what ranks note of their calls
	{"observe"},              // what ranks do, for those who look on
	{"internal/shm", "internal/vec", "internal/cuda"}, // mappings, vector loops, the CUDA driver
	{"comm", "device"},               // ranks meet; streams and events of a device
	{"device/nvml", "kernels/plan"},  // what NVIDIA's management library tells; collectives that users write, and their check
	{"internal/rails"},               // what carries bytes between hosts
	{"kernels"},                      // the launch language of plans and engines
	{"kernels/host", "kernels/cuda"}, // the engines, in Go and in CUDA C++
	{"internal/agree"},               // ranks find out whether they make the same call with the same values
	{"internal/rails/proxy"},         // what puts on behalf of GPUs
	{"memory"},                       // the symmetric heap, pool and registration; it chooses the engine
	{"internal/communicator"},        // the life of a communicator
	{"alltoallv", "allreduce", "p2p", "memory/devcomm"}, // plans, choice of algorithm, gradient buckets; two ranks; kernels of users
	{"dispatch"}, // MoE routing, expert placement
	{"stack", "rebalance", "internal/doctor"}, // all that a worker opens on a group; experts move to where ranks are equally busy; a look at the machine
	{"internal/worldtest", "test"},            // tests of several ranks, and of pages
	{"bindings", "cmd", "examples"},           // programs
}

// importers bounds who imports a package beyond what the floors say.
var importers = map[string][]string{
	"kernels/host":            {"memory", "test/explore", "test/sim"}, // plans know of no engine
	"kernels/cuda":            {"memory", "internal/rails/proxy"},
	"internal/cuda":           {"device", "kernels/cuda", "memory", "internal/communicator", "internal/cuda/emulated", "test/perf"}, // devices are device's, but for their engine, their memory and ranges of a profile
	"internal/cuda/emulated":  {},                                                                                                   // only files of tests
	"device/nvml":             {"cmd/switchyard", "test/soak"},
	"internal/rails/double":   {}, // only files of tests
	"internal/rails/railtest": {"internal/worldtest"},
	"internal/worldtest":      {},
	"internal/proctest":       {"internal/worldtest", "internal/rails/railtest"},
}

// uses says what packages import besides floors. internal/cuda and bindings/python/abi are C on the other side; unsafe is for mapped memory, for the
// processor's vectors, and at those two borders.
var uses = map[string][]string{
	"C":      {"internal/rails/ucx", "internal/cuda", "internal/cuda/layout", "bindings/python/abi", "device/nvml"},
	"unsafe": {"internal/rails/ucx", "internal/cuda", "internal/cuda/layout", "bindings/python/abi", "device/nvml", "internal/shm", "internal/vec"},
}

// inside is the path of a package in this module, "." for the root.
func inside(path string) (rest string, ours bool) {
	if path == module {
		return ".", true
	}
	return strings.CutPrefix(path, module+"/")
}

// unit is the floor of a package and which line of the table it belongs to.
func unit(path string) (floor int, name string) {
	floor = -1
	for i, units := range floors {
		for _, u := range units {
			if (path == u || strings.HasPrefix(path, u+"/")) && len(u) > len(name) {
				floor, name = i, u
			}
		}
	}
	return floor, name
}

func TestPackagesImportOnlyFloorsBelow(t *testing.T) {
	for _, line := range goList(t, "-e", "-f", "{{.ImportPath}} {{join .Imports \" \"}}", "./...") {
		words := strings.Fields(line)
		from, _ := inside(words[0])
		floor, home := unit(from)
		require.GreaterOrEqual(t, floor, 0, "%s is on no floor: give it one in the table", from)
		for _, w := range words[1:] {
			if allowed, bounded := uses[w]; bounded {
				require.Contains(t, allowed, from, "%s imports %q", from, w)
			}
			to, ours := inside(w)
			if !ours {
				continue
			}
			if allowed, bounded := importers[to]; bounded {
				require.Contains(t, allowed, from, "%s imports %s", from, to)
			}
			below, there := unit(to)
			require.True(t, there == home || below < floor, "%s (floor %d) imports %s (floor %d)", from, floor, to, below)
		}
	}
}

// The table is about packages that are there.
func TestTheTablesNamePackages(t *testing.T) {
	all := goList(t, "-e", "./...")
	there := func(p string) bool {
		return slices.ContainsFunc(all, func(q string) bool {
			q, _ = inside(q)
			return q == p || strings.HasPrefix(q, p+"/")
		})
	}
	var names []string
	for _, units := range floors {
		names = append(names, units...)
	}
	for _, m := range []map[string][]string{importers, uses} {
		for to, from := range m {
			if to != "C" && to != "unsafe" {
				names = append(names, to)
			}
			names = append(names, from...)
		}
	}
	for _, p := range names {
		require.True(t, there(p), "there is no %s", p)
	}
}

// Only internal/env reads the environment: what it does not list, users cannot know of. Tests, examples and what builds the kernels are
// programs of their own; Python's core sets in Go's copy of the environment what has changed in the process's; errors of UCX name UCX's own
// variables.
func TestOnlyEnvReadsTheEnvironment(t *testing.T) {
	allowed := []string{"internal/env", "internal/proctest", "internal/cuda/emulated", "test", "examples", "kernels/cuda/internal/genfatbin", "bindings/python/core", "internal/rails/ucx"}
	reads := regexp.MustCompile(`\bos\.(Getenv|LookupEnv|ExpandEnv)\b|\b(syscall|unix)\.Getenv\b|[^\w.]getenv\(`)
	root := filepath.Join("..", "..")
	seen := 0
	require.NoError(t, filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			if err == nil && path != root && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata") {
				return filepath.SkipDir
			}
			return err
		}
		from, err := filepath.Rel(root, path)
		if err != nil || strings.HasSuffix(path, "_test.go") || !slices.Contains([]string{".go", ".c", ".h", ".cu", ".cuh"}, filepath.Ext(path)) {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		at := reads.Find(text)
		if at == nil {
			return nil
		}
		seen++
		if !slices.ContainsFunc(allowed, func(p string) bool { return strings.HasPrefix(from, p+"/") }) {
			t.Errorf("%s: %s: internal/env reads the environment", from, at)
		}
		return nil
	}))
	require.Positive(t, seen)
}

// Packages whose builds ranks compare embed all of their sources.
func TestFingerprintsHaveAllSources(t *testing.T) {
	const own = module + "/internal/fingerprint"
	form := `{{.ImportPath}}|{{join .GoFiles " "}} {{join .CgoFiles " "}} {{join .IgnoredGoFiles " "}}|{{join .EmbedFiles " "}}|{{join .Imports " "}}`
	var found []string
	for _, line := range goList(t, "-f", form, "./...") {
		parts := strings.Split(line, "|")
		if !slices.Contains(strings.Fields(parts[3]), own) {
			continue
		}
		found = append(found, strings.TrimPrefix(parts[0], module+"/"))
		require.Subset(t, strings.Fields(parts[2]), strings.Fields(parts[1]), "%s: add the file to the lines go:embed", parts[0])
	}
	require.ElementsMatch(t, []string{"comm", "kernels/host", "kernels/cuda"}, found)
}
