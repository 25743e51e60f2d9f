package cuda

// The encoders that structs have replaced, and that both give the same bytes.

import (
	"encoding/binary"
	"math/rand/v2"
	"reflect"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/switchyard-moe/switchyard/internal/cuda"
	"github.com/switchyard-moe/switchyard/kernels"
)

// scramble gives every number of v a random value.
func scramble(r *rand.Rand, v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			scramble(r, v.Field(i))
		}
	case reflect.Array:
		for i := range v.Len() {
			scramble(r, v.Index(i))
		}
	default:
		at := reflect.NewAt(v.Type(), unsafe.Pointer(v.UnsafeAddr())).Elem()
		if v.CanInt() {
			at.SetInt(r.Int64() - r.Int64())
		} else {
			at.SetUint(r.Uint64() >> (64 - v.Type().Bits()))
		}
	}
}

// same copies the fields of from to those of to that have their names.
func same(to, from reflect.Value) {
	for i := range to.NumField() {
		f, v := to.Field(i), from.FieldByName(to.Type().Field(i).Name)
		at := reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr())).Elem()
		switch {
		case f.Kind() == reflect.Struct:
			same(f, v)
		case f.CanInt():
			at.SetInt(v.Int())
		default:
			at.SetUint(v.Uint())
		}
	}
}

func compare[New, Old any](t *testing.T, put func(o *Old, b []byte, n *New)) {
	t.Helper()
	r := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		var n New
		var o Old
		scramble(r, reflect.ValueOf(&n).Elem())
		same(reflect.ValueOf(&o).Elem(), reflect.ValueOf(&n).Elem())
		got := cuda.BytesOf(&n)
		want := make([]byte, len(got))
		put(&o, want, &n)
		require.Equal(t, want, got, "%T", n)
	}
}

func TestStructsAreWhatEncodersWrote(t *testing.T) {
	compare(t, func(o *oldWorldWords, b []byte, _ *worldWords) { o.put(b) })
	compare(t, func(o *oldMoeArgs, b []byte, n *moeArgs) {
		o.put(b)
		for i, v := range n.first {
			oldPutMoeArgsFirst(b, i, v)
		}
	})
	exchange := func(b []byte, n *exchangeArgs) {
		for i := range n.steps {
			var step oldStepWords
			same(reflect.ValueOf(&step).Elem(), reflect.ValueOf(&n.steps[i]).Elem())
			oldPutExchangeArgsSteps(b, i, step)
		}
	}
	compare(t, func(o *oldExchangeArgs, b []byte, n *exchangeArgs) {
		o.put(b)
		exchange(b, n)
	})
	compare(t, func(o *oldCopyArgs, b []byte, n *copyArgs) {
		o.put(b)
		exchange(b, &n.exchange)
		for i, v := range n.places {
			oldPutCopyArgsPlaces(b, i, v)
		}
	})
	compare(t, func(o *oldReduceArgs, b []byte, n *reduceArgs) {
		o.put(b)
		for i, v := range n.bounds {
			oldPutReduceArgsBounds(b, i, v)
		}
	})
	compare(t, func(o *oldMulticastArgs, b []byte, n *multicastArgs) {
		o.put(b)
		for i, v := range n.reduce.bounds {
			oldPutReduceArgsBounds(b, i, v)
		}
	})
	var f faultWords
	scramble(rand.New(rand.NewPCG(3, 4)), reflect.ValueOf(&f).Elem())
	var read, want oldFaultWords
	same(reflect.ValueOf(&want).Elem(), reflect.ValueOf(&f).Elem())
	read.get(cuda.BytesOf(&f))
	require.Equal(t, want, read)
	r := rand.New(rand.NewPCG(5, 6))
	for range 100 {
		n := func() int64 { return 1 + r.Int64N(300) }
		offset, size, slots, tokens, topK, staged, note, packet := 128*n(), n(), n(), n(), n(), n(), 128*n(), 128*n()
		block, old := layMoeBlock(offset, size, slots, tokens, topK, staged, note, packet), oldLayMoeBlock(offset, size, slots, 0, tokens, topK, staged, note, packet)
		require.Equal(t, *(*[23]int64)(unsafe.Pointer(&old)), *(*[23]int64)(unsafe.Pointer(&block)))
		exchange, oldExchange := layExchangeBlock(offset, size, slots, tokens, staged, packet), oldLayExchangeBlock(offset, size, slots, tokens, staged, packet)
		require.Equal(t, *(*[9]int64)(unsafe.Pointer(&oldExchange)), *(*[9]int64)(unsafe.Pointer(&exchange)))
		reduce, oldReduce := layReduceBlock(offset, size, slots, tokens, staged, packet), oldLayReduceBlock(offset, size, slots, tokens, staged, packet)
		require.Equal(t, *(*[9]int64)(unsafe.Pointer(&oldReduce)), *(*[9]int64)(unsafe.Pointer(&reduce)))
	}
}

