package cuda_test

import "testing"

func TestTheEmulationFindsBugsOfMessages(t *testing.T) {
	findsBugs(t, "messages", map[string][]string{
		"a receive takes a message of another tag": {
			"numbers[entry] == 0 && e.tag == tag && ", "numbers[entry] == 0 && ",
		},
		"a receive from one rank takes a message of another": {
			"(e.peer == m.peer || e.peer == SW_ANY_RANK)", "true",
		},
		"a receive from any rank comes before earlier ones": {
			"for (entry = 0; entry < m.count; entry++)", "for (entry = m.count; entry-- > 0;)",
		},
		"blocks look for the message of a rank in the staging of another": {
			"\t\tif (m.turns)\n\t\t\tm.turn_to(now.peer);", "",
		},
		"a leader's threads look for the message of a rank in the boxes of another": {
			"\t\tif (m.turns)\n\t\t\tm.turn_to(t.peer);", "",
		},
		"the rank that sent is that of the last look": {
			"store_relaxed_sys(e.place, m.peer);", "store_relaxed_sys(e.place, turn);",
		},
		"receives from any rank prefer the first": {
			"store_relaxed_sys(turns(), turn);", "turn = 0;",
		},
		"a receive from any rank gives up while ranks move bytes": {
			"quiet = now == moved ? quiet + 1 : 0;", "quiet++;",
		},
		"a receive from any rank never gives up": {
			"if (quiet == moved_looks)", "if (false)",
		},
		"a sender withdraws a message that is claimed": {
			"if (load16_acquire_sys(answer(n)).a >> SW_ANSWER_BITS == n) {", "if (n == 0) {",
		},
		"a receiver takes a message that is withdrawn": {
			"return !gone(n, load_acquire_sys(state(n)));", "return true;",
		},
		"a box is used again before its message is read": {
			"if (n <= m.a.boxes)", "if (n > 0)",
		},
		"a box is used again before its sender has seen that its message is over": {
			"if (numbers[i] == before)", "if (n == 0)",
		},
		"a slot of staging is used again before its chunk is copied": {
			"k >= SW_STAGING_SLOTS &&", "k > SW_STAGING_SLOTS &&",
		},
		"the chunks of an earlier message are taken for this one's": {
			"m.of_block(m.a.block.filled, m.peer), seq(h.claim, k + 1))", "m.of_block(m.a.block.filled, m.peer), seq(1, k + 1))",
		},
		"a leader does not wait for the other blocks": {
			"while ((v = load_acquire_sys(m.done(b))) >> 1 < item)", "while ((v = load_acquire_sys(m.done(b))) == 1)",
		},
		"the packets of an earlier message are taken for this one's": {
			"while (!q.get(p.wire, k, flag))", "while (!q.get(p.wire, k, flag) && flag == 1)",
		},
		"a block that was not launched does an old item": {
			"for (u32 b = m.blocks; b < m.a.blocks; b++)", "for (u32 b = m.blocks; b < m.blocks; b++)",
		},
		"a complaint is told again": {
			"store_relaxed_sys(heard, which.a);", "",
		},
		"a send is over when its message is posted": {
			"if (posted == end && open == 0) {", "if (posted == end) {",
		},
	})
}
