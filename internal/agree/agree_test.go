package agree

import (
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
			owns[r], errs[r] = On(t.Context(), g, c, failed)
		})
	}
	wg.Wait()
	for _, g := range groups {
		require.NoError(t, g.Close())
	}
	return owns, errs
}

func TestOwnWordsAreHeardByAll(t *testing.T) {
	owns, errs := on(t, 3, func(r int) (Claim, error) { return Claim{Must: []string{"a", "b"}, Own: string(rune('x' + r))}, nil })
	for r := range owns {
		require.NoError(t, errs[r])
		require.Equal(t, []string{"x", "y", "z"}, owns[r])
	}
}

func TestF3_DifferencesAndRefusalsAreEveryRanksError(t *testing.T) {
	_, errs := on(t, 3, func(r int) (Claim, error) { return Claim{Must: []string{"a", string(rune('0' + r/2))}}, nil })
	for _, err := range errs {
		require.ErrorIs(t, err, comm.ErrMismatch)
		require.ErrorContains(t, err, "rank 0 has 0; rank 2 has 1")
	}
	mine := errors.New("bad value 7")
	_, errs = on(t, 2, func(r int) (Claim, error) {
		if r == 1 {
			return Claim{}, mine
		}
		return Claim{Must: []string{"a"}}, nil
	})
	require.ErrorIs(t, errs[1], mine)
	require.ErrorContains(t, errs[0], "rank 1 refused: bad value 7")
	_, errs = on(t, 2, func(r int) (Claim, error) { return Claim{Must: make([]string, r)}, nil })
	require.ErrorContains(t, errs[0], "different versions")
}

func FuzzCompare(f *testing.F) {
	f.Add([]byte(`{"Must":["a"],"Own":"x"}`), []byte(`{"Must":["a"]}`))
	f.Add([]byte(`{"Error":"no"}`), []byte(`{`))
	f.Add([]byte(`{}`), []byte(`null`))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		if owns, err := compare([][]byte{a, b}); err == nil {
			require.Len(t, owns, 2)
		}
	})
}
