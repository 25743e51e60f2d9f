// Package nvml reports what the GPUs of this machine are, how they are linked and how they are, for Go programs. It asks
// NVIDIA's management library, which comes with the driver and needs no CUDA.
//
// No package of the library imports it: a program that wants a report does, and test/soak. The Python library must not, because a shared
// object that contains the management library's bindings cannot be loaded.
package nvml

import (
	"errors"
	"fmt"
	"strings"
)

// ErrUnavailable is returned where there is no management library, no driver that it can talk to, or no cgo.
var ErrUnavailable = errors.New("nvml: no NVIDIA management library on this machine")

// Unknown stands for a number that the driver does not tell.
const Unknown = -1

// System is all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says.
type System struct {
	Driver string // its version, "580.159.04"
	NVML   string
	CUDA   string // the version the driver implements, "13.0"
	GPUs   []GPU
}

// GPU is one of them. Numbers are Unknown where the driver does not tell.
type GPU struct {
	Index int    // of the management library, in the order of PCI addresses
	Name  string // the product's
	UUID  string // as device.CUDADevice.UUID has it
	PCI   string // "0000:19:00.0"

	MemoryTotal, MemoryUsed int64 // bytes

	Temperature       int     // of the GPU, in degrees Celsius
	TemperatureLimit  int     // at which it slows down
	MemoryTemperature int     // in degrees Celsius
	Power, PowerLimit float64 // in watts
	Clock             int     // of the multiprocessors, in MHz
	Busy              int     // percent of the time lately that a kernel ran
	// Slowed is why the clock is lower than it could be, other than that the GPU is idle.
	Slowed []string

	ECC ECC
	// Fabric is the state of the NVSwitch fabric that the GPU belongs to: "completed" when it may be used, "" without a
	// fabric.
	Fabric string
	// Links are its NVLinks, Peers the other GPUs in order of their index.
	Links []Link
	Peers []Peer
}

// ECC is the state of the memory's error correction. Corrected and Uncorrected count since the driver was loaded.
type ECC struct {
	Enabled                bool
	Corrected, Uncorrected int64
	// Rows of memory that were replaced by spare ones, after errors that were corrected and that were not. Pending says that
	// more will be when the GPU is reset, Failed that there was no spare row left.
	RemappedCorrected, RemappedUncorrected int
	RemapPending, RemapFailed              bool
}

// Link is one NVLink.
type Link struct {
	Number int
	Active bool
	Kind   string // what is at the other end: "gpu", "switch", "cpu" or ""
	Remote string // its PCI address
	Speed  float64
	// Speed is in GB/s a direction, 1 GB = 1e9 bytes; Unknown where the driver does not tell.
}

// Peer is how a GPU reaches another.
type Peer struct {
	Index int
	// Access is nil when kernels of the GPU can read and write the peer's memory, and says otherwise why not.
	Access error
	// NVLinks is how many links lead there, directly or through a switch; 0 means PCIe, on the Path that the driver names:
	// "pci switch", "host bridge", "numa node" or "system".
	NVLinks int
	Switch  bool
	Path    string
}

// Problems are what a person should know of before using the GPU.
func (g *GPU) Problems() []string {
	var p []string
	if g.ECC.Uncorrected > 0 {
		p = append(p, fmt.Sprintf("%d uncorrected memory errors", g.ECC.Uncorrected))
	}
	if g.ECC.RemapFailed {
		p = append(p, "memory rows have failed and no spare ones are left")
	}
	if g.ECC.RemapPending {
		p = append(p, "memory rows wait for a reset to be replaced")
	}
	p = append(p, g.Slowed...)
	down := 0
	for _, l := range g.Links {
		if !l.Active {
			down++
		}
	}
	if down > 0 && down < len(g.Links) {
		p = append(p, fmt.Sprintf("%d of %d NVLinks are down", down, len(g.Links)))
	}
	if g.Fabric != "" && g.Fabric != "completed" {
		p = append(p, "the NVSwitch fabric is "+g.Fabric)
	}
	for _, q := range g.Peers {
		if q.Access != nil {
			p = append(p, fmt.Sprintf("no access to GPU %d: %v", q.Index, q.Access))
		}
	}
	return p
}

