package host

import "github.com/switchyard-moe/switchyard/kernels"

// Sends is what a rank sends in a dispatch over several hosts.
type Sends struct {
	// Records are the tokens that cross to each host, Entries the choices that go with them, and HeadBytes what travels in front of the rows.
	Records, Entries, HeadBytes []int
	// Rows are the rows that each rank has of this rank.
	Rows []int
}

// SendsOf is what the rank of the bounds sends for these choices, TopK a token, by the code of launches and without one.
func SendsOf(m *kernels.DispatchBounds, experts []int32) Sends {
	rankOf := make([]int32, m.Slots())
	for r := range m.Ranks {
		for s := m.First[r]; s < m.First[r+1]; s++ {
			rankOf[s] = int32(r)
		}
	}
	d := &dispatching{m: m, r: &routing{}, b: newBeyond(m.Hosts)}
	d.r.init(m, rankOf)
	route(m, d.r, experts, nil, 0)
	hosts := m.Hosts.Count()
	s := Sends{Records: make([]int, hosts), Entries: make([]int, hosts), HeadBytes: make([]int, hosts), Rows: make([]int, m.Ranks)}
	for host := range hosts {
		s.Records[host], s.Entries[host] = d.recordsFor(host)
		if host != d.b.me.host {
			s.HeadBytes[host] = headOf(s.Records[host], s.Entries[host])
		}
	}
	if m.Layout.ByToken() {
		for r, n := range d.r.counts[m.Slots():] {
			s.Rows[r] = int(n)
		}
		return s
	}
	for slot, n := range d.r.counts[:m.Slots()] {
		s.Rows[rankOf[slot]] += int(n)
	}
	return s
}
