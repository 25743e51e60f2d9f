package host

// point is a place in a kernel where it matters whether another rank acts first.
type point uint8

// The points. All but idlePass come right before what they name.
const (
	postingCredit point = iota
	puttingData
	signalling
	takingData
	withdrawing // an offer of data
	copying     // the rest of a large message; the peer is this rank
	idlePass    // a pass over all peers has found nothing to do
)

// at tells the engine's step, which only tests set, that the kernel has come to p on behalf of a peer. A step may let
// other ranks act before it returns.
func (e *Engine) at(p point, peer int) {
	if e.step != nil {
		_ = e.step(p, peer)
	}
}
