package cuda

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/kernels"
)

func TestBoundsOfOtherRanksThanTheHeapsAreRefused(t *testing.T) {
	e := &Engine{space: kernels.Space{Size: 2}}
	for _, f := range []kernels.Family{&kernels.ExchangeBounds{Size: 3}, &kernels.ReduceBounds{Size: 3}, &kernels.DispatchBounds{Ranks: 3}, &kernels.PointBounds{Size: 3}} {
		e.Defaults(f)
		_, err := e.Layout(f)
		require.EqualError(t, err, "kernels: "+f.Family()+": bounds of 3 ranks on a heap of 2")
	}
}

// foreign is an operation of no family.
type foreign struct{ kernels.Launched }

func (*foreign) Operation() string { return "something" }

func TestOperationsThatAPortCannotRunAreRefused(t *testing.T) {
	for _, fam := range []family{newExchanges(&kernels.ExchangeBounds{}, 0), newReductions(&kernels.ReduceBounds{}, 0), newDispatches(&kernels.DispatchBounds{}, 0)} {
		p := &port{fam: fam, name: "this"}
		require.EqualError(t, p.submit(0, &foreign{}), "kernels: something: timeout 0s")
		require.EqualError(t, p.submit(0, &foreign{kernels.Launched{Timeout: time.Second}}), "kernels: something on a port of this")
		alone := &foreign{kernels.Launched{Note: kernels.Note{Alone: true}}} // it waits for nobody
		require.EqualError(t, p.submit(0, alone), "kernels: something on a port of this")
	}
}
