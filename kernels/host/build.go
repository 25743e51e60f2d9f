package host

import (
	"embed"
	"sync"

	"github.com/switchyard-moe/switchyard/internal/fingerprint"
)

// sources are this package's: names that do not end in "test". A test sees that none is missing.
//
//go:embed *[^t].go *[^s]t.go
var sources embed.FS

// Build is the release and a hash of this package, whose control blocks and protocols ranks share.
var Build = sync.OnceValue(func() string { return fingerprint.Of(sources) })
