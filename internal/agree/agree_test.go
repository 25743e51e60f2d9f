package agree

import (
	"encoding/json"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/comm"
)

// on has n ranks claim at the same time.
func on(t *testing.T, n int, claim func(rank int) (Claim, error)) ([][]string, []error) {
	groups, err := comm.Local(n)
	require.NoError(t, err)
	owns, errs := make([][]string, n), make([]error, n)
	var wg sync.WaitGroup
	for r, g := range groups {
		wg.Go(func() {
			c, failed := claim(r)
			claims, err := On(t.Context(), g, c, failed)
			owns[r], errs[r] = claims.Owns(), err
		})
	}
	wg.Wait()
	for _, g := range groups {
		require.NoError(t, g.Close())
	}
	return owns, errs
}

func TestOwnWordsAreHeardByAll(t *testing.T) {
	owns, errs := on(t, 3, func(r int) (Claim, error) { return Claim{Must: Same("a", "b"), Own: string(rune('x' + r))}, nil })
	for r := range owns {
		require.NoError(t, errs[r])
		require.Equal(t, []string{"x", "y", "z"}, owns[r])
	}
}

func TestF3_DifferencesAndRefusalsAreEveryRanksError(t *testing.T) {
	_, errs := on(t, 3, func(r int) (Claim, error) { return Claim{Must: Same("a", string(rune('0'+r/2)))}, nil })
	for _, err := range errs {
		require.ErrorIs(t, err, comm.ErrMismatch)
		require.ErrorContains(t, err, "rank 0 has 0; rank 2 has 1")
	}
	mine := errors.New("bad value 7")
	_, errs = on(t, 2, func(r int) (Claim, error) {
		if r == 1 {
			return Claim{}, mine
		}
		return Claim{Must: Same("a")}, nil
	})
	require.ErrorIs(t, errs[1], mine)
	require.ErrorContains(t, errs[0], "rank 1 refused: bad value 7")
	_, errs = on(t, 2, func(r int) (Claim, error) { return Claim{Must: make([]Value, r)}, nil })
	require.ErrorContains(t, errs[0], "different versions")
}

// What is compared has both values in the error, and a refusal its condition, whatever else is wrong.
func TestF3_ClaimsAreCompared(t *testing.T) {
	encode := func(claims ...Claim) [][]byte {
		out := make([][]byte, len(claims))
		for r, c := range claims {
			text, err := json.Marshal(c)
			require.NoError(t, err)
			out[r] = text
		}
		return out
	}
	ok := Claim{Op: "x", Must: []Value{{"size", "1"}}, Info: []int64{5}}
	claims, err := compare(encode(ok, ok))
	require.NoError(t, err)
	require.Equal(t, [][]int64{{5}, {5}}, claims.Infos())
	for want, bad := range map[string]Claim{
		`mismatch: rank 0 calls "x", rank 2 calls "y"`:              {Op: "y", Must: ok.Must, Info: ok.Info},
		`mismatch: size: rank 0 has 1, rank 2 has 2`:                {Op: "x", Must: []Value{{"size", "2"}}, Info: ok.Info},
		`mismatch: size: rank 0 has 1, rank 2 has 3`:                {Op: "x", Must: []Value{{"size", "3"}}},
		`rank 2 has [] and 1 numbers: they call different things`:   {Op: "x", Info: ok.Info},
		`rank 2 has [1]: they call different things, or run differ`: {Op: "x", Must: ok.Must},
	} {
		_, err := compare(encode(ok, ok, bad))
		require.ErrorIs(t, err, comm.ErrMismatch)
		require.ErrorContains(t, err, want)
	}
	for i, is := range causes {
		_, err = compare(encode(ok, Claim{Op: "x", Error: "why", Is: i + 1}))
		require.ErrorIs(t, err, is)
		require.EqualError(t, err, "rank 1 refused: why")
	}
	_, err = compare(encode(ok, Claim{Op: "x", Error: "why", Is: 99}))
	require.EqualError(t, err, "rank 1 refused: why")
}

// A meeting that does not take place is known as such, next to this rank's own reason.
func TestACutMeetingIsNamed(t *testing.T) {
	groups, err := comm.Local(2)
	require.NoError(t, err)
	groups[1].Kill()
	mine := errors.New("bad value 7")
	for _, failed := range []error{nil, mine} {
		_, err = On(t.Context(), groups[0], Claim{}, failed)
		var cut *CutError
		require.ErrorAs(t, err, &cut)
		require.ErrorIs(t, err, comm.ErrPeerLost)
		require.Equal(t, failed != nil, errors.Is(err, mine))
	}
	require.NoError(t, groups[0].Close())
}

func FuzzCompare(f *testing.F) {
	f.Add([]byte(`{"Op":"x","Must":[{"Name":"size","Value":"1"}],"Info":[5],"Own":"x"}`), []byte(`{"Op":"x","Must":[{"Value":"1"}]}`))
	f.Add([]byte(`{"Error":"no"}`), []byte(`{`))
	f.Add([]byte(`{}`), []byte(`null`))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		if claims, err := compare([][]byte{a, b}); err == nil {
			require.Len(t, claims[1].Info, len(claims[0].Info))
		}
	})
}
