//go:build !amd64 || purego

package vec

func at(_ level, f func()) { f() }
