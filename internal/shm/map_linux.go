package shm

import (
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Create makes an anonymous shared memory object of size bytes and returns its file descriptor, which the caller owns
// and which is closed on exec. Pages are zero and take memory when first touched. The name shows in /proc only.
func Create(name string, size int64) (int, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("shm: memfd_create: %w", err)
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("shm: set size %d: %w", size, err)
	}
	return fd, nil
}

// Identity names the object behind a file descriptor: two descriptors with the same identity are the same memory.
type Identity struct {
	Dev, Ino uint64
	Size     int64
}

// Identify returns the identity and size of the object behind fd.
func Identify(fd int) (Identity, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return Identity{}, fmt.Errorf("shm: fstat: %w", err)
	}
	return Identity{Dev: st.Dev, Ino: st.Ino, Size: st.Size}, nil
}

// Range is a reserved stretch of address space. Parts of it are backed by MapFD; touching the rest faults.
type Range struct {
	mem  []byte
	once sync.Once
	err  error
}

// Reserve takes size bytes of address space (no memory). size must be a multiple of the page size.
func Reserve(size int64) (*Range, error) {
	addr, _, errno := unix.Syscall6(unix.SYS_MMAP, 0, uintptr(size), unix.PROT_NONE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE, ^uintptr(0), 0)
	if errno != 0 {
		return nil, fmt.Errorf("shm: reserve %d bytes of address space: %w", size, errno)
	}
	return &Range{mem: unsafe.Slice((*byte)(pointer(addr)), size)}, nil
}

// MapFD maps bytes [fdOff, fdOff+n) of the object behind fd, readable and writable and shared, at offset off of the
// range. Offsets and n must be multiples of the page size. The mapping holds the object, so fd may be closed after.
func (r *Range) MapFD(off int64, fd int, fdOff, n int64) error {
	if err := r.check(off, n); err != nil {
		return err
	}
	_, _, errno := unix.Syscall6(unix.SYS_MMAP, r.Addr()+uintptr(off), uintptr(n), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED|unix.MAP_FIXED, uintptr(fd), uintptr(fdOff))
	if errno != 0 {
		return fmt.Errorf("shm: map %d bytes: %w", n, errno)
	}
	return nil
}

// UnmapRange takes the backing of [off, off+n) away and keeps the addresses reserved.
func (r *Range) UnmapRange(off, n int64) error {
	if err := r.check(off, n); err != nil {
		return err
	}
	_, _, errno := unix.Syscall6(unix.SYS_MMAP, r.Addr()+uintptr(off), uintptr(n), unix.PROT_NONE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE|unix.MAP_FIXED, ^uintptr(0), 0)
	if errno != 0 {
		return fmt.Errorf("shm: unmap %d bytes: %w", n, errno)
	}
	return nil
}

func (r *Range) check(off, n int64) error {
	if off < 0 || n <= 0 || off > int64(len(r.mem))-n {
		return fmt.Errorf("shm: [%d, %d+%d) lies outside the reserved %d bytes", off, off, n, len(r.mem))
	}
	return nil
}

// Bytes is the whole range. The slice is dead after Close.
func (r *Range) Bytes() []byte { return r.mem }

// Addr is the address of the range's first byte.
func (r *Range) Addr() uintptr { return Addr(r.mem) }

// Close unmaps the whole range. It is idempotent.
func (r *Range) Close() error {
	r.once.Do(func() {
		if _, _, errno := unix.Syscall(unix.SYS_MUNMAP, r.Addr(), uintptr(len(r.mem)), 0); errno != 0 {
			r.err = fmt.Errorf("shm: munmap: %w", errno)
		}
		r.mem = nil
	})
	return r.err
}

// MapFile maps n bytes at off of the object behind fd, readable, writable and shared, anywhere. Unmap releases it.
func MapFile(fd int, off, n int64) ([]byte, error) {
	b, err := unix.Mmap(fd, off, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("shm: map %d bytes: %w", n, err)
	}
	return b, nil
}

// Unmap releases what MapFile returned.
func Unmap(b []byte) error { return unix.Munmap(b) }
