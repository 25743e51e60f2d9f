package observe

// GPU is one of this host, as device/nvml reports it. Snapshots have none: a program that wants them on a page puts them into its states.
type GPU struct {
	Index int    `json:"index"` // of the management library
	Name  string `json:"name"`
	// Numbers are -1 where the driver does not tell them.
	BusyPercent        int     `json:"busy_percent"`
	MemoryUsedBytes    int64   `json:"memory_used_bytes"`
	MemoryTotalBytes   int64   `json:"memory_total_bytes"`
	TemperatureCelsius int     `json:"temperature_celsius"`
	PowerWatts         float64 `json:"power_watts"`
	// Links are NVLinks that are up, whose speed a direction together is LinkGigabytesPerSecond; LinksDown are others.
	Links                  int     `json:"links"`
	LinksDown              int     `json:"links_down"`
	LinkGigabytesPerSecond float64 `json:"link_gigabytes_per_second"`
	// Problems are what a person should know of before using it.
	Problems []string  `json:"problems,omitempty"`
	Peers    []GPUPeer `json:"peers,omitempty"`
}

// GPUPeer is the way from a GPU to another one.
type GPUPeer struct {
	Index int `json:"index"`
	// Links is the number of NVLinks that lead there, 0 where PCIe does, on Path: "pci switch", "host bridge", "numa node" or "system".
	Links int    `json:"links"`
	Path  string `json:"path,omitempty"`
	// Refused says why kernels cannot reach its memory, empty where they can.
	Refused string `json:"refused,omitempty"`
}
