// Package fingerprint tells builds of one release apart, by what the ranks of a group must have alike: the sources of the packages that write
// what other ranks read, and compiled kernels. Each such package embeds its files.
package fingerprint

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"

	"github.com/switchyard-moe/switchyard"
)

// Of is the release and the first 12 digits of a hash of files, with their names: "0.2.0 (build 9b1c0d44e7a2)".
func Of(parts ...fs.FS) string {
	sum := sha256.New()
	for _, part := range parts {
		err := fs.WalkDir(part, ".", func(name string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			text, err := fs.ReadFile(part, name)
			fmt.Fprintf(sum, "%s %d\n", name, len(text))
			sum.Write(text)
			return err
		})
		if err != nil {
			panic(err) // embedded files can be read
		}
	}
	return fmt.Sprintf("%s (build %s)", switchyard.Version, hex.EncodeToString(sum.Sum(nil))[:12])
}
