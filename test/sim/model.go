package main

// A published figure is a time in microseconds, or GB/s over the rows of every host that a token goes to, its own included.
type unit int

const (
	microseconds unit = iota
	logicalGBps
)

// published is one figure of a system.
type published struct {
	what     string
	shape    shape
	rowBytes float64
	figure   float64
	unit     unit
	fit      bool // the system's numbers are fitted on it
}

// way is what bounds a system's time next to a constant: the port to other hosts and NVLink, or what forwards inside a host.
type way int

const (
	byPort    way = iota // fitted: the constant and the port; NVLink is given
	byForward            // fitted: the constant and forwarding; the port is given
	byInside             // fitted: NVLink and the port; the constant is given
	byChoice             // fitted: the constant and the port, over a row for each choice
)

// system is one that has published figures. given is the number of the way that is not fitted.
type system struct {
	name  string
	way   way
	given float64
	rows  []published
}

// portGBps is what a port of 400 Gbit/s carries of rows, at most.
const portGBps = 45

func dispatch(ep, tokens, groups int, figure float64, u unit, fit bool) published {
	return published{"dispatch", shape{ep, tokens, groups}, float8, figure, u, fit}
}

func combine(ep, tokens, groups int, figure float64, u unit, fit bool) published {
	return published{"combine", shape{ep, tokens, groups}, bf16, figure, u, fit}
}

// systems are those of which figures on several hosts have been published.
func systems() []system {
	bf16Rows := func(p published) published {
		p.what, p.rowBytes = p.what+" bf16", bf16
		return p
	}
	return []system{
		{"DeepEP V2, H100, 400 Gbit/s", byPort, 390, []published{
			dispatch(16, 8192, 0, 90, logicalGBps, true), dispatch(32, 8192, 0, 61, logicalGBps, true),
			combine(16, 8192, 0, 81, logicalGBps, false), combine(32, 8192, 0, 61, logicalGBps, false)}},
		{"DeepEP V2, B200, EFA 400 Gbit/s", byPort, 700, []published{
			dispatch(16, 4096, 0, 864.7, microseconds, true), dispatch(32, 4096, 0, 2041, microseconds, true),
			bf16Rows(dispatch(16, 4096, 0, 1501, microseconds, false)), bf16Rows(dispatch(32, 4096, 0, 3753, microseconds, false)),
			combine(16, 4096, 0, 1615, microseconds, false), combine(32, 4096, 0, 3745, microseconds, false)}},
		{"DeepEP V1, H800, 400 Gbit/s", byInside, 41, []published{
			dispatch(16, 4096, 4, 43, logicalGBps, true), dispatch(32, 4096, 4, 58, logicalGBps, true), dispatch(64, 4096, 4, 51, logicalGBps, false),
			combine(16, 4096, 4, 43, logicalGBps, false), combine(32, 4096, 4, 57, logicalGBps, false), combine(64, 4096, 4, 50, logicalGBps, false)}},
		{"UCCL-EP, H200, EFA 2 x 200 Gbit/s", byForward, portGBps, []published{
			dispatch(16, 4096, 4, 1196, microseconds, true), dispatch(24, 4096, 4, 1633, microseconds, false), dispatch(32, 4096, 4, 2022, microseconds, true)}},
		{"UCCL-EP, B200, EFA 400 Gbit/s", byForward, portGBps, []published{
			dispatch(16, 4096, 4, 1141, microseconds, true), dispatch(24, 4096, 4, 1637, microseconds, false), dispatch(32, 4096, 4, 2072, microseconds, true),
			combine(16, 4096, 4, 1965, microseconds, false), combine(24, 4096, 4, 2887, microseconds, false), combine(32, 4096, 4, 3724, microseconds, false)}},
		{"DeepEP V1 low latency, H800", byChoice, 0, []published{
			dispatch(16, 128, 0, 118, microseconds, true), dispatch(32, 128, 0, 155, microseconds, false), dispatch(64, 128, 0, 173, microseconds, true),
			dispatch(128, 128, 0, 192, microseconds, false), dispatch(256, 128, 0, 194, microseconds, false)}},
	}
}

// model is a system's numbers: a constant in microseconds and rates in GB/s, 0 where one is no bound.
type model struct {
	constant, port, inside, forward, choices float64
}

// us is the time of a call with rows of a number of bytes, and some in front of them.
func (m model) us(c counts, rowBytes, head float64) float64 {
	longest := 0.0
	for _, part := range [...]struct{ bytes, rate float64 }{
		{c.remote*c.busiest*rowBytes + head, m.port}, {c.inside * rowBytes, m.inside}, {c.logical * rowBytes, m.forward}, {c.choices * rowBytes, m.choices},
	} {
		if part.rate > 0 {
			longest = max(longest, part.bytes/part.rate/1e3)
		}
	}
	return m.constant + longest
}

// us is the figure as a time.
func (p *published) us(c counts) float64 {
	if p.unit == microseconds {
		return p.figure
	}
	return c.logical * p.rowBytes / p.figure / 1e3
}

// fitted fits a system's two numbers on the two figures that are for that.
func (s *system) fitted(counted map[shape]counts) model {
	var fit []published
	for _, p := range s.rows {
		if p.fit {
			fit = append(fit, p)
		}
	}
	a, b := fit[0], fit[1]
	ca, cb := counted[a.shape], counted[b.shape]
	switch s.way {
	case byInside: // of two hosts, NVLink is the bound, of four the port
		return model{constant: s.given, inside: ca.inside * a.rowBytes / (a.us(ca) - s.given) / 1e3,
			port: cb.remote * cb.busiest * b.rowBytes / (b.us(cb) - s.given) / 1e3}
	case byForward:
		constant, rate := line(ca.logical*a.rowBytes, a.us(ca), cb.logical*b.rowBytes, b.us(cb))
		return model{constant: constant, forward: rate, port: s.given}
	case byChoice:
		constant, rate := line(ca.choices*a.rowBytes, a.us(ca), cb.choices*b.rowBytes, b.us(cb))
		return model{constant: constant, choices: rate}
	default:
		constant, rate := line(ca.remote*ca.busiest*a.rowBytes, a.us(ca), cb.remote*cb.busiest*b.rowBytes, b.us(cb))
		return model{constant: constant, port: rate, inside: s.given}
	}
}

// line is a constant, not below 0, and a rate in GB/s through two times of bytes.
func line(bytesA, usA, bytesB, usB float64) (constant, rate float64) {
	rate = (bytesB - bytesA) / (usB - usA) / 1e3
	if constant = usA - bytesA/rate/1e3; constant < 0 {
		return 0, (bytesA/usA + bytesB/usB) / 2 / 1e3
	}
	return constant, rate
}

// ours is Switchyard on hosts of 8 H200 with a port of 400 Gbit/s each. The rates are those of DeepEP V2's fit and of NVLink as measured; the
// constants those of the systems above.
var ours = struct{ many, few model }{
	many: model{constant: 35, port: 46, inside: 390},
	few:  model{constant: 44, port: 46, inside: 390}, // with 4 for the hop inside a host
}
