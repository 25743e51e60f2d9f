package cuda_test

import "testing"

func TestTheEmulationFindsBugsOfExchangesBetweenHosts(t *testing.T) {
	findsBugs(t, "across", map[string][]string{
		"a put is posted before its bytes": {
			"__syncthreads();\n\t\t\tif (threadIdx.x == 0) {\n\t\t\t\tat = out.send(", "if (threadIdx.x == 0) {\n\t\t\t\tat = out.send(",
		},
		"a slot is given back before all threads have read it": {
			"__syncthreads();\n\t\t\tif (threadIdx.x == 0) {\n\t\t\t\tat = in.give_back()", "if (threadIdx.x == 0) {\n\t\t\t\tat = in.give_back()",
		},
		"a chunk that is under way is taken for the next": {
			"epoch, count + 1))", "epoch, count))",
		},
		"slots are given back twice": {
			"return ++count % r.gives != 0 ||", "++count;\n\t\treturn to_proxy().post(w, epoch, {0, 0, 0, r.given, r.peer, 0, {0, 0}}) != 0 &&\n\t\t       ",
		},
		"a queue laps its proxy": {
			"if (number > q.slots && !await_done(", "if (false && !await_done(",
		},
		"chunks of a message that nobody wants are left": {
			"} while (done < h.sent);", "} while (take != 0 && done < h.sent);",
		},
		"a sender does not hear that another length was expected": {
			"else if (h.expected != static_cast<u64>(sends))", "else if (false)",
		},
		"a message of another length is taken": {
			"return h.call == epoch && h.refuses == 0 && h.sent == static_cast<u64>(expects);", "return true;",
		},
		"a rank sends what it has refused": {
			"h.sent = h.refuses != 0 ? 0 : bytes;", "h.sent = bytes;",
		},
		"ranks of a host do not hear which part was refused": {
			"if (load_relaxed_sys(at) != epoch)", "if (true)",
		},
		"each block says that the kernel ends": {
			"add_acq_rel_gpu(&x.words()->ended, 1) == gridDim.x - 1", "add_acq_rel_gpu(&x.words()->ended, 1) < gridDim.x",
		},
	})
}
