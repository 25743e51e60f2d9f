"""Checks of torch tensors before their memory is handed to the library."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from ctypes import PYFUNCTYPE, c_char_p, c_void_p, py_object, pythonapi
from typing import Any

import torch
from torch import Tensor

from .. import errors
from .._core import native

#: Tensors whose memory is what it seems. Subclasses of others may have none.
PLAIN = (Tensor, torch.nn.Parameter)


def is_tensor(x: Any, name: str) -> None:
    if not isinstance(x, Tensor):
        raise errors.InvalidType(
            f"switchyard: Invalid function argument. Expected parameter `{name}` of type torch.Tensor\n"
            f"             but got {type(x)} instead."
        )


def same_dtype(output: Tensor, input: Tensor) -> None:
    if output.dtype is not input.dtype:
        raise errors.InvalidType(
            f"switchyard: output is {output.dtype}, input {input.dtype}: Invalid usage of tensors with different dtypes"
        )


def contiguous(x: Tensor, name: str) -> None:
    if not x.is_contiguous():
        raise errors.InvalidArgument(
            f"switchyard: {name} of shape {tuple(x.shape)} has strides {x.stride()}: Tensors must be contiguous"
        )


def real(x: Tensor) -> Tensor:
    """The numbers of which a tensor consists: two for each complex one."""
    return torch.view_as_real(x) if x.is_complex() else x


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor. One element is contiguous whatever its strides are, but has no bytes for torch."""
    x = real(x).detach()
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def written(*tensors: Tensor) -> None:
    """Tell autograd of tensors that the library writes where they lie: gradients that need what was there are refused."""
    for x in tensors:
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)


def readable(x: Tensor) -> Tensor:
    """A tensor with the numbers of x one after the other in memory: x where it is so, else a copy."""
    x = real(x)
    return x.resolve_neg().contiguous() if x.is_neg() or not x.is_contiguous() else x


def writable(x: Tensor, name: str) -> tuple[Tensor, Callable[[], None] | None]:
    """A tensor to write what x is to hold, and what brings it into x where they are not the same."""
    x = real(x)
    if x.is_contiguous() and not x.is_neg():
        return x, None
    fresh = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return fresh, into(x, fresh, name)


def into(x: Tensor, fresh: Tensor, name: str) -> Callable[[], None]:
    """The function that copies fresh into x. It refuses an x whose elements share memory."""
    if torch._debug_has_internal_overlap(x) == 1:
        raise errors.InvalidArgument(
            f"switchyard: {name} of shape {tuple(x.shape)} has strides {x.stride()}: elements share memory, so it cannot be "
            "written"
        )

    def back() -> None:
        x.detach().copy_(fresh)

    return back


def apart(outputs: list[Tensor], target: Tensor) -> Callable[[], None]:
    """The function that brings bytes into tensors, one after the other."""
    backs, at = [], 0
    for i, x in enumerate(outputs):
        fresh, back = writable(x, f"output_tensor_list[{i}]")
        n = x.numel() * x.element_size()
        backs.append((as_bytes(fresh), target[at : at + n], back))
        at += n

    def bring() -> None:
        for into_bytes, part, back in backs:
            into_bytes.copy_(part)
            if back is not None:
                back()

    return bring


#: Layouts that peers take apart by dimensions of images, and yet are without gaps.
_IMAGES = (torch.channels_last, torch.channels_last_3d)


def splittable(x: Tensor, name: str) -> Tensor:
    """``readable`` for tensors that are split by rows, of which torch wants that they are contiguous in some format, once a
    pending negation is carried out."""
    x = x.resolve_neg()
    if not x.is_contiguous() and not any(x.dim() == 4 + i and x.is_contiguous(memory_format=f) for i, f in enumerate(_IMAGES)):
        contiguous(x, name)
    return readable(x)


# Tensors on memory that is not torch's.

# A function of our own: the attributes of ctypes.pythonapi belong to the whole process, and other libraries set their types.
_new_capsule = PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", pythonapi))

#: DLPack's numbers for the types of what lies in the library's memory.
_DLPACK = {
    torch.uint8: (1, 8),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.bfloat16: (4, 16),
}


def description(address: int, device: torch.device, dtype: torch.dtype, *shape: int) -> array[int]:
    """A tensor of one or two dimensions in memory, as the library wants it described."""
    kind, number = (1, 0) if device.type == "cpu" else (2, device.index)
    return array("q", (address, kind, number, *_DLPACK[dtype], len(shape), *shape, *(0,) * (2 - len(shape))))


def tensor_on(about: int, hold: int | None = None) -> Tensor:
    """The tensor that is described at an address. It does not own its memory; where there is a hold, it is a user of that."""
    capsule = native.library().describe(about, hold)
    if not capsule:
        raise MemoryError
    return torch.from_dlpack(_new_capsule(capsule, b"dltensor", None))
