package comm

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"time"
)

// A group that may span hosts has ranks whose addresses say more than the name of a unix socket: a digest of the host, and where the
// rank listens for other hosts, behind spaces. Only the leader of each host is called there.

// address is where a rank is reached.
type address struct {
	socket string
	host   string // empty: its group does not span hosts
	tcp    string
}

func (a address) String() string {
	if a.host == "" {
		return a.socket
	}
	return a.socket + " " + a.host + " " + a.tcp
}

func parseAddress(text string) (address, error) {
	switch words := strings.Split(text, " "); len(words) {
	case 1:
		return address{socket: text}, nil
	case 3:
		return address{words[0], words[1], words[2]}, nil
	}
	return address{}, fmt.Errorf("%w address %q", errMalformed, text)
}

// warnOfStrangers has rank 0 of a group on several hosts say where it has no secret: on standard error if nobody has asked for a log, as those who
// do not know of the secret have not.
func (g *Group) warnOfStrangers(cfg *Config) {
	if g.rank != 0 || g.topology.Hosts == 1 || len(cfg.Secret) > 0 || cfg.epoch > 0 {
		return
	}
	const text = "ranks on several hosts have no secret: whoever reaches the port of rank 0 while they join can be one of them; set SWITCHYARD_SECRET to the same random text on all hosts"
	g.warn(text)
}

// warn says on standard error what somebody has to know who has not asked for a log.
func (g *Group) warn(text string) {
	if g.log.Enabled(context.Background(), slog.LevelWarn) {
		g.log.Warn(text, "group", g.name)
	} else {
		fmt.Fprintf(os.Stderr, "switchyard: group %s: %s\n", g.name, text)
	}
}

// hostDigest is short, and different for different hosts.
func hostDigest(id string) string {
	sum := sha256.Sum256([]byte(id))
	return hex.EncodeToString(sum[:8])
}

// spans reports whether a rank with this address may be in a group with ranks of other hosts.
func spans(addr string) bool { return strings.Contains(addr, " ") }

// openToHosts has the listener listen for other hosts too, if the group may span hosts: on the interface that leads to Config.Addr.
// That may be a name that is not known yet, so it tries until ctx ends.
func (l *Listener) openToHosts(ctx context.Context) error {
	cfg := &l.cfg
	if l.tcp != nil || !cfg.maySpan() {
		return nil
	}
	for wait := 2 * time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		var ln net.Listener
		err := cfg.readPlace()
		if err == nil {
			if _, _, perr := net.SplitHostPort(cfg.Addr); perr != nil { // a name, or nothing for Listen: ranks of one host
				return nil
			}
			ln, err = listenTowards(ctx, cfg.Addr)
		}
		if err == nil {
			l.tcp = ln
			l.addr = address{l.ln.Addr().String(), hostDigest(cfg.host), ln.Addr().String()}.String()
			return nil
		}
		if !sleep(ctx, wait) {
			return fmt.Errorf("no interface for other hosts, which leads to %s: %w", cfg.Addr, lacksFiles(cfg.Rank, err))
		}
	}
}

// listenTowards listens on the interface that leads to addr. No packet is sent.
func listenTowards(ctx context.Context, addr string) (net.Listener, error) {
	var d net.Dialer
	way, err := d.DialContext(ctx, "udp", addr)
	if err != nil {
		return nil, err
	}
	ip := way.LocalAddr().(*net.UDPAddr)
	way.Close()
	var lc net.ListenConfig
	return lc.Listen(ctx, "tcp", (&net.TCPAddr{IP: ip.IP, Zone: ip.Zone}).String())
}

// hosts is on which hosts the ranks of a world are, by world rank.
type hosts struct {
	Topology
	// relayed says that ranks reach other hosts over leaders. In [Local] they reach all themselves.
	relayed bool
}

// hostsOf reads addresses. It is nil if they are of one host. Admit takes whole hosts.
func hostsOf(addrs []string, cfg *Config) (*hosts, error) {
	numbers := map[string]int{}
	of := make([]int, len(addrs))
	without := -1
	for r, text := range addrs {
		a, err := parseAddress(text)
		if err != nil {
			return nil, err
		}
		if a.host == "" {
			without = r
			continue
		}
		if _, known := numbers[a.host]; !known {
			numbers[a.host] = len(numbers)
		}
		of[r] = numbers[a.host]
	}
	switch {
	case len(numbers) < 2:
		return nil, nil
	case without >= 0:
		return nil, mismatched("hosts: %d hosts, and rank %d expects one (its Config.LocalSize, LOCAL_WORLD_SIZE, is Config.Size, or it was given no host:port)", len(numbers), without)
	}
	h := &hosts{Topology: newTopology(of, cfg.Rank), relayed: true}
	if h.PerHost == 0 && (cfg.Late || cfg.members > 0) {
		return nil, mismatched("hosts: %s: newcomers come in whole hosts", h.counts())
	}
	return h, nil
}

