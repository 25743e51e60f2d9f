//go:build !amd64 || purego

package vec

const cpu = plain

func (product) asm(level, []float32, []float32, []float32) bool { return false }
