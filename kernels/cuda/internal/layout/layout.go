// Package layout writes for C what the CUDA kernels share with Go. The source is Go: constants, structs with a field of type
// structs.HostLayout, and functions that lay control blocks out, in args.go and the files of package cuda whose names end in _args.go. From
// them come the header that nvcc reads, and a file for the test that the C compiler lays structs out as Go does.
//
// The tag "c" of a field is the type that C has for it, where Go has an address and C a pointer.
//
// What headers names has a header of its own, so that only kernels which include it are compiled anew when it changes. The others are in args.h.
//
// A name in C is that of Go in capitals behind SW_ for a constant, in lower case behind sw_ for a struct, without Words at its end, and
// for a function. Comments go along.
package layout

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/constant"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// source is the folder of package cuda from the module's root.
const source = "kernels/cuda"

// headers are the headers of files that are not in args.h, which each of them includes.
var headers = map[string]string{"expand_args.go": "expand.h", "messages_args.go": "messages.h", "plans_args.go": "plans.h", "rails_args.go": "rails.h"}

const common = "args.h"

// Layout is everything that is shared.
type Layout struct {
	groups    []group
	structs   []record
	functions []function
	info      types.Info
	pkg       *types.Package
}

// group is constants that belong together.
type group struct {
	header    string
	doc       string
	constants []named
}

// record is a struct.
type record struct {
	header string
	name   string
	doc    string
	fields []field
}

// function lays a control block out.
type function struct {
	*ast.FuncDecl
	header string
}

type named struct {
	*types.Const
	doc string
}

type field struct {
	*types.Var
	length string // of an array, as C writes it
	kind   string // that C gives it, of the same size; "" where it has the type's
	doc    string
}

// Read reads the sources of the module at root. It needs the go command, which knows where packages are that they import.
func Read(root string) (*Layout, error) {
	l := &Layout{info: types.Info{Defs: make(map[*ast.Ident]types.Object), Uses: make(map[*ast.Ident]types.Object)}}
	fset := token.NewFileSet()
	names, err := filepath.Glob(filepath.Join(root, source, "*args.go"))
	if err != nil {
		return nil, fmt.Errorf("layout: %w", err)
	}
	slices.SortFunc(names, func(a, b string) int { return cmp.Compare(len(a), len(b)) }) // args.go comes first
	var files []*ast.File
	imports := []string{"list", "-export", "-deps", "-f", "{{if .Export}}{{.ImportPath}} {{.Export}}{{end}}"}
	for _, name := range names {
		f, err := parser.ParseFile(fset, name, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return nil, fmt.Errorf("layout: %w", err)
		}
		files = append(files, f)
		for _, i := range f.Imports {
			path, err := strconv.Unquote(i.Path.Value)
			if err != nil {
				return nil, fmt.Errorf("layout: %w", err)
			}
			imports = append(imports, path)
		}
	}
	list := exec.Command("go", imports...)
	list.Dir, list.Stderr = root, os.Stderr
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("layout: go list: %w", err)
	}
	exports := make(map[string]string)
	for line := range strings.Lines(string(out)) {
		path, file, _ := strings.Cut(strings.TrimSpace(line), " ")
		exports[path] = file
	}
	lookup := func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) }
	conf := types.Config{Importer: importer.ForCompiler(fset, "gc", lookup), Sizes: sizes()}
	if l.pkg, err = conf.Check(source, fset, files, &l.info); err != nil {
		return nil, fmt.Errorf("layout: %w", err)
	}
	for i, f := range files {
		header := cmp.Or(headers[filepath.Base(names[i])], common)
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.GenDecl:
				if err := l.declare(header, d); err != nil {
					return nil, err
				}
			case *ast.FuncDecl:
				if strings.HasPrefix(d.Name.Name, "lay") {
					l.functions = append(l.functions, function{d, header})
				}
			}
		}
	}
	return l, nil
}

// sizes are those of the processors that GPUs are found with. A struct of numbers of 32 and 64 bits is the same on all.
func sizes() types.Sizes { return types.SizesFor("gc", "amd64") }

func (l *Layout) declare(header string, d *ast.GenDecl) error {
	g := group{header: header, doc: text(d.Doc)}
	for _, s := range d.Specs {
		switch s := s.(type) {
		case *ast.ValueSpec:
			for _, name := range s.Names {
				if c, ok := l.info.Defs[name].(*types.Const); ok {
					g.constants = append(g.constants, named{c, text(s.Comment)})
				}
			}
		case *ast.TypeSpec:
			if t, ok := s.Type.(*ast.StructType); ok {
				if err := l.declareStruct(header, s.Name.Name, text(d.Doc), t); err != nil {
					return err
				}
			}
		}
	}
	if len(g.constants) > 0 {
		l.groups = append(l.groups, g)
	}
	return nil
}

