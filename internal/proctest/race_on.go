//go:build race

package proctest

// Race says that the race detector is on: it slows tests down, and a sync.Pool loses things at random under it.
const Race = true
