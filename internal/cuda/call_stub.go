//go:build !cgo || !linux

package cuda

import "unsafe"

type table = *struct{}

func openTable() (table, error) {
	return nil, ErrNotBuilt
}

func closeTable(table) {}

func invoke(table, uintptr, op, *args, unsafe.Pointer) Code { return codeNoDriver }

func submit(table, uintptr, []uintptr, []byte) (Code, int64) { return codeNoDriver, 0 }

func errorName(table, Code) string { return "" }
