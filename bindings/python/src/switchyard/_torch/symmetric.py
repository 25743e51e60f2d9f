"""Tensors in the symmetric heaps of the host and of GPUs, and pools of that memory for torch's allocator."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import errors
from .._core import native
from .._core.places import Block, Gpu
from .calls import gpu
from .cuda import raw_stream
from .groups import communicator
from .tensors import description, tensor_on


def empty(shape: tuple[int, ...], dtype: torch.dtype, group: Any, device: Any) -> Tensor:
    """A tensor in the symmetric heap of a device, None for torch's default device."""
    place = torch.get_default_device() if device is None else torch.device(device)
    size = math.prod(shape) * dtype.itemsize
    if place.type == "cuda":
        return _on_gpu(gpu(group, place), size, shape, dtype)
    if place.type != "cpu":
        raise errors.Unsupported(f"switchyard: empty: there is no symmetric heap on {place}")
    comm = communicator(group)
    if comm is None:
        raise errors.Unsupported("switchyard: the ranks of this group have no symmetric memory: torch does its calls")
    return _tensor_of(comm._alloc(size), shape, dtype)


def _on_gpu(place: Gpu, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor on a GPU, for work on the current stream."""
    device, block = torch.device("cuda", place.device), place._alloc(size, raw_stream(place.device))
    if size == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    about = description(block.address, device, torch.uint8, size)
    return tensor_on(about.buffer_info()[0]).view(dtype).view(shape)


def _tensor_of(block: Block, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor on symmetric memory of the host, which it holds."""
    if block.size == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")  # whatever device is torch's default
    return torch.frombuffer(block.memory(), dtype=dtype).view(shape)


def stream_of(tensor: Tensor) -> int:
    """The CUstream that is current for a tensor, 0 on the host."""
    return int(raw_stream(tensor.get_device())) if tensor.is_cuda else 0


# Allocators are used by their pools as long as there are tensors of those.
_allocators: list[Any] = []


def mem_pool(place: Gpu, size: int) -> Any:
    """A ``torch.cuda.MemPool`` of size bytes of the symmetric heap."""
    number = place.pool(size, raw_stream(place.device))
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        native.path(), f"switchyard_pool_alloc_{number}", f"switchyard_pool_free_{number}"
    )
    _allocators.append(allocator)
    return torch.cuda.MemPool(allocator.allocator())
