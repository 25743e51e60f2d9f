package host

import (
	"encoding/binary"
	"structs"
	"sync/atomic"
	"time"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
)

// A token crosses to another host once. It goes to the *gateway* there, the rank with the local rank of its own, in an inbox in the gateway's
// segment, and all ranks of that host take from it what is for them. A message is a head, a list of records and their entries, and for
// all calls but a combine a row for each record. A record is a token that has choices on that host; its entries are these choices, as the
// token's rank has routed them. So a gateway keeps nothing of a routing. In a combine the gateway answers with a sum for each record.
//
// There is one inbox for each other host, for all handles: a rank begins a call, and so lets others begin it, when it has taken all that was
// sent to its host in earlier ones. Answers wait in the handle's Staging until its Receive.
//
// The rail counts puts for ever, in words that have one writer. Each of a rank's calls has one notice to every rank of other hosts, and each
// call that goes on after its meeting has one head to every gateway; those and the number of chunks in the head say what has landed.

// beyondBlock is where the memory for other hosts lies.
type beyondBlock struct {
	hosts                    int   // 0 on one host
	notice                   int64 // bytes of a notice with its counts
	rows, inbox              int64 // where the rows begin in an inbox, and its size
	rowStride, sumStride     int64 // of the rows of a dispatch with their scales, and of gradients
	sumBytes, answer, weight int64 // of an answer to a record: the sum as it crosses, with weights behind it; where these begin
	perHost, perRank         int64 // answers of a gateway, and of a rank in a backward call
	returns                  int64 // all answers of a handle
}

// The words of the line of a rank of another host: how many of its notices, its heads, its chunks of rows and its answers are here.
const (
	noticesWord = movesWord + 1 + iota
	headsWord
	chunksOfRowsWord
	answersWord
	beyondWords
)

// messageHead is in front of the records of a message and their entries.
type messageHead struct {
	_       structs.HostLayout
	Records int64
	Entries int64
	Chunks  uint64 // of rows that this rank has sent to the gateway, these included
	Asks    uint64 // 1: for gradients of its weights
	_       [4]uint64
}

const (
	messageBytes = 64 // of a messageHead
	// recordBytes is a record, entryBytes an entry: rank, slot, row, choice, weight.
	recordBytes, entryBytes = 8, 20
	// chunkOfRows is about the size of a put of rows.
	chunkOfRows = 256 << 10
)

func newBeyondBlock(m *kernels.DispatchBounds) (l beyondBlock) {
	l.hosts = m.Hosts.Count()
	tokens, choices := int64(m.MaxTokens), int64(m.MaxTokens)*int64(m.TopK)
	l.notice = kernels.LineBytes + kernels.AlignUp(4*int64(m.Slots()+m.Ranks), kernels.LineBytes)
	l.rowStride = kernels.AlignUp(m.RowBytes(), 4) + 4*int64(m.ScaleWords())
	l.sumStride = kernels.AlignUp(m.SumBytes(), 4)
	l.rows = kernels.AlignUp(messageBytes+recordBytes*tokens+4+entryBytes*choices, kernels.LineBytes)
	l.inbox = l.rows + kernels.AlignUp(tokens*max(l.rowStride, l.sumStride), kernels.LineBytes)
	l.sumBytes = m.SumBytes()
	if m.Float8Partials {
		l.sumBytes = kernels.AlignUp(int64(m.Hidden), 4) + 4*int64((m.Hidden+partialBlock-1)/partialBlock)
	}
	l.weight = kernels.AlignUp(l.sumBytes, 4)
	l.answer = l.weight + 4*int64(m.TopK)
	l.perHost = kernels.AlignUp(tokens*l.answer, kernels.LineBytes)
	l.perRank = kernels.AlignUp(4*choices, kernels.LineBytes)
	l.returns = max(int64(l.hosts)*l.perHost, int64(m.Ranks)*l.perRank)
	return l
}

// beyondLine is a line in this rank's segment that only rank src of another host names.
func (l *dispatchBlock) beyondLine(src int) int64 {
	at := l.notice(0, 2*l.n)
	if l.beyond.hosts == 0 {
		return at
	}
	return at + int64(src)*kernels.LineBytes
}

// beyondNotice is the notice of a rank of another host, with its counts.
func (l *dispatchBlock) beyondNotice(epoch uint64, src int) int64 {
	return l.counts(0, 2*l.n) + (int64(epoch&1)*int64(l.n)+int64(src))*l.beyond.notice
}