// oldMoeBlock is struct sw_moe_block. Where the words of a handle lie. All must be zero before the first call.
type oldMoeBlock struct {
	noteStride   int64
	packetStride int64
	control      int64 // struct sw_control
	landing      int64 // the epoch of the call for which kernels.DispatchHandle.Landed counts
	begins       int64 // [2][size] lines: {epoch, word} {epoch, place of rows}, what each rank says when it begins a call
	dones        int64 // [2][size][blocks]: {epoch, word}, what each block of each rank says of the rows that are there
	slotCounts   int64 // [2][size][slots]: rows of each rank for each slot, behind the low half of the epoch
	rankTotals   int64 // [size][size]: rows of each rank for each rank, likewise
	blockCounts  int64 // [blocks][size]: rows of this rank's blocks for each rank, likewise
	blockSlots   int64 // [blocks][slots]: choices of this rank's blocks for each slot, likewise
	made         int64 // [size][windows]: the last epoch in which each rank has made the partial sums of a window of this rank's rows
	making       int64 // [size][windows]: parts of the partial sums that this rank has made for each; 0 between calls
	arrived      int64 // [size]: rows in staging from each rank
	places       int64 // [max_tokens][size]: the row of each token among those of this rank on each rank, or -1
	who          int64 // [max_tokens][top_k]: the rank of each choice, or -1
	spread       int64 // [staged][top_k]: the expert's row of each choice of a row in staging, or -1
	indices      int64 // [staged][top_k]: each choice beside rows in staging, as routing.cuh numbers them
	weights      int64 // [staged][top_k] float32, likewise
	sources      int64 // [staged][2], likewise
	wiped        int64 // [2]: by parity of calls, the token of which places that are not used are wiped next
	notes        int64 // [2][size][max_tokens][note_stride]: what lies beside a row of few tokens, as packets
	packets      int64 // [2][size][max_tokens][packet_stride]: rows of few tokens
	end          int64 // the offset behind the block
}

// put encodes s into b.
func (s *oldMoeBlock) put(b []byte) {
	_ = b[183]
	binary.LittleEndian.PutUint64(b[0:], uint64(s.noteStride))
	binary.LittleEndian.PutUint64(b[8:], uint64(s.packetStride))
	binary.LittleEndian.PutUint64(b[16:], uint64(s.control))
	binary.LittleEndian.PutUint64(b[24:], uint64(s.landing))
	binary.LittleEndian.PutUint64(b[32:], uint64(s.begins))
	binary.LittleEndian.PutUint64(b[40:], uint64(s.dones))
	binary.LittleEndian.PutUint64(b[48:], uint64(s.slotCounts))
	binary.LittleEndian.PutUint64(b[56:], uint64(s.rankTotals))
	binary.LittleEndian.PutUint64(b[64:], uint64(s.blockCounts))
	binary.LittleEndian.PutUint64(b[72:], uint64(s.blockSlots))
	binary.LittleEndian.PutUint64(b[80:], uint64(s.made))
	binary.LittleEndian.PutUint64(b[88:], uint64(s.making))
	binary.LittleEndian.PutUint64(b[96:], uint64(s.arrived))
	binary.LittleEndian.PutUint64(b[104:], uint64(s.places))
	binary.LittleEndian.PutUint64(b[112:], uint64(s.who))
	binary.LittleEndian.PutUint64(b[120:], uint64(s.spread))
	binary.LittleEndian.PutUint64(b[128:], uint64(s.indices))
	binary.LittleEndian.PutUint64(b[136:], uint64(s.weights))
	binary.LittleEndian.PutUint64(b[144:], uint64(s.sources))
	binary.LittleEndian.PutUint64(b[152:], uint64(s.wiped))
	binary.LittleEndian.PutUint64(b[160:], uint64(s.notes))
	binary.LittleEndian.PutUint64(b[168:], uint64(s.packets))
	binary.LittleEndian.PutUint64(b[176:], uint64(s.end))
}

