package comm

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
)

// ID is where the ranks of one group meet, and a secret that they prove there, in
// one line of text. A process that has it can join.
type ID string

const (
	idPrefix   = "id:"
	filePrefix = "file://"
	secretSize = 16
)

// NewID returns a new ID. One process makes it, rank 0's as a rule, and hands it
// to all ranks by any channel: a store, a broadcast, a file, an argument. Each
// rank sets Config.Addr to it. host is an address of rank 0's host, where a port
// is chosen that is free now; with "" the ranks are on one host and need none.
// Nothing is open after NewID, so an ID that is not used costs nothing.
func NewID(host string) (ID, error) { return newID(host, "") }

// newID is NewID for ranks whose sockets are in a folder, if that is not empty.
func newID(host, sockets string) (ID, error) {
	addr := newSocketName(sockets)
	if host != "" {
		l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
		if err != nil {
			return "", fmt.Errorf("comm: new id: host %q is not this one: %w", host, err)
		}
		addr = net.JoinHostPort(host, fmt.Sprint(l.Addr().(*net.TCPAddr).Port))
		if err := l.Close(); err != nil {
			return "", fmt.Errorf("comm: new id: %w", err)
		}
	}
	var secret [secretSize]byte
	rand.Read(secret[:])
	return ID(idPrefix + hex.EncodeToString(secret[:]) + ":" + addr), nil
}

// parse returns the two halves of an ID. Errors do not show the secret.
func (id ID) parse() (addr string, secret []byte, err error) {
	text, _ := strings.CutPrefix(string(id), idPrefix)
	digits, addr, _ := strings.Cut(text, ":")
	secret, err = hex.DecodeString(digits)
	if err != nil || len(secret) != secretSize || addr == "" || strings.HasPrefix(addr, idPrefix) {
		return "", nil, fmt.Errorf("addr is an ID of %d bytes that NewID has not made, or not all of it", len(id))
	}
	return addr, secret, nil
}

// placeName is an address for logs, without the secret of an ID.
func placeName(addr string) string {
	if strings.HasPrefix(addr, idPrefix) {
		at, _, _ := ID(addr).parse()
		return idPrefix + "...:" + at
	}
	return addr
}

// findPlace turns an Addr that stands for another into that. Rank 0 leaves an ID in the file of a file's address, until done is called.
func (c *Config) findPlace() (done func(), err error) {
	done = func() {}
	if c.gid == 0 && c.Job != "" && !c.Late {
		c.gid = groupID(0, "job "+c.Job, 0, 0)
	}
	if c.Size == 1 && !c.Late {
		return done, nil
	}
	path, isFile := strings.CutPrefix(c.Addr, filePrefix)
	switch {
	case isFile && !filepath.IsAbs(path):
		return done, fmt.Errorf("addr %q, want file:// and an absolute path", c.Addr)
	case isFile && (c.Rank > 0 || c.Late || c.Replaces):
		c.file, c.secretOfFile = path, len(c.Secret) == 0
		return done, nil
	case isFile:
		host := ""
		if c.maySpan() {
			if host, err = os.Hostname(); err != nil {
				return done, err
			}
		}
		id, err := newID(host, c.Sockets)
		if err != nil {
			return done, err
		}
		if err := writePlace(path, id); err != nil {
			return done, fmt.Errorf("addr %q: %w", c.Addr, err)
		}
		c.Addr = string(id)
		done = func() { removePlace(path, id) }
	}
	return done, c.parsePlace()
}

// parsePlace takes address and secret out of an ID.
func (c *Config) parsePlace() error {
	if !strings.HasPrefix(c.Addr, idPrefix) {
		return nil
	}
	addr, secret, err := ID(c.Addr).parse()
	if err != nil {
		return err
	}
	c.Addr = addr
	if len(c.Secret) == 0 {
		c.Secret = secret
	}
	return nil
}

// readPlace reads the file of a file's address, again for every try: it may be of a job before, whose rank 0 was killed.
func (c *Config) readPlace() error {
	if c.file == "" {
		return nil
	}
	id, err := os.ReadFile(c.file)
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("rank 0 has not written it: %w", err)
	}
	if err != nil {
		return err
	}
	addr, secret, err := ID(id).parse()
	if err != nil {
		return fmt.Errorf("%s: %w", c.file, err)
	}
	c.Addr = addr
	if c.secretOfFile {
		c.Secret = secret
	}
	return nil
}

// writePlace leaves id in a file, which has all of it or does not exist.
func writePlace(path string, id ID) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*") // for this user only
	if err != nil {
		return err
	}
	_, err = f.WriteString(string(id))
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// removePlace takes id out of the file, which may be another group's by now, or gone.
func removePlace(path string, id ID) {
	if have, err := os.ReadFile(path); err == nil && ID(have) == id {
		_ = os.Remove(path)
	}
}