// ActiveLinks is the number of NVLinks that are up, and their speed together in GB/s a direction, Unknown where the driver
// does not tell.
func (g *GPU) ActiveLinks() (n int, speed float64) {
	for _, l := range g.Links {
		if !l.Active {
			continue
		}
		n++
		if l.Speed == Unknown || speed == Unknown {
			speed = Unknown
		} else {
			speed += l.Speed
		}
	}
	return n, speed
}

// String is the report for a person: a paragraph for every GPU, then who reaches whom.
func (s *System) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "driver %s, CUDA %s, NVML %s, %d GPUs\n", s.Driver, s.CUDA, s.NVML, len(s.GPUs))
	for i := range s.GPUs {
		g := &s.GPUs[i]
		fmt.Fprintf(&b, "GPU %d: %s  %s  %s\n", g.Index, g.Name, g.PCI, g.UUID)
		fmt.Fprintf(&b, "  memory %s of %s MiB used, ECC %s\n", count(g.MemoryUsed>>20), count(g.MemoryTotal>>20), g.ECC)
		fmt.Fprintf(&b, "  %s C (slows down at %s C), memory %s C, %s of %s W, %s MHz, %s%% busy\n",
			count(g.Temperature), count(g.TemperatureLimit), count(g.MemoryTemperature), watts(g.Power), watts(g.PowerLimit),
			count(g.Clock), count(g.Busy))
		if len(g.Links) > 0 {
			n, speed := g.ActiveLinks()
			fmt.Fprintf(&b, "  NVLink: %d of %d up", n, len(g.Links))
			if speed > 0 {
				fmt.Fprintf(&b, ", %.0f GB/s a direction", speed)
			}
			if g.Fabric != "" {
				fmt.Fprintf(&b, ", fabric %s", g.Fabric)
			}
			b.WriteByte('\n')
		}
		for _, p := range g.Problems() {
			fmt.Fprintf(&b, "  problem: %s\n", p)
		}
	}
	if len(s.GPUs) > 1 {
		s.matrix(&b)
	}
	return b.String()
}

// matrix has a row for every GPU and says in each column how it reaches that one.
func (s *System) matrix(b *strings.Builder) {
	const width = 13
	fmt.Fprintf(b, "%-6s", "")
	for i := range s.GPUs {
		fmt.Fprintf(b, "%-*d", width, s.GPUs[i].Index)
	}
	trim(b)
	for i := range s.GPUs {
		g := &s.GPUs[i]
		fmt.Fprintf(b, "%-6d", g.Index)
		for j := range s.GPUs {
			cell := "-"
			for k := range g.Peers {
				if g.Peers[k].Index == s.GPUs[j].Index {
					cell = g.Peers[k].short()
				}
			}
			fmt.Fprintf(b, "%-*s", width, cell)
		}
		trim(b)
	}
}

// trim ends a line without the blanks that fill its last column.
func trim(b *strings.Builder) {
	s := strings.TrimRight(b.String(), " ")
	b.Reset()
	b.WriteString(s)
	b.WriteByte('\n')
}

func (p *Peer) short() string {
	switch {
	case p.Access != nil:
		return "no access"
	case p.NVLinks > 0 && p.Switch:
		return fmt.Sprintf("%d to switch", p.NVLinks)
	case p.NVLinks > 0:
		return fmt.Sprintf("%d NVLinks", p.NVLinks)
	case p.Path == "":
		return "yes"
	}
	return p.Path
}

// String is like "on, 0 corrected, 0 uncorrected".
func (e ECC) String() string {
	if !e.Enabled {
		return "off"
	}
	s := fmt.Sprintf("on, %s corrected, %s uncorrected", count(e.Corrected), count(e.Uncorrected))
	if n := e.RemappedCorrected + e.RemappedUncorrected; n > 0 {
		s += fmt.Sprintf(", %d rows replaced", n)
	}
	return s
}

func count[T int | int64](n T) string {
	if n == Unknown {
		return "?"
	}
	return fmt.Sprint(n)
}

func watts(w float64) string {
	if w == Unknown {
		return "?"
	}
	return fmt.Sprintf("%.0f", w)
}
