package kernels

import (
	"fmt"
	"sync/atomic"
)

// PointBounds is the family of transfers between two ranks.
type PointBounds struct {
	Size int // ranks
	// Semaphores is how many there are from each rank to each other.
	Semaphores int
}

// Family is "p2p".
func (*PointBounds) Family() string { return "p2p" }

// TransferKind is what a transfer does.
type TransferKind uint8

// The kinds. Their names are those of operations.
const (
	PutTransfer    TransferKind = iota // write the peer's symmetric memory
	GetTransfer                        // read it
	SignalTransfer                     // count a semaphore at the peer up
	WaitTransfer                       // consume one signal of the peer
	transferKinds
)

// TransferKinds are all kinds.
func TransferKinds() (all []TransferKind) {
	for k := range transferKinds {
		all = append(all, k)
	}
	return all
}

// String is the kind's name in messages.
func (k TransferKind) String() string {
	if k < transferKinds {
		return [...]string{"put", "get", "signal", "wait"}[k]
	}
	return fmt.Sprintf("transfer of kind %d", uint8(k))
}

// Transfer is one launch between this rank and Peer.
//
// The number of signals of a semaphore only grows, and so does that of the signals that its rank has consumed. A wait that fails consumes
// none, so a later one can succeed.
type Transfer struct {
	Launched

	Kind TransferKind
	Peer int
	// Buffer is this rank's memory, Place that of the peer, with as many bytes: of puts and gets.
	Buffer Buffer
	Place  int64
	// Semaphore is that of signals and waits.
	Semaphore int
	// Number is this launch's among those of the communicator, Issued the last number so far. When a wait for a peer fails, so does every
	// launch that was issued by then, at once when it would have to wait for that peer (F1). Later launches wait anew.
	Number uint64
	Issued *atomic.Uint64
}

// Operation is the name of the kind.
func (t *Transfer) Operation() string { return t.Kind.String() }
