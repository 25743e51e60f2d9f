package comm

import (
	"cmp"
	"crypto/rand"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Defaults of [Config].
const (
	DefaultJoinTimeout = 2 * time.Minute
	DefaultPeerTimeout = 10 * time.Second
)

// maxSocketName is what the address of a unix socket has room for.
const maxSocketName = 107

// maxName keeps a hello small.
const maxName = 255

// Config says who this rank is and where the ranks meet. The zero value is a
// group of one. Size, PeerTimeout, Majority and Secret must be the same on every rank.
type Config struct {
	// Rank is this rank's number, from 0 to Size-1.
	Rank int
	// Size is the number of ranks. Default 1.
	Size int
	// LocalRank is this rank's number on its host, from 0 to LocalSize-1. It
	// serves callers to choose a device; this package only checks it.
	LocalRank int
	// LocalSize is the number of ranks on this host. Default Size. Less than
	// Size says that the group may span hosts: then this rank can be called on a
	// port of its own while ranks join, on the interface that leads to Addr. It
	// is not checked that LocalSize ranks are here.
	LocalSize int

	// Addr is where rank 0 listens while ranks join: "host:port", or "@name", a
	// name of a unix socket that is this user's alone, on this host and in its
	// network namespace, and leaves nothing behind; or an [ID]; or "file:///path"
	// of a file that all ranks can read, in which rank 0 leaves an ID until the
	// join ends. It is not used by [Listen], nor by a group of one.
	Addr string
	// Sockets is a folder in which this rank has its unix socket, an absolute path
	// without spaces of at most 80 bytes. Ranks that have mounted the same folder
	// are on one host, also in network namespaces of their own, as pods are. It is
	// for this user alone, as are the sockets. Default: a name in the network
	// namespace, and only ranks in one namespace are on one host.
	Sockets string
	// Job tells this start of a job from others that meet at the same Addr, such
	// as those whose ranks were stopped and not ended. Ranks of another job are
	// refused. [FromEnv] sets it.
	Job string
	// Launcher is the name of the launcher that [FromEnv] found. Nothing reads it.
	Launcher string
	// Secret, when set, must be proven by every rank that joins, without being
	// revealed. It should have the strength of a key, 16 random bytes or more:
	// who listens to a join can try guesses on what it heard. Without it rank 0 of a
	// group on several hosts warns, also on standard error where there is no Logger.
	Secret []byte

	// JoinTimeout bounds the join. Default 2 minutes.
	JoinTimeout time.Duration
	// PeerTimeout is how long a rank may be silent before the others count it
	// as lost, for ranks that are stopped or cut off; a process that ends is
	// noticed at once. Default 10 seconds, at least 100 ms.
	PeerTimeout time.Duration
	// Majority has [Group.Shrink] of a group on several hosts refuse to go on with
	// fewer than half of the ranks, or with half of them and without rank 0. So of
	// hosts that no longer reach each other one part at most goes on. It costs the
	// job where most hosts have really stopped. Default: every part goes on.
	Majority bool

	// Name of the group, for logs and messages. Default "world".
	Name string
	// Logger gets what is worth knowing. Default: nothing is logged.
	Logger *slog.Logger

	// Late has Join find a group that runs already, and whose ranks admit it
	// by [Group.Admit]. Rank and Size are left out: they are given. Addr, Secret,
	// PeerTimeout, Majority and Name are those of the Admit. A newcomer to a group on
	// several hosts has LocalRank and LocalSize, of the newcomers on its host;
	// for others LocalSize is left out.
	Late bool

	// Replaceable has this rank keep what its collective calls return, descriptors
	// of memory included, so that a process can take the place of a rank that is
	// lost, see [Group.Replace]: at most 4096 calls, 16 MiB and 1024 descriptors.
	Replaceable bool
	// Replaces has Join take the place of rank Rank in a group of Size ranks that
	// runs, of which one calls [Group.Replace]. Addr, Secret, PeerTimeout and
	// Name are those of that call. Launchers set Rank and Size for a process
	// that they start again.
	Replaces bool

	members          int           // Admit: ranks that are there already
	onHosts          bool          // Admit: they are on several hosts
	gid              uint64        // what tells ranks of an Admit, or of a Job, from others
	epoch            int           // of the group to be: 0, and in an Admit 1 more than that of the group before
	seats            []int         // Admit: the ranks' numbers in the group that met first; newcomers get those that are free
	file             string        // where another rank finds the ID that rank 0 leaves
	secretOfFile     bool          // Secret is that of the file
	handshakeTimeout time.Duration // for those who connect; shorter in tests
	unproven         int           // connections that may be unproven at once; fewer in tests
	version          uint16        // of the protocol; others in tests
	host             string        // which this rank is on; others in tests
	release          string        // and build of Switchyard; others in tests
	delay            func()        // before everything that is sent, in tests
}

func (c *Config) validate() error {
	c.Size = cmp.Or(c.Size, 1)
	if !c.Late {
		c.LocalSize = cmp.Or(c.LocalSize, c.Size)
	}
	c.JoinTimeout = cmp.Or(c.JoinTimeout, DefaultJoinTimeout)
	c.PeerTimeout = cmp.Or(c.PeerTimeout, DefaultPeerTimeout)
	c.Name = cmp.Or(c.Name, "world")
	c.handshakeTimeout = cmp.Or(c.handshakeTimeout, handshakeGrace)
	c.version = cmp.Or(c.version, protocolVersion)
	if err := c.findHost(); err != nil {
		return err
	}
	c.release = cmp.Or(c.release, build())
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	switch {
	case c.Late && (c.Rank != 0 || c.Size != 1):
		return fmt.Errorf("rank %d of %d with Late, which gives both", c.Rank, c.Size)
	case c.Size < 1 || c.Size > MaxSize:
		return fmt.Errorf("size %d, want 1 to %d", c.Size, MaxSize)
	case c.Rank < 0 || c.Rank >= c.Size:
		return fmt.Errorf("rank %d of %d, want 0 to %d", c.Rank, c.Size, c.Size-1)
	case !c.Late && (c.LocalSize < 1 || c.LocalSize > c.Size):
		return fmt.Errorf("local size %d of %d ranks", c.LocalSize, c.Size)
	case c.Late && (c.LocalSize < 0 || c.LocalSize >= MaxSize):
		return fmt.Errorf("local size %d with Late, want 0 to %d", c.LocalSize, MaxSize-1)
	case c.LocalRank < 0 || c.LocalRank >= max(c.LocalSize, 1):
		return fmt.Errorf("local rank %d of %d, want 0 to %d", c.LocalRank, c.LocalSize, c.LocalSize-1)
	case c.JoinTimeout < 0:
		return fmt.Errorf("join timeout %v is negative", c.JoinTimeout)
	case len(c.Name) > maxName:
		return fmt.Errorf("a name of %d bytes, at most %d", len(c.Name), maxName)
	case c.PeerTimeout < 100*time.Millisecond:
		return fmt.Errorf("peer timeout %v, want at least 100ms", c.PeerTimeout)
	}
	return nil
}

// maySpan says that the group may span hosts.
func (c *Config) maySpan() bool { return c.Late && c.LocalSize > 0 || !c.Late && c.LocalSize < c.Size }

// slow is conn, with the delay of tests before whatever is written.
func (c *Config) slow(conn net.Conn) net.Conn {
	if c.delay == nil {
		return conn
	}
	return &slowConn{conn, c.delay}
}

type slowConn struct {
	net.Conn
	delay func()
}

func (c *slowConn) Write(b []byte) (int, error) {
	c.delay()
	return c.Conn.Write(b)
}

// network is what Addr is an address of.
func (c *Config) network() string {
	if strings.HasPrefix(c.Addr, "@") || c.inSockets(c.Addr) {
		return "unix"
	}
	return "tcp"
}

// inSockets says that addr is one of newSocketName in the folder of sockets.
func (c *Config) inSockets(addr string) bool {
	return c.Sockets != "" && filepath.Dir(addr) == c.Sockets
}

// findHost finds out on which host this rank is.
func (c *Config) findHost() (err error) {
	if c.Sockets != "" {
		most := maxSocketName - len("/"+rand.Text())
		if c.Sockets = filepath.Clean(c.Sockets); !filepath.IsAbs(c.Sockets) || strings.Contains(c.Sockets, " ") || len(c.Sockets) > most {
			return fmt.Errorf("sockets %q of %d bytes, want an absolute path of at most %d without spaces", c.Sockets, len(c.Sockets), most)
		}
		if info, err := os.Stat(c.Sockets); err == nil && !info.IsDir() {
			return fmt.Errorf("sockets %q is not a folder", c.Sockets)
		}
	}
	if c.host == "" {
		c.host, err = hostID(c.Sockets)
	}
	return err
}

// hint is why rank 0 may not be found at Addr though it is there.
func (c *Config) hint() string {
	if c.network() == "unix" && c.Sockets == "" {
		return "a name of one user in one network namespace; SWITCHYARD_PORT has ranks meet on a port, SWITCHYARD_SOCKETS in a folder; "
	}
	return ""
}

func (c *Config) validateAddr() error {
	if c.Size == 1 && !c.Late || c.file != "" {
		return nil
	}
	if name, ok := strings.CutPrefix(c.Addr, "@"); ok && name != "" && len(c.Addr) <= maxSocketName || c.inSockets(c.Addr) {
		return nil
	}
	host, port, err := net.SplitHostPort(c.Addr)
	if err != nil || host == "" || port == "" || port == "0" {
		return fmt.Errorf("addr %q, want the host:port of rank 0, a name of 1 to %d bytes behind @, an ID, or file:///path", c.Addr, maxSocketName-1)
	}
	return nil
}
