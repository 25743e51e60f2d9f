package cuda_test

import "testing"

func TestTheEmulationFindsBugsOfRollCalls(t *testing.T) {
	findsBugs(t, "rollcall", map[string][]string{
		"the signal of an earlier call is taken for this one's": {
			"while (load_acquire_sys(line) < last_seq(epoch))", "while (load_acquire_sys(line) == 0)",
		},
	})
}
