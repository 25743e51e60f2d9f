package cuda

import (
	"errors"
	"fmt"
	"unsafe"
)

// Module is a CUmodule, Function a CUfunction.
type (
	Module   uintptr
	Function uintptr
)

// FunctionAttribute is a property of a function (CUfunction_attribute).
type FunctionAttribute int32

// The attributes that Switchyard asks for.
const (
	FunctionRegisters        FunctionAttribute = 4
	FunctionMaxDynamicShared FunctionAttribute = 8
)

// LoadModule loads a fatbin, cubin or PTX image. It can wait for running kernels, so it belongs to the control plane.
func (c *Context) LoadModule(image []byte) (Module, error) {
	if len(image) == 0 {
		return 0, errors.New("cuda: load module: empty image")
	}
	var a args
	if err := c.call(opModuleLoadData, &a, unsafe.Pointer(&image[0])); err != nil {
		return 0, fmt.Errorf("load module on %v: %w", c.dev, err)
	}
	return Module(a[0]), nil
}

// UnloadModule unloads a module. Nothing of it may be running.
func (c *Context) UnloadModule(m Module) error {
	a := args{uint64(m)}
	return c.call(opModuleUnload, &a, nil)
}

// Function looks a kernel up and loads it, so that its first launch loads nothing.
func (c *Context) Function(m Module, name string) (Function, error) {
	s := cString(name)
	a := args{uint64(m)}
	if err := c.call(opModuleGetFunction, &a, unsafe.Pointer(&s[0])); err != nil {
		return 0, fmt.Errorf("kernel %q: %w", name, err)
	}
	return Function(a[0]), nil
}

// FunctionAttribute is the value of a kernel's property.
func (c *Context) FunctionAttribute(f Function, which FunctionAttribute) (int, error) {
	a := args{uint64(f), uint64(which)}
	err := c.call(opFuncGetAttribute, &a, nil)
	return int(int32(a[0])), err
}

// SetFunctionAttribute changes a kernel's property, such as FunctionMaxDynamicShared.
func (c *Context) SetFunctionAttribute(f Function, which FunctionAttribute, value int) error {
	a := args{uint64(f), uint64(which), uint64(int64(value))}
	return c.call(opFuncSetAttribute, &a, nil)
}

// BlocksPerMultiprocessor is how many blocks of a kernel fit on one multiprocessor at once.
func (c *Context) BlocksPerMultiprocessor(f Function, threads, sharedBytes int) (int, error) {
	a := args{uint64(f), uint64(threads), uint64(sharedBytes)}
	err := c.call(opOccupancy, &a, nil)
	return int(int32(a[0])), err
}
