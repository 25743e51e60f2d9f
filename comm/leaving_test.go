package comm

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A node that has ended in one way does not end in another, and none comes back.
func TestANodeEndsOnce(t *testing.T) {
	all := []nodePhase{nodeOpen, lingering, nodeClosed, nodeKilled}
	for _, from := range all {
		var to []string
		for _, next := range all {
			n := newNode(0, 1, nil)
			if n.phase = from; n.move(next) {
				to = append(to, next.String())
				require.Equal(t, next, n.phase)
			} else {
				require.Equal(t, from, n.phase)
			}
		}
		require.Equal(t, map[nodePhase][]string{nodeOpen: {"lingering", "closed", "killed"}, lingering: {"closed"}}[from], to, from)
	}
}

// A peer is met once, goes once, and comes back only as a process that is awaited.
func TestAPeerGoesOnce(t *testing.T) {
	all := []peerPhase{peerUnmet, peerLinked, peerLeaving, peerRelaying, peerGone, peerAwaited}
	for _, from := range all {
		var to []string
		for _, next := range all {
			p := peer{phase: from}
			if p.move(next) {
				to = append(to, next.String())
				require.Equal(t, next, p.phase)
			} else {
				require.Equal(t, from, p.phase)
			}
		}
		require.Equal(t, map[peerPhase][]string{
			peerUnmet: {"linked", "leaving", "gone"}, peerLinked: {"leaving"}, peerLeaving: {"relaying", "gone"}, peerRelaying: {"gone"},
			peerGone: {"awaited"}, peerAwaited: {"linked", "gone"},
		}[from], to, from)
	}
}
