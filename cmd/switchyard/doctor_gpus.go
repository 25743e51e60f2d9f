package main

import (
	"fmt"
	"strings"

	"github.com/switchyard-moe/switchyard/device"
	"github.com/switchyard-moe/switchyard/device/nvml"
	"github.com/switchyard-moe/switchyard/internal/doctor"
)

// examineGPUs makes the checks of GPUs.
func examineGPUs() []doctor.Finding {
	count, err := device.CUDACount()
	report, asked := nvml.Report()
	return judgeGPUs(count, err, report, asked)
}

// judgeGPUs says what is to be known of GPUs: count of them are for this process, or err says why none, and report has all of the machine,
// or asked says why not.
func judgeGPUs(count int, err error, report *nvml.System, asked error) (all []doctor.Finding) {
	switch {
	case err != nil && asked == nil:
		return []doctor.Finding{doctor.Found("driver", doctor.Problem, fmt.Sprintf("driver %s implements CUDA %s, and cannot be used: %v", report.Driver, report.CUDA, err),
			"install driver 550 or newer, and give the container its libcuda.so.1 (--gpus all)")}
	case err != nil || asked != nil:
		return []doctor.Finding{doctor.Driver(count, err, asked)}
	}
	says := fmt.Sprintf("driver %s implements CUDA %s; %d of %d GPUs are for this process", report.Driver, report.CUDA, count, len(report.GPUs))
	if major, _, _ := strings.Cut(report.CUDA, "."); major == "12" {
		all = append(all, doctor.Found("driver", doctor.Note, says+"; drivers older than 580 load kernels that have not run on such a driver yet",
			"let the tests of CONTRIBUTING for GPUs run here before you rely on it, or install driver 580 or newer"))
	} else {
		all = append(all, doctor.Found("driver", doctor.Fine, says, ""))
	}
	for i := range report.GPUs {
		all = append(all, judgeGPU(&report.GPUs[i]))
	}
	return append(all, judgePeers(report))
}

func judgeGPU(g *nvml.GPU) doctor.Finding {
	says := fmt.Sprintf("GPU %d is %s at %s", g.Index, g.Name, g.PCI)
	if g.MemoryTotal > 0 {
		says += fmt.Sprintf(", %d of %d MiB in use", g.MemoryUsed>>20, g.MemoryTotal>>20)
	}
	if n, speed := g.ActiveLinks(); n > 0 && speed > 0 {
		says += fmt.Sprintf(", %d NVLinks of %.0f GB/s a direction together", n, speed)
	}
	if bad := g.Problems(); len(bad) > 0 {
		return doctor.Found("gpu", doctor.Note, says+"; "+strings.Join(bad, "; "), "nvidia-smi -q says more; a GPU with errors of its memory is to be reset or replaced")
	}
	return doctor.Found("gpu", doctor.Fine, says, "")
}

// judgePeers says whether all GPUs reach each other, and how.
func judgePeers(report *nvml.System) doctor.Finding {
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
		return doctor.Found("peers", doctor.Problem, "kernels cannot reach the memory of GPU "+strings.Join(none, ", "), "take GPUs that reach each other for a group, by CUDA_VISIBLE_DEVICES; in virtual machines allow peer access, and switch ACS off")
	case len(slow) > 0:
		return doctor.Found("peers", doctor.Note, "PCIe and not NVLink leads from GPU "+strings.Join(slow, ", "), "take GPUs with NVLink where there are some: all figures of the pages are from NVLink")
	case pairs == 0:
		return doctor.Found("peers", doctor.Fine, "there is one GPU", "")
	}
	return doctor.Found("peers", doctor.Fine, fmt.Sprintf("all %d pairs of GPUs reach each other over NVLink", pairs), "")
}
