package fatbin

import "fmt"

// Older is machine code for drivers that do not load the fatbins, which ask for CUDA 13.0: nvcc writes PTX, and the assembler of an earlier
// CUDA makes machine code of it.
type Older struct {
	Arch   string // "sm_80"
	Major  int    // the major number of the GPUs' compute capability
	Driver int    // the least CUDA version of the driver, 12040 for 12.4
	PTX    string // the version of the language that the assembler is told
	PTXAS  string // the assembler's version
}

// FatbinDriver is the CUDA version from which on drivers load the fatbins.
const FatbinDriver = 13000

// Olders lists them. Code for 8.0 runs on 8.6 and 8.9, too, and code for 10.0 on 10.3.
func Olders() []Older {
	return []Older{
		{"sm_80", 8, 12040, "8.4", "12.4.131"},
		{"sm_90a", 9, 12040, "8.4", "12.4.131"},
		{"sm_100", 10, 12080, "8.7", "12.8.93"},
	}
}

// File is where a family's machine code is, in the folder of the kernels: an ELF file that gzip has compressed.
func (o Older) File(family string) string { return fmt.Sprintf("older/%s.%s.gz", family, o.Arch) }

// Flags are nvcc's.
func (o Older) Flags() []string {
	return []string{"-std=c++17", "-O3", "-ptx", "-arch=compute_" + o.Arch[len("sm_"):]}
}

// AssemblerFlags are ptxas's.
func (o Older) AssemblerFlags() []string { return []string{"-O3", "-arch=" + o.Arch} }
