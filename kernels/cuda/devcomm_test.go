package cuda_test

import "testing"

func TestTheEmulationFindsBugsOfKernelsOfUsers(t *testing.T) {
	findsBugs(t, "devcomm", map[string][]string{
		"calls are not counted": {
			"detail::store_relaxed(at, it);", "",
		},
		"a call is counted before all blocks have read its number": {
			"count_reader(words) == gridDim.x - 1", "count_reader(words) == 0",
		},
		"a signal comes before all threads of the block": {
			"__syncthreads();\n\t\tif (threadIdx.x == 0) {\n\t\t\tdetail::fence();", "if (threadIdx.x == 0) {",
		},
		"threads go on before the block's signal is there": {
			"return __syncthreads_or(failed) == 0;", "return !failed;",
		},
		"signals of two ranks share a line": {
			"(from * static_cast<uint64_t>(c.signals) + index)", "index",
		},
		"a signal of an earlier call is taken for this one's": {
			"detail::load_acquire(word) < it;", "detail::load_acquire(word) == 0;",
		},
		"a wait is given up without a last look": {
			"if (over != 0) {", "if ((over = reason(since)) != 0) {",
		},
		"a kernel of another version goes on": {
			"good = good && c->version == version;", "",
		},
		"a part is written before its receiver has begun": {
			"!call.wait(peer, begins)", "false",
		},
	})
}