// layMoeBlock lays the block out from offset on.
func oldLayMoeBlock(offset, size, slots, local, maxTokens, topK, staged, noteBytes, packetBytes int64) (b oldMoeBlock) {
	at := offset
	b.noteStride = noteBytes
	b.packetStride = packetBytes
	b.control = at
	at += controlAlign
	b.landing = at
	at += controlAlign
	b.begins = at
	at += 2 * size * lineBytes
	b.dones = at
	at += 2 * size * moeMaxBlocks * 16
	at = kernels.AlignUp(at, kernels.LineBytes)
	b.slotCounts = at
	at += 2 * size * slots * 8
	at = kernels.AlignUp(at, kernels.LineBytes)
	b.rankTotals = at
	at += size * size * 8
	at = kernels.AlignUp(at, kernels.LineBytes)
	b.blockCounts = at
	at += moeMaxBlocks * size * 8
	at = kernels.AlignUp(at, kernels.LineBytes)
	b.blockSlots = at
	at += moeMaxBlocks * slots * 8
	at = kernels.AlignUp(at, kernels.LineBytes)
	b.made = at
	at += size * ((maxTokens + moeWindow - 1) / moeWindow) * 8
	at = kernels.AlignUp(at, kernels.LineBytes)
	b.making = at
	at += size * ((maxTokens + moeWindow - 1) / moeWindow) * 4
	at = kernels.AlignUp(at, kernels.LineBytes)
	b.arrived = at
	at += size * 4
	at = kernels.AlignUp(at, kernels.LineBytes)
	b.places = at
	at += maxTokens * size * 4
	at = kernels.AlignUp(at, kernels.LineBytes)
	b.who = at
	at += maxTokens * topK * 4
	at = kernels.AlignUp(at, kernels.LineBytes)
	b.spread = at
	at += staged * topK * 4
	at = kernels.AlignUp(at, kernels.LineBytes)
	b.indices = at
	at += staged * topK * 8
	at = kernels.AlignUp(at, kernels.LineBytes)
	b.weights = at
	at += staged * topK * 4
	at = kernels.AlignUp(at, kernels.LineBytes)
	b.sources = at
	at += staged * 8
	at = kernels.AlignUp(at, kernels.LineBytes)
	b.wiped = at
	at += controlAlign
	at = kernels.AlignUp(at, kernels.LineBytes)
	b.notes = at
	at += 2 * size * maxTokens * b.noteStride
	at = kernels.AlignUp(at, kernels.LineBytes)
	b.packets = at
	at += 2 * size * maxTokens * b.packetStride
	b.end = at
	return b
}

// oldExchangeBlock is struct sw_exchange_block. Where the words of an all-to-all's control block lie. All but the slots must be zero before the first call.
type oldExchangeBlock struct {
	packetStride  int64
	control       int64 // struct sw_control
	signals       int64 // [2][size][stripes] lines: {seq, total}, and of a message through staging {seq of its end, seq}
	credits       int64 // [size] lines: {seq, offset or SW_NOWHERE} {seq, total}
	complaints    int64 // [size] lines: {epoch, sent} {epoch, expected} of a message that had another length than its receiver expected
	stripeCredits int64 // [size][stripes] lines: {seq of the last chunk taken out of staging, 0}
	packets       int64 // [2][size][packet_stride]
	slots         int64 // [size][stripes][slot_count][slot_bytes]
	end           int64 // the offset behind the block
}

