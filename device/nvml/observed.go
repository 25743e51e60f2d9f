package nvml

import (
	"fmt"

	"github.com/switchyard-moe/switchyard/observe"
)

// Observed is the report for a page of package observe: the field GPUs of its states.
func (s *System) Observed() []observe.GPU {
	all := make([]observe.GPU, 0, len(s.GPUs))
	for i := range s.GPUs {
		g := &s.GPUs[i]
		up, speed := g.ActiveLinks()
		o := observe.GPU{
			Index: g.Index, Name: g.Name, BusyPercent: g.Busy, MemoryUsedBytes: g.MemoryUsed, MemoryTotalBytes: g.MemoryTotal,
			TemperatureCelsius: g.Temperature, PowerWatts: g.Power,
			Links: up, LinksDown: len(g.Links) - up, LinkGigabytesPerSecond: speed, Problems: g.Problems(),
		}
		for _, p := range g.Peers {
			peer := observe.GPUPeer{Index: p.Index, Links: p.NVLinks, Path: p.Path}
			if p.Access != nil {
				peer.Refused = fmt.Sprint(p.Access)
			}
			o.Peers = append(o.Peers, peer)
		}
		all = append(all, o)
	}
	return all
}
