package explore_test

import (
	"testing"

	"github.com/switchyard-moe/switchyard/test/explore"
)

// messagesWorlds are worlds in which every order of steps and of stores is tried.
var messagesWorlds = map[string]explore.MessagesWorld{
	"one box":                {Tags: []int{0, 0, 0}, Wants: []int{0, 0, 0}, Boxes: 1},
	"tags out of order":      {Tags: []int{0, 1, 0}, Wants: []int{1, 0, 0}, Boxes: 2},
	"a sender gives up":      {Tags: []int{0, 0}, Wants: []int{0, 0}, Boxes: 1, GiveUp: true},
	"two boxes, it gives up": {Tags: []int{0, 1, 0}, Wants: []int{1, 0}, Boxes: 2, GiveUp: true},
	"four in two boxes":      {Tags: []int{0, 1, 0, 1}, Wants: []int{1, 0, 1, 0}, Boxes: 2, GiveUp: true},
	"nobody wants one":       {Tags: []int{1, 0}, Wants: []int{0}, Boxes: 2, GiveUp: true},
}

// Whatever the ranks do first, and whenever a store is seen, each message arrives whole and in its order or is withdrawn, and both ranks know
// which.
func TestMessages(t *testing.T) {
	for name, w := range messagesWorlds {
		t.Run(name, func(t *testing.T) {
			safe(t, explore.NewMessages(w, explore.NoMessagesBug))
		})
	}
}

// The mistakes are found.
func TestMessagesFindsBugs(t *testing.T) {
	for name, bug := range map[string]explore.MessagesBug{
		"a withdrawal without a fence":             explore.MessagesWithdrawUnfenced,
		"a claim without a fence":                  explore.MessagesClaimUnfenced,
		"a withdrawal without a look":              explore.MessagesWithdrawUnseen,
		"a claim without a look":                   explore.MessagesClaimUnseen,
		"a message that is not offered again":      explore.MessagesNoSecondOffer,
		"a header before the bytes":                explore.MessagesHeaderFirst,
		"a message that is taken unread":           explore.MessagesTakenUnread,
		"a message that does not wait for its box": explore.MessagesNoRoom,
		"a box whose message is over unseen":       explore.MessagesRoomUnseen,
		"one flag for all numbers":                 explore.MessagesOneFlag,
	} {
		t.Run(name, func(t *testing.T) {
			broken(t, messagesWorlds, func(w explore.MessagesWorld) explore.System { return explore.NewMessages(w, bug) }, "")
		})
	}
}
