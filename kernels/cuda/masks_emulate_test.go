package cuda_test

import "testing"

// Bugs of calls that go on without ranks, put back.
func TestTheEmulationFindsBugsOfMasks(t *testing.T) {
	findsBugs(t, "dispatch_masked", map[string][]string{
		"blocks of a rank send to a rank or not, each as it likes": {
			"if (seen >> 32 == static_cast<u32>(epoch))\n\t\treturn out_of(seen);\n", "return out_of(mine);\n",
		},
		"lanes of a warp are of two minds about a masked rank": {
			"__any_sync(~0u, masks::without(a, x.src))", "masks::without(a, x.src)",
		},
		"rows stay that have come in part": {
			"few_forget<by_expert>(t, lost & masks::all);", "a.out.rank_counts[0] = a.out.rank_counts[0];",
		},
		"sums have parts of what a masked rank made": {
			"without = last & masks::all;", "without = 0;",
		},
		"ranks take a rank in behind different combines": {
			"static_cast<u64>(in_of(seen) & ~static_cast<u32>(mask >> SW_MASK_ENDED))", "static_cast<u64>(asking)",
		},
		"a rank that knows of no masked one leaves it to others who comes in": {
			"ended = static_cast<u32>(mask >> SW_MASK_ENDED), asking = 0;\n",
			"ended = static_cast<u32>(mask >> SW_MASK_ENDED), asking = 0;\n\tif (masked == 0)\n\t\treturn;\n",
		},
		"a masked rank waits on": {
			"if ((now(a) >> a.world.rank & 1) == 0)", "if (w.polls != 0)",
		},
		"words of what has landed stay short": {
			"static_cast<volatile u32 *>(a.send.landed)[slot] = t.count[slot];", "",
		},
		"a wait for a rank's data outlasts the rank": {
			"\t\tlast = without(a, peer);", "\t\tlast = false;",
		},
		"counts are added up once with and once without a rank": {
			"while (masks::on(a) && !decided()); // then anew", "while (false);",
		},
	})
}
