package vec

// level is a set of instructions; a greater one includes the smaller.
type level int

const (
	plain level = iota
	avx2
	avx512
)

// columns is the width of a matrix tile.
func (lv level) columns() int {
	if lv >= avx512 {
		return 32
	}
	return 16
}
