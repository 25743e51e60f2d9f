//go:build cgo && linux && !nonvml

package nvml

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Report asks the management library about every GPU. It takes some milliseconds a GPU, and does not disturb what runs
// there. The error is ErrUnavailable where there is no library or no driver; what a GPU does not tell is Unknown and no error.
func Report() (*System, error) {
	lib, err := open()
	if err != nil {
		return nil, err
	}
	s, err := (&reader{lib: lib}).system()
	if r := lib.Shutdown(); r != nvml.SUCCESS {
		err = errors.Join(err, r)
	}
	if err != nil {
		return nil, fmt.Errorf("nvml: report: %w", err)
	}
	return s, nil
}

// open opens the library. The caller shuts it down.
func open() (nvml.Interface, error) {
	lib := nvml.New()
	switch r := lib.Init(); r {
	case nvml.SUCCESS:
		return lib, nil
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return nil, fmt.Errorf("%w: libnvidia-ml.so.1 cannot be opened", ErrUnavailable)
	case nvml.ERROR_DRIVER_NOT_LOADED, nvml.ERROR_NO_PERMISSION, nvml.ERROR_LIB_RM_VERSION_MISMATCH, nvml.ERROR_GPU_NOT_FOUND:
		return nil, fmt.Errorf("%w: %v", ErrUnavailable, r)
	default:
		return nil, fmt.Errorf("nvml: open: %w", r)
	}
}

type reader struct{ lib nvml.Interface }

// has reports whether the library has a function. Calling one that it does not have would end the process.
func (r *reader) has(name string) bool { return r.lib.Extensions().LookupSymbol(name) == nil }

func (r *reader) system() (*System, error) {
	s := new(System)
	s.Driver, _ = r.lib.SystemGetDriverVersion()
	s.NVML, _ = r.lib.SystemGetNVMLVersion()
	if v, ret := r.lib.SystemGetCudaDriverVersion_v2(); ret == nvml.SUCCESS {
		s.CUDA = fmt.Sprintf("%d.%d", v/1000, v%1000/10)
	}
	n, ret := r.lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return nil, ret
	}
	devices := make([]nvml.Device, n)
	for i := range devices {
		if devices[i], ret = r.lib.DeviceGetHandleByIndex(i); ret != nvml.SUCCESS {
			return nil, fmt.Errorf("GPU %d: %w", i, ret)
		}
		s.GPUs = append(s.GPUs, r.gpu(i, devices[i]))
	}
	for i := range devices {
		for j := range devices {
			if i != j {
				s.GPUs[i].Peers = append(s.GPUs[i].Peers, r.peer(&s.GPUs[i], &s.GPUs[j], devices[i], devices[j]))
			}
		}
	}
	return s, nil
}

func number[T uint32 | int](v T, ret nvml.Return) int {
	if ret != nvml.SUCCESS {
		return Unknown
	}
	return int(v)
}

func milliwatts(v uint32, ret nvml.Return) float64 {
	if ret != nvml.SUCCESS {
		return Unknown
	}
	return float64(v) / 1000
}

func (r *reader) gpu(i int, d nvml.Device) GPU {
	g := GPU{Index: i, MemoryTotal: Unknown, MemoryUsed: Unknown, MemoryTemperature: Unknown, Busy: Unknown}
	g.Name, _ = d.GetName()
	g.UUID, _ = d.GetUUID()
	if p, ret := d.GetPciInfo(); ret == nvml.SUCCESS {
		g.PCI = address(p)
	}
	if r.has("nvmlDeviceGetMemoryInfo_v2") {
		if m, ret := d.GetMemoryInfo_v2(); ret == nvml.SUCCESS {
			g.MemoryTotal, g.MemoryUsed = int64(m.Total), int64(m.Used)
		}
	} else if m, ret := d.GetMemoryInfo(); ret == nvml.SUCCESS {
		g.MemoryTotal, g.MemoryUsed = int64(m.Total), int64(m.Used)
	}
	g.Temperature = number(d.GetTemperature(nvml.TEMPERATURE_GPU))
	g.TemperatureLimit = number(d.GetTemperatureThreshold(nvml.TEMPERATURE_THRESHOLD_SLOWDOWN))
	if t, ok := field(d, nvml.FI_DEV_MEMORY_TEMP, 0); ok && t > 0 {
		g.MemoryTemperature = int(t)
	}
	g.Power, g.PowerLimit = milliwatts(d.GetPowerUsage()), milliwatts(d.GetEnforcedPowerLimit())
	g.Clock = number(d.GetClockInfo(nvml.CLOCK_SM))
	if u, ret := d.GetUtilizationRates(); ret == nvml.SUCCESS {
		g.Busy = int(u.Gpu)
	}
	g.Slowed = r.slowed(d)
	g.ECC = r.ecc(d)
	if r.has("nvmlDeviceGetGpuFabricInfo") {
		if f, ret := d.GetGpuFabricInfo(); ret == nvml.SUCCESS {
			g.Fabric = fabric(f)
		}
	}
	g.Links = r.links(d)
	return g
}

