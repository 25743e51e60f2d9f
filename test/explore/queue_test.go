package explore_test

import (
	"testing"

	"github.com/switchyard-moe/switchyard/test/explore"
)

// queueWorlds are worlds in which every order of steps is tried.
var queueWorlds = map[string]explore.QueueWorld{
	"one slot of each":   {Blocks: 2, Chunks: 2, Slots: 1, Descriptors: 1},
	"few descriptors":    {Blocks: 2, Chunks: 2, Slots: 2, Descriptors: 2},
	"one block":          {Blocks: 1, Chunks: 4, Slots: 2, Descriptors: 2},
	"more blocks":        {Blocks: 3, Chunks: 1, Slots: 1, Descriptors: 2},
	"more than is asked": {Blocks: 1, Chunks: 3, Slots: 4, Descriptors: 8},
}

// Whatever blocks, proxy, network and receivers do first, every chunk comes once, whole, and in its order.
func TestQueue(t *testing.T) {
	for name, w := range queueWorlds {
		t.Run(name, func(t *testing.T) {
			safe(t, explore.NewQueue(w, explore.NoQueueBug))
		})
	}
}

// The mistakes are found.
func TestQueueFindsBugs(t *testing.T) {
	for name, bug := range map[string]explore.QueueBug{
		"the number before the descriptor": explore.QueueNumberFirst,
		"a queue that laps":                explore.QueueLaps,
		"descriptors that are done twice":  explore.QueueDoneTwice,
		"a descriptor that is done unread": explore.QueueDoneUnread,
		"a slot that is given back twice":  explore.QueueGivesTwice,
		"a slot that is given back unread": explore.QueueGivesUnread,
		"a signal before its put":          explore.QueueSignalBeforePut,
		"the newest put counts":            explore.QueueNewestCounts,
	} {
		t.Run(name, func(t *testing.T) {
			broken(t, queueWorlds, func(w explore.QueueWorld) explore.System { return explore.NewQueue(w, bug) }, "")
		})
	}
}
