package proctest

import (
	"os"
	"testing"
	"time"
)

// Folder is a folder for programs whose processes may write to it for a moment after the one that the test has started has ended, as those of
// a browser do. It is removed at the end of the test, once nobody does.
func Folder(t testing.TB) string {
	t.Helper()
	path, err := os.MkdirTemp("", "switchyard-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
			if err := os.RemoveAll(path); err == nil || time.Now().After(end) {
				return
			}
		}
	})
	return path
}