func (l *Layout) declareStruct(header, name, doc string, t *ast.StructType) error {
	r := record{header: header, name: name, doc: capital(strings.TrimPrefix(strings.TrimPrefix(strings.TrimPrefix(doc, name), " is "), " are "))}
	host := false
	for _, f := range t.Fields.List {
		for _, id := range f.Names {
			v := l.info.Defs[id].(*types.Var)
			if id.Name == "_" {
				host = host || v.Type().String() == "structs.HostLayout"
				continue
			}
			x := field{Var: v, doc: text(f.Comment)}
			if a, ok := f.Type.(*ast.ArrayType); ok {
				x.length = l.expression(a.Len)
			}
			if f.Tag != nil {
				tag, err := strconv.Unquote(f.Tag.Value)
				if err != nil {
					return fmt.Errorf("layout: %s.%s: %w", name, id.Name, err)
				}
				x.kind = reflect.StructTag(tag).Get("c")
			}
			r.fields = append(r.fields, x)
		}
	}
	if host {
		l.structs = append(l.structs, r)
	}
	return nil
}

// Files are the generated texts by their paths from the module's root.
func (l *Layout) Files() (map[string]string, error) {
	cgo, err := l.cgoFile()
	if err != nil {
		return nil, fmt.Errorf("layout: %w", err)
	}
	files := map[string]string{"internal/cuda/layout/layout.go": cgo}
	for _, name := range l.headers() {
		if files["internal/cuda/layout/"+name], err = l.header(name); err != nil {
			return nil, fmt.Errorf("layout: %w", err)
		}
	}
	return files, nil
}

// headers are the names of all headers that have something in them.
func (l *Layout) headers() []string {
	names := []string{common}
	for _, r := range l.structs {
		if !slices.Contains(names, r.header) {
			names = append(names, r.header)
		}
	}
	return names
}

// Offsets are what the C compiler must agree on: "name" is the size of a struct, "name.field" the offset of a field.
func (l *Layout) Offsets() map[string]int {
	m := make(map[string]int)
	for _, r := range l.structs {
		t := l.pkg.Scope().Lookup(r.name).Type()
		s := t.Underlying().(*types.Struct)
		m[structName(r.name)] = int(sizes().Sizeof(t))
		var fields []*types.Var
		for i := range s.NumFields() {
			fields = append(fields, s.Field(i))
		}
		for i, at := range sizes().Offsetsof(fields) {
			if name := fields[i].Name(); name != "_" {
				m[structName(r.name)+"."+snake(name)] = int(at)
			}
		}
	}
	return m
}

// ordered are the structs, each behind those that it contains, and those of args.h first, whatever other headers take from it.
func (l *Layout) ordered() (out []record) {
	done := make(map[string]bool)
	var add func(r record)
	add = func(r record) {
		if done[r.name] {
			return
		}
		done[r.name] = true
		for _, f := range r.fields {
			name := elementName(f.Type())
			if i := slices.IndexFunc(l.structs, func(r record) bool { return r.name == name }); i >= 0 {
				add(l.structs[i])
			}
		}
		out = append(out, r)
	}
	for _, r := range l.structs {
		if r.header == common {
			add(r)
		}
	}
	for _, r := range l.structs {
		add(r)
	}
	return out
}

// elementName is the name of a field's type, or of the elements of an array.
func elementName(t types.Type) string {
	if a, ok := t.(*types.Array); ok {
		t = a.Elem()
	}
	if n, ok := t.(*types.Named); ok {
		return n.Obj().Name()
	}
	return ""
}

func (l *Layout) isConstant(id *ast.Ident) (constant.Value, bool) {
	c, ok := l.info.Uses[id].(*types.Const)
	if !ok {
		return nil, false
	}
	return c.Val(), true
}

func text(c *ast.CommentGroup) string { return strings.TrimSpace(c.Text()) }

func capital(s string) string {
	if s == "" {
		return ""
	}
	return strings.ToUpper(s[:1]) + s[1:]
}

// snake is a Go name in C's spelling: slotBytes becomes slot_bytes.
func snake(s string) string {
	var b strings.Builder
	for i, r := range s {
		if i > 0 && unicode.IsUpper(r) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// structName is a struct's C name without sw_ in front: worldWords becomes world.
func structName(s string) string { return snake(strings.TrimSuffix(s, "Words")) }

// macro is a constant's C name: slotBytes becomes SW_SLOT_BYTES.
func macro(s string) string { return "SW_" + strings.ToUpper(snake(s)) }
