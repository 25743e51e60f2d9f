package explore_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/test/explore"
)

// maskWorlds are ranks, calls, and what happens to which rank.
var maskWorlds = []struct {
	ranks, calls, victim int
	events               []explore.MaskEvent
	returns              bool
}{
	{2, 4, 0, []explore.MaskEvent{explore.Killed}, false},
	{2, 4, 1, []explore.MaskEvent{explore.Masked}, true},
	{2, 6, 1, []explore.MaskEvent{explore.Masked, explore.Killed}, true},
	{3, 2, 0, []explore.MaskEvent{explore.Killed}, false},
	{3, 3, 2, []explore.MaskEvent{explore.Masked}, false},
	{3, 3, 1, []explore.MaskEvent{explore.Masked}, true},
	{3, 2, 0, []explore.MaskEvent{explore.Masked, explore.Killed}, true},
	{2, 4, 1, []explore.MaskEvent{explore.Killed, explore.Replaced, explore.Killed}, true},
	{3, 3, 1, []explore.MaskEvent{explore.Killed, explore.Replaced}, true},
	{3, 2, 1, []explore.MaskEvent{explore.Masked, explore.Masked}, true},
}

// Whenever a rank is masked, dies, or comes back, the others agree in every call on who takes part, read the notices of that call, and
// end; nobody writes rows to a rank that has gone on.
func TestMasks(t *testing.T) {
	for _, w := range maskWorlds {
		r, err := explore.Check(explore.NewMasks(w.ranks, w.calls, w.victim, w.events, w.returns, explore.NoMasksBug), 1<<23)
		require.NoError(t, err)
		require.Nil(t, r.Violation, "%v: %v", w, r.Violation)
		t.Logf("%v: %d states", w, r.States)
	}
}

func TestMasksFindsBugs(t *testing.T) {
	for bug, name := range map[explore.MasksBug]string{
		explore.OwnCast: "own cast", explore.OwnNotice: "own notice", explore.NoLastLook: "no last look",
		explore.WritersNotAwaited: "writers not awaited", explore.OwnWordLast: "own word last", explore.AdmittedByEach: "admitted by each",
		explore.MaskedComesBack: "masked comes back", explore.NoTerms: "no terms",
	} {
		t.Run(name, func(t *testing.T) {
			found := ""
			for _, w := range maskWorlds {
				r, err := explore.Check(explore.NewMasks(w.ranks, w.calls, w.victim, w.events, w.returns, bug), 1<<23)
				require.NoError(t, err)
				if r.Violation != nil {
					found = fmt.Sprintf("%v\n%v", w, r.Violation)
					break
				}
			}
			require.NotEmpty(t, found)
			t.Log(found)
		})
	}
}