// put encodes s into b.
func (s *oldExchangeBlock) put(b []byte) {
	_ = b[71]
	binary.LittleEndian.PutUint64(b[0:], uint64(s.packetStride))
	binary.LittleEndian.PutUint64(b[8:], uint64(s.control))
	binary.LittleEndian.PutUint64(b[16:], uint64(s.signals))
	binary.LittleEndian.PutUint64(b[24:], uint64(s.credits))
	binary.LittleEndian.PutUint64(b[32:], uint64(s.complaints))
	binary.LittleEndian.PutUint64(b[40:], uint64(s.stripeCredits))
	binary.LittleEndian.PutUint64(b[48:], uint64(s.packets))
	binary.LittleEndian.PutUint64(b[56:], uint64(s.slots))
	binary.LittleEndian.PutUint64(b[64:], uint64(s.end))
}

// layExchangeBlock lays the block out from offset on.
func oldLayExchangeBlock(offset, size, stripes, slotCount, slotBytes, packetBytes int64) (b oldExchangeBlock) {
	at := offset
	b.packetStride = packetHeaderBytes + (packetBytes+packetGroupPayload-1)/packetGroupPayload*packetGroupBytes
	b.control = at
	at += controlAlign
	b.signals = at
	at += 2 * size * stripes * lineBytes
	b.credits = at
	at += size * lineBytes
	b.complaints = at
	at += size * lineBytes
	b.stripeCredits = at
	at += size * stripes * lineBytes
	at = kernels.AlignUp(at, kernels.LineBytes)
	b.packets = at
	at += 2 * size * b.packetStride
	b.slots = at
	at += size * stripes * slotCount * slotBytes
	b.end = at
	return b
}

// oldReduceBlock is struct sw_reduce_block. Where the words of a reduction's control block lie. All but the slots must be zero before the first call.
type oldReduceBlock struct {
	packetStride int64
	control      int64 // struct sw_control
	entries      int64 // [2][size]: what each peer calls, by the call's parity
	lines        int64 // [size][lines]: how far each block of each peer is
	inputs       int64 // [2][size][packet_stride]: packets to be reduced
	results      int64 // [2][size][packet_stride]: packets of slices that are reduced
	inputSlots   int64 // [size][lines][slot_count][chunk_bytes]: staging of input
	resultSlots  int64 // the same of results
	end          int64 // the offset behind the block
}

// put encodes s into b.
func (s *oldReduceBlock) put(b []byte) {
	_ = b[71]
	binary.LittleEndian.PutUint64(b[0:], uint64(s.packetStride))
	binary.LittleEndian.PutUint64(b[8:], uint64(s.control))
	binary.LittleEndian.PutUint64(b[16:], uint64(s.entries))
	binary.LittleEndian.PutUint64(b[24:], uint64(s.lines))
	binary.LittleEndian.PutUint64(b[32:], uint64(s.inputs))
	binary.LittleEndian.PutUint64(b[40:], uint64(s.results))
	binary.LittleEndian.PutUint64(b[48:], uint64(s.inputSlots))
	binary.LittleEndian.PutUint64(b[56:], uint64(s.resultSlots))
	binary.LittleEndian.PutUint64(b[64:], uint64(s.end))
}

// layReduceBlock lays the block out from offset on.
func oldLayReduceBlock(offset, size, lines, slotCount, chunkBytes, packetBytes int64) (b oldReduceBlock) {
	at := offset
	b.packetStride = (packetBytes + packetGroupPayload - 1) / packetGroupPayload * packetGroupBytes
	b.control = at
	at += controlAlign
	b.entries = at
	at += 2 * size * reduceEntryBytes
	b.lines = at
	at += size * lines * reduceLineBytes
	at = kernels.AlignUp(at, kernels.LineBytes)
	b.inputs = at
	at += 2 * size * b.packetStride
	b.results = at
	at += 2 * size * b.packetStride
	b.inputSlots = at
	at += size * lines * slotCount * chunkBytes
	b.resultSlots = at
	at += size * lines * slotCount * chunkBytes
	b.end = at
	return b
}

// oldFaultWords is struct sw_fault. What a kernel that gave up left behind, in pinned host memory. kind is written last.
type oldFaultWords struct {
	kind       uint32
	peer       uint32
	epoch      uint64
	sent       uint64
	expected   uint64
	limit      uint64
	mine       uint64 // of ranks that call different reductions: kernels.ReduceCall.Word of this rank's and of peer's, and their digests
	theirs     uint64
	myShape    uint64
	theirShape uint64
	sending    uint32 // 1: this rank was sending to peer, 0: receiving; of refused splits: whether they are of what peer sends
	part       uint32 // of refused splits: the rank that peer sends to or receives from
	stop       uint64 // set by the host: every wait of the communicator's kernels returns
}

