//go:build !amd64

package flight

func counter() int64 { return 0 }

func counts() bool { return false }
