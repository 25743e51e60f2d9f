package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/device/nvml"
)

// examineGPUs makes the checks of GPUs.
func examineGPUs() []finding {
	count, err := device.CUDACount()
	report, asked := nvml.Report()
	return judgeGPUs(count, err, report, asked)
}

// judgeGPUs says what is to be known of GPUs: count of them are for this process, or err says why none, and report has all of the machine,
// or asked says why not.
func judgeGPUs(count int, err error, report *nvml.System, asked error) (all []finding) {
	switch {
	case err != nil && asked == nil:
		return []finding{{"driver", problem, fmt.Sprintf("driver %s implements CUDA %s, and its library does not open: %v", report.Driver, report.CUDA, err),
			"install driver 580 or newer, and give the container its libcuda.so.1 (--gpus all)"}}
	case errors.Is(err, device.ErrUnavailable):
		return []finding{{"driver", note, err.Error(), "nothing is to be done where only processors are used; GPUs need NVIDIA's driver 580 or newer, and a build with cgo"}}
	case err != nil:
		return []finding{{"driver", problem, err.Error(), "nvidia-smi says more; GPUs need NVIDIA's driver 580 or newer"}}
	case asked != nil:
		return []finding{{"driver", fine, fmt.Sprintf("%d GPUs for this process; links are unknown: %v", count, asked), ""}}
	}
	all = append(all, finding{"driver", fine, fmt.Sprintf("driver %s implements CUDA %s; %d of %d GPUs are for this process", report.Driver, report.CUDA, count, len(report.GPUs)), ""})
	for i := range report.GPUs {
		all = append(all, judgeGPU(&report.GPUs[i]))
	}
	return append(all, judgePeers(report))
}

func judgeGPU(g *nvml.GPU) finding {
	says := fmt.Sprintf("GPU %d is %s at %s", g.Index, g.Name, g.PCI)
	if g.MemoryTotal > 0 {
		says += fmt.Sprintf(", %d of %d MiB in use", g.MemoryUsed>>20, g.MemoryTotal>>20)
	}
	if n, speed := g.ActiveLinks(); n > 0 && speed > 0 {
		says += fmt.Sprintf(", %d NVLinks of %.0f GB/s a direction together", n, speed)
	}
	if bad := g.Problems(); len(bad) > 0 {
		return finding{"gpu", note, says + "; " + strings.Join(bad, "; "), "nvidia-smi -q says more; a GPU with errors of its memory is to be reset or replaced"}
	}
	return finding{"gpu", fine, says, ""}
}

// judgePeers says whether all GPUs reach each other, and how.
func judgePeers(report *nvml.System) finding {
	var none, slow []string
	pairs := 0
	for _, g := range report.GPUs {
		for _, p := range g.Peers {
			pairs++
			switch {
			case p.Access != nil:
				none = append(none, fmt.Sprintf("%d to %d (%v)", g.Index, p.Index, p.Access))
			case p.NVLinks == 0:
				slow = append(slow, fmt.Sprintf("%d to %d (%s)", g.Index, p.Index, p.Path))
			}
		}
	}
	switch {
	case len(none) > 0:
		return finding{"peers", problem, "kernels cannot reach the memory of GPU " + strings.Join(none, ", "), "take GPUs that reach each other for a group, by CUDA_VISIBLE_DEVICES; in virtual machines allow peer access, and switch ACS off"}
	case len(slow) > 0:
		return finding{"peers", note, "PCIe and not NVLink leads from GPU " + strings.Join(slow, ", "), "take GPUs with NVLink where there are some: all figures of the pages are from NVLink"}
	case pairs == 0:
		return finding{"peers", fine, "there is one GPU", ""}
	}
	return finding{"peers", fine, fmt.Sprintf("all %d pairs of GPUs reach each other over NVLink", pairs), ""}
}
