package alltoallv

import "github.com/switchyard-moe/switchyard/kernels"

// bundleUpTo is up to which size a message to another host goes in a bundle with those for the other ranks there, by the ranks of a host: a
// larger one is faster straight to its rank. docs/measured/2026-11-23-hosts-2-cores.md has the times.
var bundleUpTo = [...]struct {
	perHost int // at least
	bytes   int64
}{{4, 32 << 10}, {2, 64 << 10}, {1, 128 << 10}}

// bundleShare is which part of Options.StagingBytes bundles take at most.
const bundleShare = 4

// bundleBytes is Options.BundleBytes, or what the table says, within the staging.
func (o *Options) bundleBytes(c *kernels.ExchangeBounds) int64 {
	perHost := len(c.Hosts.Ranks)
	most := c.StagingBytes / bundleShare / int64(2*(c.Size-perHost)) &^ 63
	for _, row := range bundleUpTo {
		if perHost >= row.perHost {
			return min(kernels.Default(o.BundleBytes, min(row.bytes, most)), maxBundleBytes)
		}
	}
	return 0
}

// maxBundleBytes bounds messages in a bundle whatever the options say.
const maxBundleBytes = 1 << 20
