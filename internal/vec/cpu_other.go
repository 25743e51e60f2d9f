//go:build !amd64 || purego

package vec

const cpu = plain
