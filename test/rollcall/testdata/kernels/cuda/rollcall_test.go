package cuda_test

import "testing"

func TestTheEmulationFindsBugsOfRollCalls(t *testing.T) {
	findsBugs(t, "rollcall", map[string][]string{
		"the signal of an earlier call is taken for this one's": {
			"theirs.await(a.world, peer, epoch, last_seq(epoch))", "theirs.await(a.world, peer, epoch, 1)",
		},
	})
}
