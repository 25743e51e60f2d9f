package cuda_test

import "testing"

func TestTheEmulationFindsBugsOfMessages(t *testing.T) {
	findsBugs(t, "messages", map[string][]string{
		"a receive takes a message of another tag": {
			"numbers[entry] == 0 && e.tag == tag && ", "numbers[entry] == 0 && ",
		},
		"a receive from one rank takes a message of another": {
			"(few || e.peer == m.peer || e.peer == SW_ANY_RANK)", "true",
		},
		"a receive from any rank comes before earlier ones": {
			"for (entry = 0; entry < m.count; entry++)", "for (entry = m.count; entry-- > 0;)",
		},
		"blocks look for the message of a rank in the staging of another": {
			"\t\tif (m.turns)\n\t\t\tm.turn_to(now.peer);", "",
		},
		"a leader's threads look for the message of a rank in the boxes of another": {
			"\t\tif (!few && m.turns)\n\t\t\tm.turn_to(t.peer);", "",
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
			"return !gone(n, now);", "return true;",
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
			"while ((v = load_acquire_sys(m.done(k))) >> 1 < item)", "while ((v = load_acquire_sys(m.done(k))) == 1)",
		},
		"the packets of an earlier message are taken for this one's": {
			"while (!q.get(p.wire, k, flag))", "while (!q.get(p.wire, k, flag) && flag == 1)",
		},
		"a block that was not launched does an old item": {
			"for (u32 k = m.blocks; k < m.a.blocks; k++)", "for (u32 k = m.blocks; k < m.blocks; k++)",
		},
		"a complaint is told again": {
			"store_relaxed_sys(m.counter(offsetof(sw_message_counters, heard)), which.a);", "",
		},
		"a receiver forgets which messages it has taken early": {
			"early > 0 && load_relaxed_sys(ended(low)) >= low", "false",
		},
		"a sender lets its blocks go before the last message": {
			"m.peer, posted == end && open == 1};", "m.peer, true};",
		},
		"a sender lets its blocks go while they may have to push": {
			"static_cast<u32>(__popcll(read)) == open", "open < 2",
		},
		"a receiver lets its blocks go before the last message": {
			"return {deed::drain, i, n, claim, 0, stripes, m.peer, left == 1};", "return {deed::drain, i, n, claim, 0, stripes, m.peer, true};",
		},
		"a block takes half of an item": {
			"!p.has(flag) || !q.has(flag) || !r.has(flag)", "!r.has(flag)",
		},
		"a box is free when its message was free before the launch": {
			"b.answers[box] >= over", "b.answers[box] > 0",
		},
		"a send is over when its message is posted": {
			"if (posted == end && open == 0) {", "if (posted == end) {",
		},
	})
}
