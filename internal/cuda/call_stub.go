//go:build !cgo || !linux

package cuda

import (
	"fmt"
	"unsafe"
)

type table = *struct{}

func openTable() (table, error) {
	return nil, fmt.Errorf("%w: built without cgo or not for linux", ErrUnavailable)
}

func closeTable(table) {}

func invoke(table, uintptr, op, *args, unsafe.Pointer) Code { return codeNoDriver }

func submit(table, uintptr, []uintptr, []byte) (Code, int64) { return codeNoDriver, 0 }

func errorName(table, Code) string { return "" }
