package cuda_test

import "testing"

func TestTheEmulationFindsBugsOfRings(t *testing.T) {
	findsBugs(t, "rings", map[string][]string{
		"a descriptor's number comes before the rest": {
			"\t\tstore16_relaxed_sys(at, p.place, p.source);", "\t\tstore_relaxed_sys(at + SW_PUT_NUMBER, number);\n\t\tstore16_relaxed_sys(at, p.place, p.source);",
		},
		"a queue laps its proxy": {
			"if (number > q.slots && !await_done(", "if (false && !await_done(",
		},
		"a number is known as done that is not": {
			"static_cast<unsigned long long>(now));", "static_cast<unsigned long long>(now + 1));",
		},
		"a chunk is read before it has landed": {
			"epoch, count + 1))", "epoch, count))",
		},
		"slots are given back twice": {
			"return ++count % r.gives != 0 ||", "++count;\n\t\treturn to_proxy().post(w, epoch, {0, 0, 0, r.given, r.peer, 0, {0, 0}}) != 0 &&\n\t\t       ",
		},
		"a sender does not wait for its receiver": {
			"if (count >= r.slot_count) {", "if (false) {",
		},
		"a slot is given back before it has been read": {
			"epoch, puts)", "epoch, puts - 1)",
		},
		"chunks are counted anew in each call": {
			"count(load_relaxed_sys(r.state))", "count(0)",
		},
	})
}
