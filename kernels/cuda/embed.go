package cuda

import (
	"embed"
	"sync"

	"github.com/switchyard-moe/switchyard/internal/fingerprint"
)

// images are the kernels of each family, compiled, as fatbins and as machine code for older drivers. One that make kernels has not built yet is
// not there, and its family cannot be opened.
//
//go:embed *.fatbin older/*.gz
var images embed.FS

// sources are this package's: names that do not end in "test". A test sees that none is missing.
//
//go:embed *[^t].go *[^s]t.go *[^e]st.go
var sources embed.FS

// Build is the release and a hash of the kernels and of this package, which launches them.
var Build = sync.OnceValue(func() string { return fingerprint.Of(images, sources) })
