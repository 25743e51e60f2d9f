package vec

// level is a set of instructions; a greater one includes the smaller.
type level int

const (
	plain level = iota
	avx2
	avx512
)
