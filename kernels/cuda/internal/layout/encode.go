package layout

import (
	"fmt"
	"go/format"
	"slices"
	"strings"
)

// goFile is constants, structs and their encoders for package cuda.
func (l *Layout) goFile() (string, error) {
	var b strings.Builder
	b.WriteString("// " + warning + "\n\npackage cuda\n\nimport \"encoding/binary\"\n")
	for _, g := range l.Constants {
		fmt.Fprintf(&b, "\n// %s\nconst (\n", lines(g.Doc))
		for _, c := range g.Constants {
			fmt.Fprintf(&b, "\t%s = %d", c.Name, c.Value)
			if c.Doc != "" {
				b.WriteString(" // " + c.Doc)
			}
			b.WriteByte('\n')
		}
		b.WriteString(")\n")
	}
	for i := range l.Blocks {
		l.goBlock(&b, &l.Blocks[i])
	}
	offsets := l.Offsets()
	for _, s := range l.Structs {
		l.goStruct(&b, &s, offsets)
	}
	text, err := format.Source([]byte(b.String()))
	return string(text), err
}

func lines(doc string) string { return strings.ReplaceAll(doc, "\n * ", "\n// ") }

func (l *Layout) goType(t string) string {
	switch t {
	case "u32":
		return "uint32"
	case "u64":
		return "uint64"
	case "i64":
		return "int64"
	}
	return typeName(t)
}

// typeName is the Go type of a struct or block.
func typeName(name string) string {
	if strings.HasSuffix(name, "_args") || strings.HasSuffix(name, "_block") {
		return goName(name)
	}
	return goName(name) + "Words"
}

func (l *Layout) goStruct(b *strings.Builder, s *Struct, offsets map[string]int) {
	name := goName(s.Name)
	fmt.Fprintf(b, "\nconst (\n\t%sBytes = %d\n", name, offsets[s.Name])
	for _, w := range s.Words {
		fmt.Fprintf(b, "\t%s%s = %d\n", name, title(goName(w)), offsets[s.Name+"."+w])
	}
	b.WriteString(")\n")
	if s.Go == "" {
		return
	}
	kind := typeName(s.Name)
	fmt.Fprintf(b, "\n// %s is struct sw_%s. %s\ntype %s struct {\n", kind, s.Name, lines(s.Doc), kind)
	for _, f := range s.Fields {
		if f.Count != "" || f.Name == "pad" {
			continue
		}
		fmt.Fprintf(b, "\t%s %s", goName(f.Name), l.goType(f.Type))
		if f.Doc != "" {
			b.WriteString(" // " + f.Doc)
		}
		b.WriteByte('\n')
	}
	b.WriteString("}\n")
	if s.Go == "get" {
		l.get(b, s, offsets)
		return
	}
	fmt.Fprintf(b, "\n// put encodes s into b, which has %sBytes bytes.", name)
	for _, f := range s.Fields {
		if f.Count != "" {
			fmt.Fprintf(b, " The elements of %s are encoded one by one.", f.Name)
		}
	}
	fmt.Fprintf(b, "\nfunc (s *%s) put(b []byte) {\n\t_ = b[%d]\n", kind, offsets[s.Name]-1)
	for _, f := range s.Fields {
		if f.Count == "" && f.Name != "pad" {
			b.WriteString("\t" + l.put(f.Type, "s."+goName(f.Name), "b", fmt.Sprint(offsets[s.Name+"."+f.Name])) + "\n")
		}
	}
	b.WriteString("}\n")
	for _, f := range s.Fields {
		if f.Count == "" {
			continue
		}
		size, _, _ := l.size(f.Type)
		fmt.Fprintf(b, "\n// put%s%s encodes element i of %s.\nfunc put%s%s(b []byte, i int, v %s) {\n\tat := %d + %d*i\n\t%s\n}\n", title(name), title(goName(f.Name)), f.Name,
			title(name), title(goName(f.Name)), l.goType(f.Type), offsets[s.Name+"."+f.Name], size, l.put(f.Type, "v", "b", "at"))
	}
}

func (l *Layout) get(b *strings.Builder, s *Struct, offsets map[string]int) {
	fmt.Fprintf(b, "\n// get decodes s from b.\nfunc (s *%s) get(b []byte) {\n\t_ = b[%d]\n", typeName(s.Name), offsets[s.Name]-1)
	for _, f := range s.Fields {
		if f.Name == "pad" {
			continue
		}
		at := offsets[s.Name+"."+f.Name]
		switch f.Type {
		case "u32":
			fmt.Fprintf(b, "\ts.%s = binary.LittleEndian.Uint32(b[%d:])\n", goName(f.Name), at)
		case "i64":
			fmt.Fprintf(b, "\ts.%s = int64(binary.LittleEndian.Uint64(b[%d:]))\n", goName(f.Name), at)
		default:
			fmt.Fprintf(b, "\ts.%s = binary.LittleEndian.Uint64(b[%d:])\n", goName(f.Name), at)
		}
	}
	b.WriteString("}\n")
}

func (l *Layout) put(t, value, to, at string) string {
	switch t {
	case "u32":
		return fmt.Sprintf("binary.LittleEndian.PutUint32(%s[%s:], %s)", to, at, value)
	case "u64":
		return fmt.Sprintf("binary.LittleEndian.PutUint64(%s[%s:], %s)", to, at, value)
	case "i64":
		return fmt.Sprintf("binary.LittleEndian.PutUint64(%s[%s:], uint64(%s))", to, at, value)
	}
	return fmt.Sprintf("%s.put(%s[%s:])", value, to, at)
}

func (l *Layout) goBlock(b *strings.Builder, k *Block) {
	name := goName(k.Name)
	fmt.Fprintf(b, "\nconst %sBytes = %d\n\n// %s is struct sw_%s. %s\ntype %s struct {\n", name, 8*len(k.words()), name, k.Name, lines(k.Doc), name)
	for _, w := range k.words() {
		fmt.Fprintf(b, "\t%s int64", goName(w.Name))
		if w.Doc != "" {
			b.WriteString(" // " + w.Doc)
		}
		b.WriteByte('\n')
	}
	var params, values []string
	for _, p := range k.Params {
		params = append(params, goName(p))
	}
	fmt.Fprintf(b, "}\n\n// put encodes s into b.\nfunc (s *%s) put(b []byte) {\n\t_ = b[%d]\n", name, 8*len(k.words())-1)
	for i, w := range k.words() {
		b.WriteString("\t" + l.put("i64", "s."+goName(w.Name), "b", fmt.Sprint(8*i)) + "\n")
	}
	fmt.Fprintf(b, "}\n\n// lay%s lays the block out from offset on.\nfunc lay%s(offset, %s int64) (b %s) {\n\tat := offset\n", title(name), title(name), strings.Join(params, ", "), name)
	expression := func(s string) string {
		return identifier.ReplaceAllStringFunc(s, func(id string) string {
			if slices.Contains(values, id) {
				return "b." + goName(id)
			}
			return goName(id)
		})
	}
	for _, v := range k.Values {
		fmt.Fprintf(b, "\tb.%s = %s\n", goName(v.Name), expression(v.Size))
		values = append(values, v.Name)
	}
	for _, p := range k.Parts {
		if p.Align > 1 {
			fmt.Fprintf(b, "\tat = (at + %d) / %d * %d\n", p.Align-1, p.Align, p.Align)
		}
		fmt.Fprintf(b, "\tb.%s = at\n\tat += %s\n", goName(p.Name), expression(p.Size))
	}
	b.WriteString("\tb.end = at\n\treturn b\n}\n")
}
