//go:build !amd64 || purego

package nn

func tileShape() (rows, cols int)                          { return 0, 0 }
func tile(_ int, _, _, _ *float32, _, _, _, _ int, _ bool) {}
func adamVector(_, _, _, _ []float32, _ *Adam) int         { return 0 }
