package cuda_test

import "testing"

func TestTheEmulationFindsBugsOfMessages(t *testing.T) {
	findsBugs(t, "messages", map[string][]string{
		"a receive takes a message of another tag": {
			"numbers[entry] == 0 && m.entry(entry).tag == l.tag", "numbers[entry] == 0",
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
