package explore

// Bug is a known mistake that Protocol can make, one at a time.
type Bug uint8

// The bugs. Those that lie in a plan, such as a ring that waits on the rank it sends to, need no Bug: tests change the
// routes.
const (
	NoBug Bug = iota
	// SkipZeroWait does not wait for the signal of a message of zero bytes.
	SkipZeroWait
	// TwoStateSemaphore signals with a flag that the receiver clears, in one line a pair.
	TwoStateSemaphore
	// TwoEpochs counts calls modulo two.
	TwoEpochs
	// MissingCredit puts where the receiver will want the data without waiting for it to say so.
	MissingCredit
	// CreditBeforePlace writes the sequence number of a credit before the rest of its line.
	CreditBeforePlace
	// GrantBeforeCopy grants a staging slot again before it has been copied out.
	GrantBeforeCopy
	// OneEagerBuffer lands the eager messages of all calls in the same staging.
	OneEagerBuffer
	// OnePacketBuffer does so with packets.
	OnePacketBuffer
	// OneSignalLine has one signal line a pair for all calls.
	OneSignalLine
	// SignalBeforeData signals a message, then puts it.
	SignalBeforeData
	// SignalBeforeTotal writes the sequence number of a signal before the rest of its line.
	SignalBeforeTotal
	// PlainSignal signals without release: data may become visible later. It needs Options.Relaxed to show.
	PlainSignal
	// PlainCredit does so with credits.
	PlainCredit
	// ReturnBeforeSends hands the user's buffers back when everything has been received.
	ReturnBeforeSends
	// WindowOnSends has senders keep to their window as receivers do.
	WindowOnSends
	// CacheMissMeets has ranks with new splits meet all others before the call: a hit here is taken for a hit everywhere.
	CacheMissMeets
	// CacheKeepsPlace keeps the place of a credit as long as a rank's own send splits are the same: what the receiver
	// remembers is taken for granted.
	CacheKeepsPlace
	// TakenAsCredit tells a sender that its message has been read by a credit, which the next call's may overwrite.
	TakenAsCredit
	// KeepOffer gives up without taking back what it offers to be read.
	KeepOffer
	// TakeWithoutLook takes what it has read without another look at the offer.
	TakeWithoutLook
)

// String is the bug's name.
func (b Bug) String() string {
	return [...]string{"no bug", "skipped wait on a zero count", "two-state semaphore", "epochs modulo two", "missing credit",
		"credit before its place", "grant before copy", "one eager buffer", "one packet buffer", "one signal line", "signal before data",
		"signal before its total", "signal without release", "credit without release", "return before the sends are done",
		"a window on sends", "a cache miss meets all ranks", "the cache keeps the place of a credit",
		"a credit says that a message was read", "an offer is not taken back", "a message is taken without another look at its offer"}[b]
}
