package kernels

import "fmt"

// DType is the type of the elements that a reduction reads. Exchanges move bytes and need none.
type DType uint8

// The data types. Float8E4M3 is the variant without infinities.
const (
	Uint8 DType = iota
	Int32
	Int64
	Float16
	BFloat16
	Float32
	Float64
	Float8E4M3
	Float8E5M2
	dtypes
)

var dtypeNames = [dtypes]string{"uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "float8_e4m3", "float8_e5m2"}
var dtypeSizes = [dtypes]int64{1, 4, 8, 2, 2, 4, 8, 1, 1}

// Valid reports whether d is one of the constants.
func (d DType) Valid() bool { return d < dtypes }

// Size is the size of one element in bytes.
func (d DType) Size() int64 {
	if !d.Valid() {
		return 0
	}
	return dtypeSizes[d]
}

// String is the name as torch and numpy write it.
func (d DType) String() string {
	if !d.Valid() {
		return fmt.Sprintf("DType(%d)", uint8(d))
	}
	return dtypeNames[d]
}

// ReduceOp is how a reduction combines elements of the same index.
type ReduceOp uint8

// The operators. Avg is the sum divided by the number of ranks.
const (
	Sum ReduceOp = iota
	Avg
	Min
	Max
	Prod
	reduceOps
)

var opNames = [reduceOps]string{"sum", "avg", "min", "max", "prod"}

// Valid reports whether o is one of the constants.
func (o ReduceOp) Valid() bool { return o < reduceOps }

// String is the operator's lower-case name.
func (o ReduceOp) String() string {
	if !o.Valid() {
		return fmt.Sprintf("ReduceOp(%d)", uint8(o))
	}
	return opNames[o]
}