// counts says of two hosts with different numbers of ranks how many they have. PerHost is 0.
func (t *Topology) counts() string {
	n := len(t.ranks[0])
	i := slices.IndexFunc(t.ranks, func(of []int) bool { return len(of) != n })
	return fmt.Sprintf("host 0 has %d ranks, host %d has %d", n, i, len(t.ranks[i]))
}

// where says on which hosts ranks are, where there are several.
func (h *hosts) where(ranks []int) string {
	if h == nil {
		return ""
	}
	var of []int
	for _, r := range ranks {
		of = append(of, h.of[r])
	}
	slices.Sort(of)
	return fmt.Sprintf(" of hosts %v", slices.Compact(of))
}

// leader is the leader of a host: its first rank, over which it is reached.
func (h *hosts) leader(host int) int { return h.ranks[host][0] }

// leads says that rank is the leader of its host.
func (h *hosts) leads(rank int) bool { return h.local[rank] == 0 }

// direct says that a and b have a connection.
func (h *hosts) direct(a, b int) bool {
	return h.of[a] == h.of[b] || h.leads(a) && h.leads(b)
}

// next is over whom rank me reaches a rank.
func (h *hosts) next(me, rank int) int {
	switch {
	case h.direct(me, rank):
		return rank
	case h.leads(me):
		return h.leader(h.of[rank])
	}
	return h.leader(h.of[me])
}

// turn is when rank me tells another, among all: leaders last, and that of its own host at the very end. News for them come behind the news
// that they pass on, so a leader that has heard from all has passed on all.
func (h *hosts) turn(me, rank int) int {
	switch {
	case h.of[rank] == h.of[me] && h.leads(rank):
		return 3
	case h.of[rank] == h.of[me]:
		return 2
	case h.leads(rank):
		return 1
	}
	return 0
}

// behind are the ranks that rank me does not reach without peer.
func (h *hosts) behind(me, peer int) []int {
	if !h.relayed || !h.leads(peer) || peer == me {
		return nil
	}
	if h.of[peer] != h.of[me] {
		return h.ranks[h.of[peer]][1:]
	}
	var others, leaders []int
	for r := range h.of {
		switch {
		case h.of[r] == h.of[me]:
		case h.leads(r):
			leaders = append(leaders, r)
		default:
			others = append(others, r)
		}
	}
	return append(others, leaders...)
}

// meshKey is proven on connections between hosts, and signs what they carry: it is made of the secret and of the addresses of all ranks,
// which nobody can guess.
func meshKey(secret []byte, addrs []string) []byte {
	mac := hmac.New(sha256.New, secret)
	io.WriteString(mac, "switchyard hosts\x00")
	for _, a := range addrs {
		mac.Write(appendString(nil, a))
	}
	return mac.Sum(nil)
}

// maxSealed is what one signed frame of a connection between hosts carries at most. A frame is taken whole, and a slow link needs time.
const maxSealed = 64 << 10

// sealedConn is a connection between hosts after its handshake: a stream of bytes in signed frames.
type sealedConn struct {
	net.Conn
	s      *session
	unread []byte
}

func newSealedConn(conn net.Conn, s *session) *sealedConn {
	s.limit = maxSealed
	return &sealedConn{Conn: conn, s: s}
}

func (c *sealedConn) Read(b []byte) (int, error) {
	for len(c.unread) == 0 {
		kind, body, err := c.s.recv()
		if err != nil {
			return 0, err
		}
		if kind != frameStream {
			return 0, fmt.Errorf("%w frame: %q in a stream", errMalformed, byte(kind))
		}
		c.unread = body
	}
	n := copy(b, c.unread)
	c.unread = c.unread[n:]
	return n, nil
}

func (c *sealedConn) Write(b []byte) (int, error) {
	sent := 0
	for len(b) > 0 {
		part := b[:min(len(b), maxSealed)]
		if err := c.s.send(frameStream, part); err != nil {
			return sent, err
		}
		sent, b = sent+len(part), b[len(part):]
	}
	return sent, nil
}
