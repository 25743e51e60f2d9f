package cuda

import (
	"errors"
	"fmt"
)

var (
	// ErrUnavailable is returned by Open where there is no CUDA driver, no device the driver can talk to, or no cgo.
	ErrUnavailable = errors.New("cuda: no CUDA driver on this machine")
	// ErrNotBuilt is the ErrUnavailable of a build that cannot talk to a driver.
	ErrNotBuilt = fmt.Errorf("%w: built without cgo or not for linux", ErrUnavailable)
	// ErrUnsupported is returned for what this driver or these devices cannot do.
	ErrUnsupported = errors.New("cuda: not supported")
	// ErrClosed is returned for use of a driver or context after Close.
	ErrClosed = errors.New("cuda: closed")
)

// Code is the driver's number for a result (CUresult). It is an error, so that errors.Is(err, cuda.OutOfMemory) works.
type Code int32

// The codes that callers tell apart.
const (
	InvalidValue        Code = 1
	OutOfMemory         Code = 2
	InvalidDevice       Code = 101
	NotFound            Code = 500
	NotReady            Code = 600
	PeerAccessEnabled   Code = 704
	CooperativeTooLarge Code = 720
	NotSupported        Code = 801

	codeNoDriver   Code = -1
	codeNoEntry    Code = -2
	codeBadCommand Code = -3
)

// Error is "cuda: result 2".
func (c Code) Error() string { return fmt.Sprintf("cuda: result %d", int32(c)) }

// Error is a driver call that failed.
type Error struct {
	Op   string // the entry point, "cuMemCreate"
	Code Code
	Name string // the driver's name of the code, "CUDA_ERROR_OUT_OF_MEMORY"
}

// Error is like "cuda: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2)".
func (e *Error) Error() string {
	switch e.Code {
	case codeNoEntry:
		return fmt.Sprintf("cuda: %s: this driver does not have it", e.Op)
	case codeBadCommand:
		return fmt.Sprintf("cuda: %s: malformed command", e.Op)
	case codeNoDriver:
		return fmt.Sprintf("cuda: %s: no driver", e.Op)
	}
	if e.Name == "" {
		return fmt.Sprintf("cuda: %s: error %d", e.Op, int32(e.Code))
	}
	return fmt.Sprintf("cuda: %s: %s (%d)", e.Op, e.Name, int32(e.Code))
}

// Is matches the error's Code and, for what is missing here, ErrUnsupported and ErrUnavailable.
func (e *Error) Is(target error) bool {
	if c, ok := target.(Code); ok {
		return c == e.Code
	}
	switch target {
	case ErrUnsupported:
		return e.Code == codeNoEntry || e.Code == NotSupported
	case ErrUnavailable:
		return e.Code == codeNoDriver
	}
	return false
}