func (r *reader) slowed(d nvml.Device) []string {
	if !r.has("nvmlDeviceGetCurrentClocksEventReasons") {
		return nil
	}
	bits, ret := d.GetCurrentClocksEventReasons()
	if ret != nvml.SUCCESS {
		return nil
	}
	var why []string
	for _, q := range []struct {
		bit  uint64
		text string
	}{
		{nvml.ClocksEventReasonApplicationsClocksSetting, "the clock is limited by a setting"},
		{nvml.ClocksEventReasonSwPowerCap, "the clock is lowered to stay within the power limit"},
		{nvml.ClocksThrottleReasonHwSlowdown, "the hardware has halved the clock"},
		{nvml.ClocksEventReasonSwThermalSlowdown, "the clock is lowered because of the temperature"},
		{nvml.ClocksThrottleReasonHwThermalSlowdown, "the hardware has halved the clock because of the temperature"},
		{nvml.ClocksThrottleReasonHwPowerBrakeSlowdown, "the power supply has asked for less"},
	} {
		if bits&q.bit != 0 {
			why = append(why, q.text)
		}
	}
	return why
}

func (r *reader) ecc(d nvml.Device) ECC {
	e := ECC{Corrected: Unknown, Uncorrected: Unknown}
	if on, _, ret := d.GetEccMode(); ret == nvml.SUCCESS {
		e.Enabled = on == nvml.FEATURE_ENABLED
	}
	if n, ret := d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.VOLATILE_ECC); ret == nvml.SUCCESS {
		e.Corrected = int64(n)
	}
	if n, ret := d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC); ret == nvml.SUCCESS {
		e.Uncorrected = int64(n)
	}
	if r.has("nvmlDeviceGetRemappedRows") {
		if c, u, pending, failed, ret := d.GetRemappedRows(); ret == nvml.SUCCESS {
			e.RemappedCorrected, e.RemappedUncorrected, e.RemapPending, e.RemapFailed = c, u, pending, failed
		}
	}
	return e
}

func fabric(f nvml.GpuFabricInfo) string {
	switch f.State {
	case nvml.GPU_FABRIC_STATE_NOT_STARTED:
		return "not started"
	case nvml.GPU_FABRIC_STATE_IN_PROGRESS:
		return "in progress"
	case nvml.GPU_FABRIC_STATE_COMPLETED:
		if st := nvml.Return(f.Status); st != nvml.SUCCESS {
			return "failed: " + st.Error()
		}
		return "completed"
	}
	return ""
}

func (r *reader) links(d nvml.Device) []Link {
	var all []Link
	for k := range nvml.NVLINK_MAX_LINKS {
		state, ret := d.GetNvLinkState(k)
		if ret != nvml.SUCCESS {
			continue // the GPU has no such link
		}
		l := Link{Number: k, Active: state == nvml.FEATURE_ENABLED, Speed: Unknown}
		if r.has("nvmlDeviceGetNvLinkRemoteDeviceType") {
			if kind, ret := d.GetNvLinkRemoteDeviceType(k); ret == nvml.SUCCESS {
				l.Kind = linkKind(kind)
			}
		}
		if p, ret := d.GetNvLinkRemotePciInfo(k); ret == nvml.SUCCESS {
			l.Remote = address(p)
		}
		if mb, ok := field(d, nvml.FI_DEV_NVLINK_GET_SPEED, uint32(k)); ok {
			l.Speed = float64(mb) / 1000
		}
		all = append(all, l)
	}
	return all
}

