package cuda

import "embed"

// images are the kernels of each family, compiled. One that make kernels has not built yet is not there, and its family cannot be opened.
//
//go:embed *.fatbin
var images embed.FS
