package comm

import (
	"embed"
	"sync"

	"github.com/switchyard-moe/switchyard/internal/fingerprint"
)

// sources are this package's: names that do not end in "test". A test sees that none is missing.
//
//go:embed *[^t].go *[^s]t.go *[^e]st.go *[^t]est.go
var sources embed.FS

// build is the release and a hash of this package, which ranks compare when they meet.
var build = sync.OnceValue(func() string { return fingerprint.Of(sources) })
