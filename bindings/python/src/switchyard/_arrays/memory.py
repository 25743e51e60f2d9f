"""Arrays of other libraries than torch: numpy's, DLPack's, and whatever has the buffer protocol."""

from __future__ import annotations

import ctypes
import math
import sys
from ctypes import (
    POINTER,
    PYFUNCTYPE,
    c_char_p,
    c_int,
    c_int64,
    c_ssize_t,
    c_uint8,
    c_uint16,
    c_uint64,
    c_void_p,
    py_object,
    pythonapi,
)
from typing import Any, NamedTuple

from .. import errors
from .._core.arguments import type_of


class Array(NamedTuple):
    """Memory of an array, as operations need it."""

    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str  # numpy's name; empty for what has none
    keep: object  # what keeps the memory alive
    item: int  # bytes of an element


def array_of(x: Any, name: str, write: bool = False) -> Array:
    """The description of x. It must be contiguous host memory, writable if it is to be written."""
    found = _interface(x, name, write) or _dlpack(x, name, write) or _buffer(x, name, write)
    if found is None:
        raise errors.InvalidType(
            f"switchyard: {name} is {type_of(x)}; want a torch tensor, a numpy array, or something with DLPack or the "
            "buffer protocol"
        )
    return found


def _refuse(name: str, why: str) -> errors.InvalidArgument:
    return errors.InvalidArgument(f"switchyard: {name} {why}")


# numpy's array interface

_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}


def _interface(x: Any, name: str, write: bool) -> Array | None:
    about = getattr(x, "__array_interface__", None)
    if about is None:
        return None
    address, readonly = about["data"]
    if write and readonly:
        raise _refuse(name, "is read-only")
    shape, typestr = tuple(about["shape"]), about["typestr"]
    if typestr[1] == "O" or getattr(getattr(x, "dtype", None), "hasobject", False):  # or has fields of them
        raise errors.InvalidType(f"switchyard: {name} holds Python objects, which cannot be sent")
    itemsize = int(typestr[2:].partition("[")[0]) * (4 if typestr[1] == "U" else 1)  # "<M8[s]" are times, "<U3" characters
    strides = about.get("strides")
    if strides is not None and not _packed(shape, strides, itemsize):
        raise _refuse(name, "is not contiguous: Tensors must be contiguous")
    if typestr[0] not in "<|=" and sys.byteorder == "little":
        raise _refuse(name, f"has the foreign byte order {typestr!r}")
    dtype = _KINDS.get(typestr[1], "")
    if dtype and dtype != "bool":
        dtype += str(8 * itemsize)
    if not dtype:  # types that numpy does not know itself, such as ml_dtypes' bfloat16
        dtype = str(getattr(x, "dtype", ""))
    return Array(address, math.prod(shape) * itemsize, shape, dtype, x, itemsize)


def _packed(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether elements lie one after the other, the last index running fastest."""
    step = itemsize
    for n, s in zip(reversed(shape), reversed(strides)):
        if n != 1 and s != step and 0 not in shape:
            return False
        step *= n
    return True


# DLPack. Functions of the interpreter are called through objects of our own: the attributes of ctypes.pythonapi belong to the
# whole process, and other libraries set their types.


class _DLDevice(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", _DLDevice),
        ("ndim", c_int),
        ("dtype", _DLDataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class _DLManaged(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", c_void_p), ("deleter", c_void_p)]


class _DLVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _DLTensor),
    ]


_DL_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_HOST_DEVICES = (1, 3, 11)  # CPU, and host memory that CUDA or ROCm has pinned
_READ_ONLY = 1

_capsule_pointer = PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", pythonapi))
_capsule_name = PYFUNCTYPE(c_char_p, py_object)(("PyCapsule_GetName", pythonapi))


def _dlpack(x: Any, name: str, write: bool) -> Array | None:
    if not hasattr(x, "__dlpack__"):
        return None
    if hasattr(x, "__dlpack_device__") and int(x.__dlpack_device__()[0]) not in _HOST_DEVICES:
        raise errors.Unsupported(f"switchyard: {name} is on another device than the host")
    try:
        capsule = x.__dlpack__(max_version=(1, 0))
    except TypeError:  # of before DLPack 1.0
        capsule = x.__dlpack__()
    kind = _capsule_name(capsule)
    pointer = _capsule_pointer(capsule, kind)
    if kind == b"dltensor_versioned":
        versioned = _DLVersioned.from_address(pointer)
        if write and versioned.flags & _READ_ONLY:
            raise _refuse(name, "is read-only")
        t = versioned.tensor
    else:
        t = _DLManaged.from_address(pointer).tensor
    if t.device.type not in _HOST_DEVICES:
        raise errors.Unsupported(f"switchyard: {name} is on another device than the host")
    shape = tuple(t.shape[i] for i in range(t.ndim))
    bits = t.dtype.bits * t.dtype.lanes
    if bits % 8:
        raise errors.Unsupported(f"switchyard: {name} has elements of {bits} bits")
    if t.strides and not _packed(shape, tuple(t.strides[i] for i in range(t.ndim)), 1):
        raise _refuse(name, "is not contiguous: Tensors must be contiguous")
    dtype = _DL_CODES.get(t.dtype.code, "")
    if dtype and dtype != "bool":
        dtype += str(t.dtype.bits)
    # The capsule is not consumed: it releases the memory when it goes.
    return Array((t.data or 0) + t.byte_offset, math.prod(shape) * bits // 8, shape, dtype, (x, capsule), bits // 8)


# The buffer protocol


class _PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", c_void_p),
        ("obj", py_object),
        ("len", c_ssize_t),
        ("itemsize", c_ssize_t),
        ("readonly", c_int),
        ("ndim", c_int),
        ("format", c_char_p),
        ("shape", POINTER(c_ssize_t)),
        ("strides", POINTER(c_ssize_t)),
        ("suboffsets", POINTER(c_ssize_t)),
        ("internal", c_void_p),
    ]


_FORMATS = {"?": "bool", "e": "float16", "f": "float32", "d": "float64"}
_get_buffer = PYFUNCTYPE(c_int, py_object, POINTER(_PyBuffer), c_int)(("PyObject_GetBuffer", pythonapi))
_release_buffer = PYFUNCTYPE(None, POINTER(_PyBuffer))(("PyBuffer_Release", pythonapi))


class _Held:
    """A buffer that is given back with its last reference."""

    def __init__(self, view: memoryview) -> None:
        self.raw = _PyBuffer()
        _get_buffer(view, ctypes.byref(self.raw), 0)

    def __del__(self) -> None:
        _release_buffer(ctypes.byref(self.raw))


def _buffer(x: Any, name: str, write: bool) -> Array | None:
    try:
        view = memoryview(x)
    except TypeError:
        return None
    if write and view.readonly:
        raise _refuse(name, "is read-only")
    if not view.c_contiguous:
        raise _refuse(name, "is not contiguous: Tensors must be contiguous")
    form = view.format.lstrip("@=<") if sys.byteorder == "little" else view.format.lstrip("@=>")
    dtype = _FORMATS.get(form, "")
    if form in tuple("bhilqn"):
        dtype = f"int{8 * view.itemsize}"
    elif form in tuple("BHILQN"):
        dtype = f"uint{8 * view.itemsize}"
    held = _Held(view)
    shape = tuple(view.shape or (view.nbytes // view.itemsize,))
    return Array(held.raw.buf or 0, view.nbytes, shape, dtype, held, view.itemsize)


__all__ = ["Array", "array_of"]