// inbox is for messages of the rank of a host that this one is gateway for.
func (l *dispatchBlock) inbox(host int) int64 {
	return l.beyondNotice(0, 2*l.n) + int64(host)*l.beyond.inbox
}

// answers is where the gateway on a host answers, and ownAnswers where a rank does in a backward call.
func (l *dispatchBlock) answers(h *kernels.DispatchHandle, host int) int64 {
	return l.weights(h, 2) + int64(host)*l.beyond.perHost
}

func (l *dispatchBlock) ownAnswers(h *kernels.DispatchHandle, rank int) int64 {
	return l.weights(h, 2) + int64(rank)*l.beyond.perRank
}

// beyond is what a dispatcher has for other hosts.
type beyond struct {
	hostRanks
	calls   uint64   // that went on after their meeting
	notices uint64   // that this rank has sent to each rank of other hosts
	records []int    // by host: of the last message to it
	awaits  []uint64 // by rank: answers that calls so far want of it
	handles []routing

	// Memory that the rail may read until flush.
	notice  []byte
	pack    [][]byte    // by host: a message,
	replies [][]byte    // and the answers to one
	dots    [][]float32 // by rank
}

func newBeyond(hosts *kernels.Hosts) *beyond {
	return &beyond{hostRanks: newHostRanks(hosts)}
}

func (b *beyond) open(e *Engine, line func(rank int) int64) {
	b.openFars(e, beyondWords, func(_, from int) int64 { return line(from) })
	hosts, ranks := len(b.of), len(b.ranks)
	b.records, b.pack, b.replies = make([]int, hosts), make([][]byte, hosts), make([][]byte, hosts)
	b.awaits, b.dots = make([]uint64, ranks), make([][]float32, ranks)
}

// until waits for a word that counts puts of src.
func (m *dispatching) until(src *far, word *atomic.Uint64, count uint64) error {
	if word.Load() >= count {
		return nil
	}
	began := time.Now()
	err := m.w.until(src, word, count)
	m.waited(src.rank, time.Since(began))
	return err
}

// tellBeyond sends this rank's notice and counts to all ranks of other hosts.
func (m *dispatching) tellBeyond(n notice, counts []int32) error {
	b := m.b
	if err := m.w.flush(); err != nil { // of the call before
		return err
	}
	b.notice = sized(b.notice, int(m.block.beyond.notice))
	clear(b.notice)
	for i, v := range n.words() {
		binary.LittleEndian.PutUint64(b.notice[8*(i+1):], v)
	}
	if counts != nil {
		copy(shm.View[int32](b.notice[kernels.LineBytes:]), m.r.counts)
	}
	b.notices++
	for _, f := range b.fars {
		if err := m.w.put(f, m.block.beyondNotice(m.r.epoch, m.m.Rank), b.notice, noticesWord); err != nil {
			return err
		}
	}
	return nil
}

// hearBeyond takes in the notices of all ranks of other hosts.
func (m *dispatching) hearBeyond(counts []int32) error {
	each := len(m.r.counts)
	for _, f := range m.b.fars {
		if err := m.until(f, f.word(noticesWord), m.b.notices); err != nil {
			return err
		}
		src := f.rank
		bytes := m.e.space.Range(m.e.space.Rank, m.block.beyondNotice(m.r.epoch, src), m.block.beyond.notice)
		m.r.notices[src] = noticeOf(func(at int64) uint64 { return binary.LittleEndian.Uint64(bytes[at:]) })
		if counts != nil {
			copy(counts[src*each:][:each], shm.View[int32](bytes[kernels.LineBytes:]))
		}
	}
	return nil
}

// message is what a rank of another host has sent to its gateway here.
type message struct {
	src     int
	first   []int32 // entries of record i are first[i] to first[i+1]
	tokens  []int32
	entries []int32 // five numbers each
	rows    []byte
	asks    bool
}

func (g *message) entry(i int32) (row routedRow) {
	n := g.entries[5*i:][:5]
	return routedRow{rank: n[0], slot: n[1], row: n[2], choice: n[3], weight: shm.View[float32](shm.Bytes(n[4:5]))[0]}
}

