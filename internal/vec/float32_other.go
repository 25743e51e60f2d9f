//go:build !amd64 || purego

package vec

import "unsafe"

func scaleAsm([]float32, []float32, float32) int { return 0 }
func addAsm([]float32, []float32, []float32) int { return 0 }
func mulAsm([]float32, []float32, []float32) int { return 0 }

// Nobody calls these: they do whole vectors only, and there are none.

func rowsAsm(Op, unsafe.Pointer, unsafe.Pointer, int, int, int, float32)              {}
func weightedAsm(kind, unsafe.Pointer, unsafe.Pointer, unsafe.Pointer, int, int, int) {}
func loadAsm(kind, unsafe.Pointer, unsafe.Pointer, int)                               {}
func storeAsm(kind, unsafe.Pointer, unsafe.Pointer, int, float32)                     {}
func accumulateAsm(kind, Op, unsafe.Pointer, unsafe.Pointer, int)                     {}
func reduceAsm(kind, Op, unsafe.Pointer, unsafe.Pointer, int)                         {}

func halfRowsAsm(kind, Op, unsafe.Pointer, unsafe.Pointer, int, int, int, float32) {}
