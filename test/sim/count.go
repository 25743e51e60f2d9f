package main

import (
	"math/rand/v2"
	"slices"

	"github.com/switchyard-moe/switchyard/internal/shm"
	"github.com/switchyard-moe/switchyard/kernels"
	"github.com/switchyard-moe/switchyard/kernels/host"
)

// The shape of all rows: experts a token, ranks a host, elements of a row, and the bytes of one in float8 with a scale for each 128
// elements, and in bfloat16.
const (
	topK    = 8
	perHost = 8
	hidden  = 7168
	float8  = hidden + hidden/128*4
	bf16    = 2 * hidden
)

// most bounds the tokens of one count: of more, evenly chosen ranks stand for all.
const most = 1 << 19

// shape is what is drawn: tokens a rank of ep ranks, whose experts are on the best hosts of a number, 0 for any.
type shape struct {
	ep, tokens, groups int
}

// experts are how many there are: 256, or as many as divide evenly among more ranks.
func (s shape) experts() int { return (max(256, s.ep) + s.ep - 1) / s.ep * s.ep }

// counts are rows by rank, means over ranks, as the plan sends them for drawn choices.
type counts struct {
	remote  float64 // that cross to other hosts, once a host
	logical float64 // the same with the own host, as DeepEP V1 and UCCL-EP count
	choices float64 // a row for each choice on another host, as kernels for few tokens send
	inside  float64 // that go to other ranks of a host, by their sender or by their gateway
	head    float64 // bytes in front of the rows that cross
	busiest float64 // the busiest port's rows that cross over the mean's; 1 where ranks stand for others
}

// count draws the choices of the ranks and has the plan say what they send.
func count(s shape) counts {
	rng := rand.New(rand.NewPCG(uint64(s.ep), uint64(s.tokens+s.groups)))
	step := max(1, s.ep*s.tokens/most)
	hosts := s.ep / perHost
	var c counts
	var sent []float64
	received, ranks := make([]float64, s.ep), 0.0
	for rank := 0; rank < s.ep; rank += step {
		m := bounds(s, rank)
		sends := host.SendsOf(m, draw(rng, s))
		own, here := rank/perHost, 0.0
		for h := range hosts {
			c.logical += float64(sends.Records[h])
			c.head += float64(sends.HeadBytes[h])
			gateway := h*perHost + rank%perHost
			for r := h * perHost; r < (h+1)*perHost; r++ {
				if r != gateway {
					c.inside += float64(sends.Rows[r])
				}
			}
			if h != own {
				here += float64(sends.Records[h])
				received[gateway] += float64(sends.Records[h])
				c.choices += float64(sends.Entries[h])
			}
		}
		c.remote += here
		sent = append(sent, here)
		ranks++
	}
	for _, v := range []*float64{&c.remote, &c.logical, &c.choices, &c.inside, &c.head} {
		*v /= ranks
	}
	if c.busiest = 1; step == 1 && hosts > 1 {
		c.busiest = max(slices.Max(sent), slices.Max(received)) / c.remote
	}
	return c
}

// bounds are those of a rank's dispatcher: experts in order, a row for every rank that a token goes to.
func bounds(s shape, rank int) *kernels.DispatchBounds {
	experts := s.experts()
	m := &kernels.DispatchBounds{Rank: rank, Ranks: s.ep, Experts: experts, TopK: topK, MaxTokens: s.tokens, Hidden: hidden, IndexBytes: 4, Layout: kernels.TokenRows}
	table := make([]int32, 0, 3*experts+1)
	for e := range experts + 1 {
		table = append(table, int32(e))
	}
	for range 2 { // expert e is in slot e
		for e := range experts {
			table = append(table, int32(e))
		}
	}
	m.Placement = kernels.Buffer{Mem: shm.Bytes(table), Bytes: int64(4 * len(table))}
	h := &kernels.Hosts{Rank: rank}
	for r := range s.ep {
		m.First = append(m.First, int32(r*(experts/s.ep)))
		h.Host = append(h.Host, r/perHost)
		if r/perHost == rank/perHost {
			h.Ranks = append(h.Ranks, r)
		}
	}
	m.First, m.Hosts = append(m.First, int32(experts)), h
	return m
}

// draw draws the choices of one rank's tokens: different experts with equal chances, or the best by score on the hosts with the best scores.
func draw(rng *rand.Rand, s shape) []int32 {
	experts, hosts := s.experts(), s.ep/perHost
	all := make([]int32, 0, s.tokens*topK)
	if s.groups == 0 || s.groups >= hosts {
		for range s.tokens {
			own := len(all)
			for len(all) < own+topK {
				if e := rng.Int32N(int32(experts)); !slices.Contains(all[own:], e) {
					all = append(all, e)
				}
			}
		}
		return all
	}
	scores, best, order := make([]float32, experts), make([]float32, hosts), make([]int32, 0, experts)
	each := experts / hosts
	for range s.tokens {
		clear(best)
		for e := range scores {
			scores[e] = rng.Float32()
			best[e/each] = max(best[e/each], scores[e])
		}
		ranked := slices.Sorted(slices.Values(best))
		least := ranked[hosts-s.groups]
		order = order[:0]
		for e := range scores {
			if best[e/each] >= least {
				order = append(order, int32(e))
			}
		}
		slices.SortFunc(order, func(a, b int32) int {
			if scores[a] > scores[b] {
				return -1
			}
			return 1
		})
		all = append(all, order[:topK]...)
	}
	return all
}