// get decodes s from b.
func (s *oldFaultWords) get(b []byte) {
	_ = b[87]
	s.kind = binary.LittleEndian.Uint32(b[0:])
	s.peer = binary.LittleEndian.Uint32(b[4:])
	s.epoch = binary.LittleEndian.Uint64(b[8:])
	s.sent = binary.LittleEndian.Uint64(b[16:])
	s.expected = binary.LittleEndian.Uint64(b[24:])
	s.limit = binary.LittleEndian.Uint64(b[32:])
	s.mine = binary.LittleEndian.Uint64(b[40:])
	s.theirs = binary.LittleEndian.Uint64(b[48:])
	s.myShape = binary.LittleEndian.Uint64(b[56:])
	s.theirShape = binary.LittleEndian.Uint64(b[64:])
	s.sending = binary.LittleEndian.Uint32(b[72:])
	s.part = binary.LittleEndian.Uint32(b[76:])
	s.stop = binary.LittleEndian.Uint64(b[80:])
}

// oldWorldWords is struct sw_world. What every kernel knows of the heap and its rank. It comes first in every family's arguments.
type oldWorldWords struct {
	base      uint64 // this rank's segment lies at base + rank*stride, and so do all others where segments is 0
	stride    uint64 // distance of two ranks' segments
	segments  uint64 // address of uint64 [size]: the ranks' segments; or 0
	control   uint64 // place of the communicator's struct sw_control in every rank's segment
	fault     uint64 // address of a struct sw_fault
	timeoutNs uint64 // bounds every wait for a peer
	rank      uint32
	size      uint32
}

// put encodes s into b, which has worldBytes bytes.
func (s *oldWorldWords) put(b []byte) {
	_ = b[55]
	binary.LittleEndian.PutUint64(b[0:], s.base)
	binary.LittleEndian.PutUint64(b[8:], s.stride)
	binary.LittleEndian.PutUint64(b[16:], s.segments)
	binary.LittleEndian.PutUint64(b[24:], s.control)
	binary.LittleEndian.PutUint64(b[32:], s.fault)
	binary.LittleEndian.PutUint64(b[40:], s.timeoutNs)
	binary.LittleEndian.PutUint32(b[48:], s.rank)
	binary.LittleEndian.PutUint32(b[52:], s.size)
}

// oldStepWords is struct sw_step. A step of an exchange: the rank that this rank sends to in it, the one it receives from, and what. What one warp needs lies
// together, because a first access to a line of arguments takes as long as one to memory.
type oldStepWords struct {
	to         uint32
	from       uint32
	sendBytes  int64
	sendOffset int64
	recvBytes  int64
	recvOffset int64
}

// put encodes s into b, which has stepBytes bytes.
func (s *oldStepWords) put(b []byte) {
	_ = b[39]
	binary.LittleEndian.PutUint32(b[0:], s.to)
	binary.LittleEndian.PutUint32(b[4:], s.from)
	binary.LittleEndian.PutUint64(b[8:], uint64(s.sendBytes))
	binary.LittleEndian.PutUint64(b[16:], uint64(s.sendOffset))
	binary.LittleEndian.PutUint64(b[24:], uint64(s.recvBytes))
	binary.LittleEndian.PutUint64(b[32:], uint64(s.recvOffset))
}

// oldExchangeArgs is struct sw_exchange_args. One launch of the variable-size all-to-all.
type oldExchangeArgs struct {
	world       oldWorldWords
	src         uint64
	dst         uint64
	dstOffset   int64  // place of dst in this rank's segment, or -1: peers cannot write it
	splits      uint64 // address of int64 [4][size]: send bytes, send offsets, receive bytes, receive offsets by rank; 0: they are below
	block       oldExchangeBlock
	packetBytes int64 // messages up to this are packets
	slotBytes   int64
	stripes     uint32 // the most that a message is cut into
	slotCount   uint32 // chunks of a stripe under way through staging
	flags       uint32
	interval    uint32 // cycles from one tile of a block to the next; 0: as they come
	inverse     uint32 // 2^32/(size-1), rounded up; 0 where size-1 < 2
	senders     uint32 // blocks that send; as many more copy messages out of staging. 0: every block does both
	srcBytes    int64  // how long the buffers are; looked at where splits are not below
	dstBytes    int64
	ownBytes    int64 // what stays on this rank
	ownSrc      int64
	ownDst      int64
}

