package proctest

import (
	"testing"

	"github.com/switchyard-moe/switchyard/internal/proctest/netns"
)

// Namespace is a network namespace, which stands for a host in tests.
type Namespace struct {
	*netns.Namespace
	t testing.TB
}

// Namespaces makes network namespaces that reach each other, until the end of the test. It skips the test where "netns" is Missing.
func Namespaces(t testing.TB, n int) []*Namespace {
	t.Helper()
	net, err := netns.New(n)
	if err != nil {
		Missing(t, "netns", err)
	}
	t.Cleanup(net.Close)
	spaces := make([]*Namespace, n)
	for i, s := range net.Spaces {
		spaces[i] = &Namespace{s, t}
	}
	return spaces
}

// Limit bounds what the namespace sends: rate is as tc writes it, such as 2gbit. It skips the test where that is not possible.
func (s *Namespace) Limit(rate string) {
	s.t.Helper()
	if err := s.Namespace.Limit(rate); err != nil {
		Missing(s.t, "netns", err)
	}
}

// Void gives the namespace an interface of this name whose packets are lost, with an address and a way to another one. It skips the test where
// that is not possible.
func (s *Namespace) Void(name, address, to string) {
	s.t.Helper()
	if err := s.Namespace.Void(name, address, to); err != nil {
		s.t.Skip(err)
	}
}

// Cut takes the namespace off the others, without a word to those that are connected.
func (s *Namespace) Cut() {
	s.t.Helper()
	if err := s.Namespace.Cut(); err != nil {
		s.t.Fatal(err)
	}
}

// Mend ends a Cut.
func (s *Namespace) Mend() {
	s.t.Helper()
	if err := s.Namespace.Mend(); err != nil {
		s.t.Fatal(err)
	}
}