func linkKind(k nvml.IntNvLinkDeviceType) string {
	switch k {
	case nvml.NVLINK_DEVICE_TYPE_GPU:
		return "gpu"
	case nvml.NVLINK_DEVICE_TYPE_IBMNPU:
		return "cpu"
	case nvml.NVLINK_DEVICE_TYPE_SWITCH:
		return "switch"
	}
	return ""
}

// field is the value of one field of the device, of a part of it in some cases.
func field(d nvml.Device, id, scope uint32) (int64, bool) {
	v := []nvml.FieldValue{{FieldId: id, ScopeId: scope}}
	if d.GetFieldValues(v) != nvml.SUCCESS || nvml.Return(v[0].NvmlReturn) != nvml.SUCCESS {
		return 0, false
	}
	b := v[0].Value[:]
	switch nvml.ValueType(v[0].ValueType) {
	case nvml.VALUE_TYPE_UNSIGNED_INT:
		return int64(binary.LittleEndian.Uint32(b)), true
	case nvml.VALUE_TYPE_SIGNED_INT:
		return int64(int32(binary.LittleEndian.Uint32(b))), true
	case nvml.VALUE_TYPE_UNSIGNED_LONG, nvml.VALUE_TYPE_UNSIGNED_LONG_LONG, nvml.VALUE_TYPE_SIGNED_LONG_LONG:
		return int64(binary.LittleEndian.Uint64(b)), true
	}
	return 0, false
}

func (r *reader) peer(g, h *GPU, a, b nvml.Device) Peer {
	p := Peer{Index: h.Index}
	for _, what := range []nvml.GpuP2PCapsIndex{nvml.P2P_CAPS_INDEX_READ, nvml.P2P_CAPS_INDEX_WRITE} {
		if st, ret := a.GetP2PStatus(b, what); ret == nvml.SUCCESS && st != nvml.P2P_STATUS_OK && p.Access == nil {
			p.Access = errors.New(peerStatus(st))
		}
	}
	direct, here, there := 0, 0, 0
	for _, l := range g.Links {
		if l.Active && l.Kind == "switch" {
			here++
		}
		if l.Active && l.Remote != "" && l.Remote == h.PCI {
			direct++
		}
	}
	for _, l := range h.Links {
		if l.Active && l.Kind == "switch" {
			there++
		}
	}
	switch {
	case direct > 0:
		p.NVLinks = direct
	case here > 0 && there > 0:
		p.NVLinks, p.Switch = min(here, there), true
	}
	if level, ret := a.GetTopologyCommonAncestor(b); ret == nvml.SUCCESS {
		p.Path = path(level)
	}
	return p
}

func peerStatus(s nvml.GpuP2PStatus) string {
	switch s {
	case nvml.P2P_STATUS_CHIPSET_NOT_SUPPORTED:
		return "the chipset does not support it"
	case nvml.P2P_STATUS_GPU_NOT_SUPPORTED:
		return "a GPU does not support it"
	case nvml.P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED:
		return "the topology does not support it"
	case nvml.P2P_STATUS_DISABLED_BY_REGKEY:
		return "a setting of the driver disables it"
	case nvml.P2P_STATUS_NOT_SUPPORTED:
		return "it is not supported"
	}
	return fmt.Sprintf("status %d", s)
}

func path(l nvml.GpuTopologyLevel) string {
	switch l {
	case nvml.TOPOLOGY_INTERNAL:
		return "same board"
	case nvml.TOPOLOGY_SINGLE, nvml.TOPOLOGY_MULTIPLE:
		return "pci switch"
	case nvml.TOPOLOGY_HOSTBRIDGE:
		return "host bridge"
	case nvml.TOPOLOGY_NODE:
		return "numa node"
	case nvml.TOPOLOGY_SYSTEM:
		return "system"
	}
	return ""
}

// address is a PCI address in the form of lspci and of CUDA.
func address(p nvml.PciInfo) string {
	id := make([]byte, 0, len(p.BusId))
	for _, c := range p.BusId {
		if c == 0 {
			break
		}
		id = append(id, c)
	}
	s := strings.ToLower(string(id))
	if domain, rest, ok := strings.Cut(s, ":"); ok && len(domain) > 4 {
		s = domain[len(domain)-4:] + ":" + rest // "00000000:19:00.0"
	}
	return s
}
