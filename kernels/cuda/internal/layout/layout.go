// Package layout describes the words that the CUDA kernels share with Go: constants, structs and control blocks. From the one
// description come the header that nvcc reads, Go's encoders and a file for the test that the C compiler lays structs out alike.
//
// A new family adds its [Struct] and [Block] to the description and runs `make kernels`.
package layout

import (
	"fmt"
	"path"
	"strings"
)

// Layout is everything that is shared.
type Layout struct {
	Constants []Group
	Structs   []Struct // each after those that it contains
	Blocks    []Block
}

// Group is constants that belong together.
type Group struct {
	Doc       string
	Constants []Constant
}

// Constant is a number. Its name is Go's; C says it in capitals behind SW_.
type Constant struct {
	Name  string
	Value uint64
	Doc   string
}

// Struct is a C struct named sw_<name>. Its Go type has the same name in Go's spelling (with Words behind it where it does not end in args)
// and a method that encodes or decodes it.
type Struct struct {
	Name   string // words joined by underscores, as in C
	Doc    string
	Fields []Field
	Go     string // what Go does with it: "put", "get", or "" for only its size and Words
	// Words are fields whose offsets Go needs as constants.
	Words []string
}

// Field is a member of a struct. Its type is u32, u64, i64, the name of a Block (its offsets) or that of an earlier Struct.
type Field struct {
	Name, Type string
	// Count is the length of an array, a constant's name; "" where the field is none. Go encodes arrays element by element.
	Count string
	Doc   string
}

// Block is the control block of one communicator: parts that follow one another in every rank's segment, at the same offset. In C it
// is struct sw_<name> of the parts' offsets and a function sw_lay_<name>; in Go a struct and a function as well.
type Block struct {
	Name string
	Doc  string
	// Params are 64-bit integers that the sizes depend on. Sizes are expressions in C's and Go's common arithmetic of params, values,
	// and constants by their Go names.
	Params []string
	Values []Part
	Parts  []Part
}

// Part is one part of a block: Size bytes from a multiple of Align on. A value is a number worked out before.
type Part struct {
	Name, Size string
	Align      int
	Doc        string
}

// Files are the generated texts by their paths from the module's root.
func (l *Layout) Files() (map[string]string, error) {
	if err := l.check(); err != nil {
		return nil, fmt.Errorf("layout: %w", err)
	}
	goText, err := l.goFile()
	if err != nil {
		return nil, fmt.Errorf("layout: %w", err)
	}
	cgoText, err := l.cgoFile()
	if err != nil {
		return nil, fmt.Errorf("layout: %w", err)
	}
	return map[string]string{
		path.Join("internal/cuda/layout", "args.h"):      l.header(),
		path.Join("internal/cuda/layout", "layout.go"):   cgoText,
		path.Join("kernels/cuda", "layout_generated.go"): goText,
	}, nil
}

// Offsets are what the C compiler must agree on: "name" is the size of a struct, "name.field" the offset of a field.
func (l *Layout) Offsets() map[string]int {
	m := make(map[string]int)
	for _, s := range l.Structs {
		at := 0
		for _, f := range s.Fields {
			size, align, _ := l.size(f.Type)
			at = up(at, align)
			m[s.Name+"."+f.Name] = at
			at += size * l.count(f)
		}
		size, _, _ := l.size(s.Name)
		m[s.Name] = size
	}
	for _, b := range l.Blocks {
		m[b.Name] = 8 * len(b.words())
		for i, p := range b.words() {
			m[b.Name+"."+p.Name] = 8 * i
		}
	}
	return m
}

// words are what the struct of a block holds: values, the offsets of the parts, and the offset behind the last.
func (b *Block) words() []Part {
	return append(append(append([]Part(nil), b.Values...), b.Parts...), Part{Name: "end", Doc: "the offset behind the block"})
}

func up(n, to int) int { return (n + to - 1) / to * to }

// size is how many bytes a type has and what it is aligned to.
func (l *Layout) size(t string) (size, align int, err error) {
	switch t {
	case "u32":
		return 4, 4, nil
	case "u64", "i64":
		return 8, 8, nil
	}
	for i := range l.Blocks {
		if l.Blocks[i].Name == t {
			return 8 * len(l.Blocks[i].words()), 8, nil
		}
	}
	for _, s := range l.Structs {
		if s.Name != t {
			continue
		}
		at, most := 0, 1
		for _, f := range s.Fields {
			n, a, err := l.size(f.Type)
			if err != nil {
				return 0, 0, fmt.Errorf("%s.%s: %w", s.Name, f.Name, err)
			}
			at = up(at, a) + n*l.count(f)
			most = max(most, a)
		}
		return up(at, most), most, nil
	}
	return 0, 0, fmt.Errorf("no type %q", t)
}

func (l *Layout) constant(name string) (uint64, bool) {
	for _, g := range l.Constants {
		for _, c := range g.Constants {
			if c.Name == name {
				return c.Value, true
			}
		}
	}
	return 0, false
}

func (l *Layout) count(f Field) int {
	if n, ok := l.constant(f.Count); ok {
		return int(n)
	}
	return 1
}

func (l *Layout) check() error {
	known := map[string]bool{}
	for _, s := range l.Structs {
		for _, f := range s.Fields {
			if _, _, err := l.size(f.Type); err != nil {
				return fmt.Errorf("%s.%s: %w", s.Name, f.Name, err)
			}
			if l.isStruct(f.Type) && !known[f.Type] {
				return fmt.Errorf("%s.%s: %s comes later", s.Name, f.Name, f.Type)
			}
			if _, ok := l.constant(f.Count); f.Count != "" && !ok {
				return fmt.Errorf("%s.%s: no constant %q", s.Name, f.Name, f.Count)
			}
		}
		known[s.Name] = true
	}
	return nil
}

func (l *Layout) isStruct(t string) bool {
	for _, s := range l.Structs {
		if s.Name == t {
			return true
		}
	}
	return false
}

// goName is a C name in Go's spelling: slot_bytes becomes slotBytes.
func goName(s string) string {
	words := strings.Split(s, "_")
	for i := 1; i < len(words); i++ {
		words[i] = title(words[i])
	}
	return strings.Join(words, "")
}

func title(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

// macro is a constant's C name: slotBytes becomes SW_SLOT_BYTES.
func macro(s string) string {
	var b strings.Builder
	b.WriteString("SW")
	for i, r := range s {
		if i == 0 || r >= 'A' && r <= 'Z' {
			b.WriteByte('_')
		}
		b.WriteRune(r)
	}
	return strings.ToUpper(b.String())
}
