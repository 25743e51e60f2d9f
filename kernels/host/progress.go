package host

// A deadline measures silence: a rank that moves bytes is alive, though a peer may hear nothing of it for long. A whole message goes with one
// signal, and messages to others may come first. So every rank counts what it moves, in its own segment, and a rank that waits looks there: at
// the rank that it waits for, at the one that this rank waits for, and so on. It counts by communicator. Ranks of other
// hosts hear of it by empty puts (far). The bytes of a call are finite, so no wait is endless, whatever its peer does in other calls.

const (
	// movedOffset is where that word is, from the one that counts the communicator's calls.
	movedOffset = 16
	// movedBytes is how much a rank moves between two steps of the word. That takes 0.1 ms on a core of its own.
	movedBytes = 1 << 20
	// looksAtMoved is how often a wait looks at the words until its deadline.
	looksAtMoved = 8
)

// moved counts bytes that this rank has moved in the call.
func (w *waiter) moved(bytes int64) {
	if w.carried += bytes; w.carried >= movedBytes {
		w.carried = 0
		w.e.word(w.e.space.Rank, w.call.at+movedOffset).Add(1)
		w.say()
	}
}

// anyMoved reports whether peer has moved anything since this was asked last in this wait, or the rank that peer waits for, and so on.
func (w *waiter) anyMoved(peer int) (any bool) {
	e := w.e
	if len(w.moves) == 0 {
		for p := range e.peers {
			w.moves = append(w.moves, e.word(p, w.call.at+movedOffset).Load())
		}
		return false
	}
	for range e.peers {
		if n := e.word(peer, w.call.at+movedOffset).Load(); n != w.moves[peer] {
			w.moves[peer], any = n, true
		}
		next, _ := e.awaits(peer)
		if next < 0 || next >= len(e.peers) || next == e.space.Rank {
			break
		}
		peer = next
	}
	return any
}
