package cuda_test

import "testing"

func TestTheEmulationFindsBugsOfPlans(t *testing.T) {
	findsBugs(t, "plans", map[string][]string{
		"a part begins before all ranks have ended the one before": {
			"(part > 0 || exposed) && !meet_ranks()", "part == 0 && exposed && !meet_ranks()",
		},
		"input in slots is read before it is there": {
			"(part > 0 || exposed) && !meet_ranks()", "part > 0 && !meet_ranks()",
		},
		"a part is told of before all warps have copied their input": {
			"\t\t__syncthreads();\n\t\tbool all = true;", "\t\tbool all = true;",
		},
		"a signal comes before all warps have moved their data": {
			"\t\tif (moved)\n\t\t\tmeet_threads();", "",
		},
		"a chunk is read before what its signal tells of": {
			"\t\tif (!meet_threads())\n\t\t\treturn false;\n\t\tif (s.kind == SW_PLAN_REDUCE)", "\t\tif (s.kind == SW_PLAN_REDUCE)",
		},
		"an output is taken out of slots before the steps have ended": {
			"\t\treturn meet_threads();\n", "\t\treturn true;\n",
		},
		"signals of two parts have one number": {
			"part * s.total + s.number", "s.number",
		},
		"signals have the numbers of an earlier call": {
			"return seq(epoch, part * s.total", "return seq(1, part * s.total",
		},
		"all blocks have one semaphore": {
			"* a.reduce.lines + blockIdx.x", "* a.reduce.lines",
		},
		"averages of some ranks are divided": {
			"op == SW_OP_AVG && s.last == 0", "op == SW_OP_MIN && s.last > 1",
		},
		"steps are read over while warps still do those before": {
			"if (!meet_threads()) // none", "if (!good) // none",
		},
		"a table of rows is made while warps still work with it": {
			"b.folds[fold_turn & 1]", "b.folds[0]",
		},
		"a chunk with an element more has the stripes of the others": {
			"stripes[chunk < a.longer]", "stripes[0]",
		},
		"what is in slots is looked for in the buffer": {
			"(staged[buffer] >> rank & 1) != 0", "staged[buffer] == 1ull << rank",
		},
		"a plan and another kernel take each other's calls for theirs": {
			"e.shape != a.shape || e.call != a.call || ", "e.shape != a.shape || ((e.call ^ a.call) & 0xffffff) != 0 || ",
		},
	})
}
