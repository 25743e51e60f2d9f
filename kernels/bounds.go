package kernels

import "github.com/switchyard-moe/switchyard/internal/rails"

// ExchangeBounds is the family of exchanges, and the bounds of one communicator for them.
type ExchangeBounds struct {
	Size int // ranks
	// Slots is how many chunks of a message may be under way to a rank through staging; SlotBytes is a chunk's size.
	Slots     int
	SlotBytes int64
	// StagingBytes bounds the slots of one rank together where SlotBytes is left to default.
	StagingBytes int64
	// EagerBytes bounds messages that land in staging without a credit, where an engine has such messages.
	EagerBytes int64
	// PacketBytes bounds messages whose words carry their flag with them.
	PacketBytes int64
	// BundleBytes bounds messages to ranks of other hosts that go together with the others for that host.
	BundleBytes int64
	// Stripes is how many parts a large message is cut into, each with signals and slots of its own: one for every block that may
	// send. The host device has one sender a rank and looks at none of it.
	Stripes int
	// Hosts is for ranks on several hosts; nil on one.
	Hosts *Hosts
	// RailAt is where Layout.Rail bytes of the rail segment are.
	RailAt int64
}

// PlaceRail sets RailAt.
func (c *ExchangeBounds) PlaceRail(at int64) { c.RailAt = at }

// Hosts is what launches of ranks on several hosts need. Operations have the ranks of the group; the space has those of this host, and
// knows their numbers in the group (Space.Ranks).
type Hosts struct {
	Rank  int   // this rank in the group
	Ranks []int // those of this host, of which every host has equally many
	Host  []int // that of each rank of the group, from 0 on
	Limit int64 // puts reach places of a segment that are below it: of the heap's on the host, of the rail's on GPUs
	Rail  rails.Rail
}

// Count is the number of hosts.
func (h *Hosts) Count() int { return len(h.Host) / len(h.Ranks) }

// Family is "alltoallv".
func (c *ExchangeBounds) Family() string { return "alltoallv" }

// Default is what v asks for: d where it is 0, nothing where it is negative.
func Default(v, d int64) int64 {
	switch {
	case v < 0:
		return 0
	case v == 0:
		return d
	}
	return v
}

const minSlotBytes = 4 << 10

// DefaultSlots fills in Slots, StagingBytes and SlotBytes where they are 0: slots of at most largest bytes, and fewer where
// sharers that have slots of their own would take more than StagingBytes together.
func (c *ExchangeBounds) DefaultSlots(slots int, staging, largest int64, sharers int) {
	c.Slots = int(Default(int64(c.Slots), int64(slots)))
	c.StagingBytes = Default(c.StagingBytes, staging)
	if c.SlotBytes == 0 && c.Slots > 0 {
		fit := c.StagingBytes / int64(sharers*c.Slots) / minSlotBytes * minSlotBytes
		c.SlotBytes = min(max(fit, minSlotBytes), largest)
	}
}

// AlignUp is the least multiple of a that is not below n.
func AlignUp(n, a int64) int64 { return (n + a - 1) / a * a }

// Mode is how one message travels. It depends on the message's size and on the ExchangeBounds alone, which both ends share.
type Mode uint8

// The modes.
const (
	PacketMode Mode = iota // each word carries its flag
	EagerMode              // into staging, no credit
	CreditMode             // the receiver says where
)

// String is the mode's name in reports.
func (m Mode) String() string { return [...]string{"packet", "eager", "credit"}[m] }

// Mode of a message of n bytes. Without packets and eager staging an empty message is eager.
func (c *ExchangeBounds) Mode(n int64) Mode {
	switch {
	case c.PacketBytes > 0 && n <= c.PacketBytes:
		return PacketMode
	case n <= c.EagerBytes:
		return EagerMode
	default:
		return CreditMode
	}
}