// message waits for the message of src in the call-th call that went on, with its rows.
func (m *dispatching) message(src int, call uint64) (g message, err error) {
	f := m.b.far(src)
	if err := m.until(f, f.atGate(headsWord), call); err != nil {
		return g, err
	}
	bytes := m.e.space.Range(f.place, m.block.inbox(f.host), m.block.beyond.inbox)
	head := shm.Of[messageHead](bytes)
	if err := m.until(f, f.atGate(chunksOfRowsWord), head.Chunks); err != nil {
		return g, err
	}
	records := head.Records
	numbers := shm.View[int32](bytes[messageBytes:][:recordBytes*records+4+entryBytes*head.Entries])
	g = message{src: src, first: numbers[:records+1], tokens: numbers[records+1:][:records], entries: numbers[2*records+1:], asks: head.Asks != 0}
	g.rows = bytes[m.block.beyond.rows:]
	return g, nil
}

// sendRecords sends the records of this rank's tokens to the gateway of every other host, with rows of stride bytes that row writes, if it is set.
func (m *dispatching) sendRecords(stride int64, row func(t int, to []byte), weight func(t int, row *routedRow) float32, asks bool) error {
	b := m.b
	b.calls++
	for i := range b.railPeers { // hosts begin with different ones
		to := b.railPeers[(i+b.me.host)%len(b.railPeers)]
		if err := m.sendHost(b.far(to), stride, row, weight, asks); err != nil {
			b.pack = make([][]byte, len(b.of)) // what has been put may still be read
			return err
		}
	}
	return nil
}

func (m *dispatching) sendHost(to *far, stride int64, row func(t int, to []byte), weight func(t int, row *routedRow) float32, asks bool) error {
	b, r, of, host := m.b, m.r, m.b.hosts.Host, to.host
	records, entries := m.recordsFor(host)
	b.records[host] = records
	head := headOf(records, entries)
	bytes := sized(b.pack[host], head+records*int(stride))
	b.pack[host] = bytes
	numbers := shm.View[int32](bytes[messageBytes:head])
	first, tokens, list := numbers[:records+1], numbers[records+1:][:records], numbers[2*records+1:]
	at, n := int32(0), 0
	for t := range r.tokens() {
		begin := at
		for i := r.first[t]; i < r.first[t+1]; i++ {
			if q := &r.rows[i]; of[q.rank] == host {
				e := list[5*at:][:5]
				e[0], e[1], e[2], e[3] = q.rank, q.slot, q.row, q.choice
				shm.View[float32](shm.Bytes(e[4:]))[0] = weight(t, q)
				at++
			}
		}
		if at > begin {
			first[n], tokens[n] = begin, int32(t)
			n++
		}
	}
	first[n] = at
	perChunk := max(1, chunkOfRows/max(1, int(stride)))
	chunks := 0
	if row != nil {
		chunks = (records + perChunk - 1) / perChunk
	}
	h := messageHead{Records: int64(records), Entries: int64(entries), Chunks: to.puts[chunksOfRowsWord] + uint64(chunks)}
	if asks {
		h.Asks = 1
	}
	*shm.Of[messageHead](bytes) = h
	inbox := m.block.inbox(b.me.host)
	if err := m.w.put(to, inbox, bytes[:head], headsWord); err != nil {
		return err
	}
	rows := bytes[head:]
	for from := 0; row != nil && from < records; from += perChunk {
		end := min(from+perChunk, records)
		for i := from; i < end; i++ {
			row(int(tokens[i]), rows[int64(i)*stride:][:stride])
		}
		if err := m.w.put(to, inbox+m.block.beyond.rows+int64(from)*stride, rows[int64(from)*stride:int64(end)*stride], chunksOfRowsWord); err != nil {
			return err
		}
	}
	m.sent(to.rank, int64(records)*stride)
	return nil
}

// headOf is what travels in front of the rows of a message.
func headOf(records, entries int) int {
	return messageBytes + recordBytes*records + 4 + entryBytes*entries
}

// recordsFor counts this rank's tokens that have choices on a host, and these choices.
func (m *dispatching) recordsFor(host int) (records, entries int) {
	for t := range m.r.tokens() {
		before := entries
		for i := m.r.first[t]; i < m.r.first[t+1]; i++ {
			if m.b.hosts.Host[m.r.rows[i].rank] == host {
				entries++
			}
		}
		if entries > before {
			records++
		}
	}
	return records, entries
}