// put encodes s into b, which has exchangeArgsBytes bytes. The elements of steps are encoded one by one.
func (s *oldExchangeArgs) put(b []byte) {
	_ = b[2799]
	s.world.put(b[0:])
	binary.LittleEndian.PutUint64(b[56:], s.src)
	binary.LittleEndian.PutUint64(b[64:], s.dst)
	binary.LittleEndian.PutUint64(b[72:], uint64(s.dstOffset))
	binary.LittleEndian.PutUint64(b[80:], s.splits)
	s.block.put(b[88:])
	binary.LittleEndian.PutUint64(b[160:], uint64(s.packetBytes))
	binary.LittleEndian.PutUint64(b[168:], uint64(s.slotBytes))
	binary.LittleEndian.PutUint32(b[176:], s.stripes)
	binary.LittleEndian.PutUint32(b[180:], s.slotCount)
	binary.LittleEndian.PutUint32(b[184:], s.flags)
	binary.LittleEndian.PutUint32(b[188:], s.interval)
	binary.LittleEndian.PutUint32(b[192:], s.inverse)
	binary.LittleEndian.PutUint32(b[196:], s.senders)
	binary.LittleEndian.PutUint64(b[200:], uint64(s.srcBytes))
	binary.LittleEndian.PutUint64(b[208:], uint64(s.dstBytes))
	binary.LittleEndian.PutUint64(b[216:], uint64(s.ownBytes))
	binary.LittleEndian.PutUint64(b[224:], uint64(s.ownSrc))
	binary.LittleEndian.PutUint64(b[232:], uint64(s.ownDst))
}

// putExchangeArgsSteps encodes element i of steps.
func oldPutExchangeArgsSteps(b []byte, i int, v oldStepWords) {
	at := 240 + 40*i
	v.put(b[at:])
}

// oldCopyArgs is struct sw_copy_args. An exchange by the copy engines.
type oldCopyArgs struct {
	exchange oldExchangeArgs
}

// put encodes s into b, which has copyArgsBytes bytes. The elements of places are encoded one by one.
func (s *oldCopyArgs) put(b []byte) {
	_ = b[3311]
	s.exchange.put(b[0:])
}

// putCopyArgsPlaces encodes element i of places.
func oldPutCopyArgsPlaces(b []byte, i int, v int64) {
	at := 2800 + 8*i
	binary.LittleEndian.PutUint64(b[at:], uint64(v))
}

// oldMoeArgs is struct sw_moe_args. One launch for MoE dispatch. Places are the same on every rank.
type oldMoeArgs struct {
	world        oldWorldWords
	state        oldMoeBlock // of the handle
	x            uint64      // address of the tokens, or of their gradients
	scales       uint64      // address of the scales beside them
	choices      uint64      // address of [tokens][top_k] experts
	weights      uint64      // address of [tokens][top_k] float32; 0: all are 1
	table        uint64      // address of kernels.DispatchBounds.Placement
	counters     uint64      // address of kernels.DispatchBounds.Counters
	mapped       uint64      // address of kernels.DispatchHandle.Mapped; 0: none
	ticket       uint64
	toRows       uint64 // place to which rows are sent
	toScales     uint64
	toIndices    uint64
	toWeights    uint64
	toSources    uint64
	rows         uint64 // address of this rank's rows
	rowScales    uint64
	rowWeights   uint64
	rowSources   uint64
	ready        uint64 // address of the words by which the caller marks rows done; 0: all are
	counts       uint64 // address of kernels.DispatchHandle.Counts, and so on
	offsets      uint64
	rankCounts   uint64
	landed       uint64
	fromRows     uint64 // place of the rows that peers read
	fromWeights  uint64 // place of [rows][top_k] float32 that they read; 0: none
	y            uint64 // address of the sums, or of the rows' gradients
	sumWeights   uint64 // address of float32 [tokens][top_k]; 0: none
	bias0        uint64
	bias1        uint64
	mostRows     int64 // rows of an output, or of what a combine of few tokens is given
	align        int64
	capacity     int64 // 0: an expert's rows follow those of the one before
	offsetBase   int64 // rows from one rank's first row to the next one's; 0: they follow one another
	op           uint32
	mode         uint32
	tokens       uint32
	topK         uint32
	maxTokens    uint32
	experts      uint32
	slots        uint32
	local        uint32
	indexBytes   uint32
	slotsInverse uint32 // 2^32 over the slots of a rank, rounded up; 0 where ranks have different numbers or one each
	rowBytes     uint32 // of a token here
	wireBytes    uint32 // of a row that crosses
	scaleWords   uint32 // 32-bit words of scales beside a row
	scaleBlock   uint32 // elements with one scale
	part         uint32 // bytes of a row that a warp moves at a time
	parts        uint32 // of a row
	movers       uint32 // warps that move
	depth        uint32 // parts that a warp has under way
	interval     uint32 // cycles from one part of a warp to its next; 0: as they come
	share        uint32 // tokens that a block's shared memory has room for
}

