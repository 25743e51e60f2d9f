package cuda_test

import "testing"

func TestTheEmulationFindsBugsOfTransfers(t *testing.T) {
	findsBugs(t, "p2p", map[string][]string{
		"the signal of an earlier put is taken for the next one's": {
			"while (load_acquire_sys(line) <= consumed)", "while (load_acquire_sys(line) == 0)",
		},
		"a wait consumes all signals that it sees": {
			"store_relaxed_sys(count, consumed + 1);", "store_relaxed_sys(count, load_relaxed_sys(line) + 1);",
		},
		"signals are not counted": {
			"u64 number = load_relaxed_sys(count) + 1;", "u64 number = 1;",
		},
		"the signals of two ranks share a line": {
			"a.block.signals + semaphore_of(a, a.world.rank) * SW_LINE_BYTES", "a.block.signals + semaphore_of(a, 0) * SW_LINE_BYTES",
		},
		"a wait is given up without a last look": {
			"if ((polls & last) == 0) {", "if (false) {", "slow_polls = 256", "slow_polls = 2",
		},
		"warps of different blocks move the same tiles": {
			"k = threadIdx.x / 32 * gridDim.x + blockIdx.x; all.has(k); k += warps", "k = threadIdx.x / 32; all.has(k); k += warps",
		},
	})
}
