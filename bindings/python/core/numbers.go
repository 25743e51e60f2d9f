package core

import (
	"fmt"
	"math"
	"time"
)

// Numbered is what a caller gave by a number: a data type, an operator or the like.
func Numbered[T ~uint8](what string, n int64) (T, error) {
	if n != int64(T(n)) {
		return 0, fmt.Errorf("core: %w: %s is %d", ErrInvalid, what, n)
	}
	return T(n), nil
}

// Microseconds are a duration, the longest there is where it has no room for them.
func Microseconds(n int64) time.Duration {
	const most = math.MaxInt64 / int64(time.Microsecond)
	return time.Duration(min(max(n, -most), most)) * time.Microsecond
}

// check refuses what is neither a whole call nor a half.
func (h Half) check() error {
	if h != Whole && h != First {
		return fmt.Errorf("core: %w: half is %d, want %d or %d", ErrInvalid, h, Whole, First)
	}
	return nil
}

// Check refuses rows of no bytes, which an exchange would take for those of one, and what is neither yes nor no, before anybody reads as many
// numbers behind the head as it says.
func (h *ShapeHead) Check() error {
	if h.Row < 1 {
		return fmt.Errorf("core: %w: rows of %d bytes, want at least 1", ErrInvalid, h.Row)
	}
	if uint64(h.Placed) > 1 || uint64(h.NoSMs) > 1 {
		return fmt.Errorf("core: %w: Placed is %d and NoSMs %d, want 0 or 1", ErrInvalid, h.Placed, h.NoSMs)
	}
	return nil
}