// put encodes s into b, which has moeArgsBytes bytes. The elements of first are encoded one by one.
func (s *oldMoeArgs) put(b []byte) {
	_ = b[839]
	s.world.put(b[0:])
	s.state.put(b[56:])
	binary.LittleEndian.PutUint64(b[240:], s.x)
	binary.LittleEndian.PutUint64(b[248:], s.scales)
	binary.LittleEndian.PutUint64(b[256:], s.choices)
	binary.LittleEndian.PutUint64(b[264:], s.weights)
	binary.LittleEndian.PutUint64(b[272:], s.table)
	binary.LittleEndian.PutUint64(b[280:], s.counters)
	binary.LittleEndian.PutUint64(b[288:], s.mapped)
	binary.LittleEndian.PutUint64(b[296:], s.ticket)
	binary.LittleEndian.PutUint64(b[304:], s.toRows)
	binary.LittleEndian.PutUint64(b[312:], s.toScales)
	binary.LittleEndian.PutUint64(b[320:], s.toIndices)
	binary.LittleEndian.PutUint64(b[328:], s.toWeights)
	binary.LittleEndian.PutUint64(b[336:], s.toSources)
	binary.LittleEndian.PutUint64(b[344:], s.rows)
	binary.LittleEndian.PutUint64(b[352:], s.rowScales)
	binary.LittleEndian.PutUint64(b[360:], s.rowWeights)
	binary.LittleEndian.PutUint64(b[368:], s.rowSources)
	binary.LittleEndian.PutUint64(b[376:], s.ready)
	binary.LittleEndian.PutUint64(b[384:], s.counts)
	binary.LittleEndian.PutUint64(b[392:], s.offsets)
	binary.LittleEndian.PutUint64(b[400:], s.rankCounts)
	binary.LittleEndian.PutUint64(b[408:], s.landed)
	binary.LittleEndian.PutUint64(b[416:], s.fromRows)
	binary.LittleEndian.PutUint64(b[424:], s.fromWeights)
	binary.LittleEndian.PutUint64(b[432:], s.y)
	binary.LittleEndian.PutUint64(b[440:], s.sumWeights)
	binary.LittleEndian.PutUint64(b[448:], s.bias0)
	binary.LittleEndian.PutUint64(b[456:], s.bias1)
	binary.LittleEndian.PutUint64(b[464:], uint64(s.mostRows))
	binary.LittleEndian.PutUint64(b[472:], uint64(s.align))
	binary.LittleEndian.PutUint64(b[480:], uint64(s.capacity))
	binary.LittleEndian.PutUint64(b[488:], uint64(s.offsetBase))
	binary.LittleEndian.PutUint32(b[496:], s.op)
	binary.LittleEndian.PutUint32(b[500:], s.mode)
	binary.LittleEndian.PutUint32(b[504:], s.tokens)
	binary.LittleEndian.PutUint32(b[508:], s.topK)
	binary.LittleEndian.PutUint32(b[512:], s.maxTokens)
	binary.LittleEndian.PutUint32(b[516:], s.experts)
	binary.LittleEndian.PutUint32(b[520:], s.slots)
	binary.LittleEndian.PutUint32(b[524:], s.local)
	binary.LittleEndian.PutUint32(b[528:], s.indexBytes)
	binary.LittleEndian.PutUint32(b[532:], s.slotsInverse)
	binary.LittleEndian.PutUint32(b[536:], s.rowBytes)
	binary.LittleEndian.PutUint32(b[540:], s.wireBytes)
	binary.LittleEndian.PutUint32(b[544:], s.scaleWords)
	binary.LittleEndian.PutUint32(b[548:], s.scaleBlock)
	binary.LittleEndian.PutUint32(b[552:], s.part)
	binary.LittleEndian.PutUint32(b[556:], s.parts)
	binary.LittleEndian.PutUint32(b[560:], s.movers)
	binary.LittleEndian.PutUint32(b[564:], s.depth)
	binary.LittleEndian.PutUint32(b[568:], s.interval)
	binary.LittleEndian.PutUint32(b[572:], s.share)
}

