package alltoallv

import (
	"math"
)

// Figures of a host without a table: the cost of a message without its bytes and of a step of a ring, in microseconds, and
// the bytes that a core copies in a microsecond. They were measured with 2 and 4 processes on two cores, where a core
// copies 13 to 17 GB/s and a message costs a line or two. They only have to rank algorithms.
const (
	hostMessage = 0.3
	hostStep    = 1
	hostRate    = 12e3
)

// messages is the cost of a rank's messages without their bytes.
func messages(t *Traffic) float64 { return hostMessage * float64(t.Size-1) }

// staged is the time of moving bytes through staging on the host, where the core that receives copies them out
// afterwards.
func staged(t *Traffic) float64 {
	all := float64(t.SendTotal + t.RecvTotal)
	return hostMessage*all/float64(t.SlotBytes) + all/hostRate
}

// cost is the table's estimate of an algorithm, or without a table that of formula.
func (t *Traffic) cost(algorithm, why string, formula func(t *Traffic) float64) (float64, string) {
	if t.table == nil {
		return formula(t), why
	}
	if t.Largest <= t.PacketBytes && !t.Live && t.PacketBytes > 0 {
		algorithm, why = packet{}.Name(), "every message is a packet, whatever the order"
	}
	us, _, ok := t.Estimate(algorithm)
	if !ok {
		return math.Inf(1), "the table has no figures of it"
	}
	return us, why
}

// sms is the number of multiprocessors that the table gives an algorithm.
func (t *Traffic) sms(algorithm string) int {
	_, sms, _ := t.Estimate(algorithm)
	return sms
}

type packet struct{}

func (packet) Name() string               { return "packet" }
func (packet) Order(rank, size int) []int { return Rotation(rank, size) }
func (packet) Schedule(*Traffic) Schedule { return Schedule{} }
func (a packet) Cost(t *Traffic) (float64, string) {
	switch {
	case t.Largest > t.PacketBytes:
		return math.Inf(1), t.why("the largest message, %d bytes, exceeds a packet's %d", t.Largest, t.PacketBytes)
	case t.Live && t.Multiprocessors:
		return math.Inf(1), "messages of splits in device memory may exceed a packet"
	}
	return t.cost(a.Name(), "every message fits a packet: no signal after the data, no credit", func(t *Traffic) float64 { return messages(t) / 2 })
}

type direct struct{}

func (direct) Name() string                   { return "direct" }
func (direct) Order(rank, size int) []int     { return Rotation(rank, size) }
func (a direct) Schedule(t *Traffic) Schedule { return Schedule{SMs: t.sms(a.Name())} }
func (a direct) Cost(t *Traffic) (float64, string) {
	if t.InPlace {
		return t.cost(a.Name(), "peers write the output in place, all at once", func(t *Traffic) float64 {
			return messages(t) + float64(t.SendTotal)/hostRate
		})
	}
	if t.Pulled {
		return t.cost(a.Name(), "large messages are read in their senders' memory, all at once", func(t *Traffic) float64 {
			return messages(t) + float64(t.RecvTotal)/hostRate
		})
	}
	if t.Largest <= t.SlotBytes {
		return t.cost(a.Name(), "every message fits a staging slot", func(t *Traffic) float64 {
			return messages(t) + float64(t.SendTotal+t.RecvTotal)/hostRate
		})
	}
	return math.Inf(1), t.why("the output is not symmetric and the largest message, %d bytes, exceeds a staging slot's %d", t.Largest, t.SlotBytes)
}

type pipelined struct{}

func (pipelined) Name() string                   { return "pipelined" }
func (pipelined) Order(rank, size int) []int     { return Rotation(rank, size) }
func (a pipelined) Schedule(t *Traffic) Schedule { return Schedule{Staged: true, SMs: t.sms(a.Name())} }
func (a pipelined) Cost(t *Traffic) (float64, string) {
	return t.cost(a.Name(), "chunks go through fixed staging while earlier ones are copied out", func(t *Traffic) float64 {
		return messages(t) + staged(t)
	})
}

// evenSkew is the largest skew at which a ring's senders have a rate: their steps then take equally long.
const evenSkew = 1.25

func (t *Traffic) skewed() bool { return t.Skew > evenSkew }

type ring struct{}

func (ring) Name() string               { return "ring" }
func (ring) Order(rank, size int) []int { return Rotation(rank, size) }
func (a ring) Schedule(t *Traffic) Schedule {
	_, s, _ := t.estimate(a.Name())
	if t.skewed() { // not all links are busy at the same time, and those that are have several senders
		s.Rate = 0
	}
	return Schedule{Window: 1, SMs: s.SMs, Rate: s.Rate, Reorder: t.skewed()}
}
func (a ring) Cost(t *Traffic) (float64, string) {
	return t.cost(a.Name(), "one peer at a time, for receivers that many senders at once would overload", func(t *Traffic) float64 {
		us := hostStep * float64(t.Size-1)
		switch {
		case t.InPlace:
			return us + float64(t.SendTotal)/hostRate
		case t.Pulled:
			return us + messages(t) + float64(t.RecvTotal)/hostRate
		}
		return us + messages(t) + staged(t)
	})
}

// copiesToOne is a part of the time that the table has, of equal parts, for copies of which one rank gets the most: at 512 MiB a
// rank 392 instead of 380 GB/s among 4 H200, 396 instead of 375 among 8.
const copiesToOne = 0.97

// aloneRate bounds the rate of senders that copy messages out of staging as well: 128 MiB a rank on 4 GPUs take 343 us at 355 GB/s and 359
// at 365, which is best with other multiprocessors for that.
const aloneRate = 355

// ownSMs is how many multiprocessors copy what stays on the rank while the copy engines move the rest: with 8 of them 512 MiB a rank
// took 1254 us on 8 H200, with a copy engine 1268.
const ownSMs = 8

type copyEngine struct{}

func (copyEngine) Name() string               { return "copy" }
func (copyEngine) Order(rank, size int) []int { return Rotation(rank, size) }
func (copyEngine) Schedule(t *Traffic) Schedule {
	return Schedule{Window: 1, SMs: ownSMs, Copies: true, Reorder: t.skewed()}
}
func (a copyEngine) Cost(t *Traffic) (float64, string) {
	switch {
	case !t.CopyEngines:
		return math.Inf(1), "only a GPU has copy engines"
	case t.Shared:
		return math.Inf(1), "other ranks run on this GPU, whose queues would hold up each other's copies"
	case t.Live:
		return math.Inf(1), "copy engines cannot read splits from device memory"
	case !t.InPlace || !t.Placed:
		return math.Inf(1), "copy engines need a symmetric destination and Splits.PeerDispls"
	}
	us, why := t.cost(a.Name(), "the copy engines move everything, one peer after the other", func(*Traffic) float64 { return math.Inf(1) })
	if t.skewed() && t.Largest > t.PacketBytes {
		us *= copiesToOne
	}
	return us, why
}

func builtin() []Algorithm {
	return []Algorithm{packet{}, direct{}, pipelined{}, ring{}, copyEngine{}}
}
