package kernels

// Elements is what is known of the elements of memory. Ranks of the host tell it each other with what moves, as a byte, and refuse what
// differs.
type Elements uint8

// Elements of no DType.
const (
	AnyElements   Elements = iota // nothing is known, as of bytes
	SignedBytes                   // int8, like AnyElements but for their order
	ShortElements                 // integers of 16 bits, which may hold numbers of a type that Go lacks
	typedElements                 // two for each DType
)

// ElementsOf is numbers of type d, or, with sign, integers that d orders otherwise, such as uint32 for Int32.
func ElementsOf(d DType, sign bool) Elements {
	e := typedElements + 2*Elements(d)
	if sign {
		e++
	}
	return e
}

// DType is their type, Uint8 where it is not known.
func (e Elements) DType() DType {
	if e < typedElements {
		return Uint8
	}
	return DType((e - typedElements) / 2)
}

// Size is that of one in bytes, 0 where it is not known.
func (e Elements) Size() int64 {
	switch {
	case e == ShortElements:
		return 2
	case e < typedElements:
		return 0
	}
	return e.DType().Size()
}

// Signed reports whether they are integers that DType orders otherwise.
func (e Elements) Signed() bool {
	return e == SignedBytes || e >= typedElements && (e-typedElements)%2 == 1
}

// Alike reports whether both may be the same. Integers of either sign are alike, those of 16 bits are like any type of that size, and
// unknown ones are like any.
func (e Elements) Alike(o Elements) bool {
	switch a, b := e.Size(), o.Size(); {
	case a == 0 || b == 0:
		return true
	case e == ShortElements || o == ShortElements:
		return a == b
	}
	return e.DType() == o.DType()
}

// Unlike says how elements that are sent as e and expected as o differ, nothing where they are alike.
func (e Elements) Unlike(o Elements) string {
	if e.Alike(o) {
		return ""
	}
	return " (sent as " + e.String() + ", expected as " + o.String() + ")"
}

// String is the name of one, such as "int64".
func (e Elements) String() string {
	switch {
	case e == AnyElements:
		return "bytes"
	case e == SignedBytes:
		return "int8"
	case e == ShortElements:
		return "int16"
	case e.Signed():
		return "u" + e.DType().String()
	}
	return e.DType().String()
}