// putMoeArgsFirst encodes element i of first.
func oldPutMoeArgsFirst(b []byte, i int, v uint32) {
	at := 576 + 4*i
	binary.LittleEndian.PutUint32(b[at:], v)
}

// oldReduceArgs is struct sw_reduce_args. One launch of an all-reduce, reduce-scatter or all-gather. Every rank owns one slice of the elements.
type oldReduceArgs struct {
	world       oldWorldWords
	src         uint64 // all slices if the call reduces, else this rank's
	dst         uint64 // all slices if the call gathers, else this rank's
	srcPlace    uint64 // where src lies in this rank's segment, or SW_NOWHERE: peers cannot read it
	dstPlace    uint64 // the same of dst and writing
	block       oldReduceBlock
	count       uint64 // elements of all slices
	shape       uint64 // digest of slices that count does not imply
	call        uint32 // kernels.ReduceCall.Word and, from bit 24 on, the flags
	lines       uint32 // the most blocks that a launch can have
	slots       uint32 // chunks of a block under way through staging
	chunkBytes  uint32 // of one block; a multiple of the tile
	interval    uint32 // cycles from one tile of a block that crosses a link to the next; 0: as they come
	packetBytes int64  // the longest message of packets
}

// put encodes s into b, which has reduceArgsBytes bytes. The elements of bounds are encoded one by one.
func (s *oldReduceArgs) put(b []byte) {
	_ = b[727]
	s.world.put(b[0:])
	binary.LittleEndian.PutUint64(b[56:], s.src)
	binary.LittleEndian.PutUint64(b[64:], s.dst)
	binary.LittleEndian.PutUint64(b[72:], s.srcPlace)
	binary.LittleEndian.PutUint64(b[80:], s.dstPlace)
	s.block.put(b[88:])
	binary.LittleEndian.PutUint64(b[160:], s.count)
	binary.LittleEndian.PutUint64(b[168:], s.shape)
	binary.LittleEndian.PutUint32(b[176:], s.call)
	binary.LittleEndian.PutUint32(b[180:], s.lines)
	binary.LittleEndian.PutUint32(b[184:], s.slots)
	binary.LittleEndian.PutUint32(b[188:], s.chunkBytes)
	binary.LittleEndian.PutUint32(b[192:], s.interval)
	binary.LittleEndian.PutUint64(b[200:], uint64(s.packetBytes))
}

// putReduceArgsBounds encodes element i of bounds.
func oldPutReduceArgsBounds(b []byte, i int, v int64) {
	at := 208 + 8*i
	binary.LittleEndian.PutUint64(b[at:], uint64(v))
}

// oldMulticastArgs is struct sw_multicast_args. One launch of an all-reduce by multicast.
type oldMulticastArgs struct {
	reduce    oldReduceArgs
	multicast uint64 // address at which multicast reaches the beginning of all ranks' segments
}

// put encodes s into b, which has multicastArgsBytes bytes.
func (s *oldMulticastArgs) put(b []byte) {
	_ = b[735]
	s.reduce.put(b[0:])
	binary.LittleEndian.PutUint64(b[728:], s.multicast)
}
