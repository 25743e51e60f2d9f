"""Tensors in the symmetric heaps of the host and of GPUs, which peers write in place."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

from . import _comm, errors
from ._arguments import integer, type_of
from ._comm import Communicator


def _communicator(group: Any) -> Communicator:
    from ._array_calls import communicator

    return communicator(group)


def empty(*size: Any, dtype: Any = None, group: Any = None, device: Any = None) -> Any:
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Iterable) else tuple(size)
    shape = tuple(integer("size", n, 0) for n in shape)
    torch: Any = sys.modules.get("torch")
    if torch is not None and (dtype is None or isinstance(dtype, torch.dtype)):
        from . import _cuda, _torch

        dtype = dtype or torch.get_default_dtype()
        place = torch.get_default_device() if device is None else torch.device(device)
        if place.type == "cuda":
            return _cuda.empty(_torch.gpu(group, place), shape, dtype)
        if place.type != "cpu":
            raise errors.Unsupported(f"switchyard: empty: there is no symmetric heap on {place}")
        comm = _communicator(group)
        return _torch.tensor_of(comm._alloc(math.prod(shape) * dtype.itemsize), shape, dtype)
    if device is not None:
        raise errors.InvalidArgument(f"switchyard: empty: an array on {device}")
    import numpy as np

    try:
        kind = np.dtype(dtype or np.float32)
    except TypeError:
        raise errors.InvalidType(f"switchyard: empty: dtype is {dtype!r}, want a data type of numpy's") from None
    if kind.hasobject:
        raise errors.InvalidType(f"switchyard: empty: dtype is {kind}: Python objects cannot lie in symmetric memory")
    comm = _communicator(group)
    block = comm._alloc(math.prod(shape) * kind.itemsize)
    if block.size == 0:
        return np.empty(shape, kind)
    return np.frombuffer(block.memory(), kind).reshape(shape)


def free(tensor: Any) -> None:
    if hasattr(tensor, "data_ptr"):
        address = tensor.data_ptr()
    elif hasattr(tensor, "__array_interface__"):
        address = tensor.__array_interface__["data"][0]
    else:
        raise errors.InvalidType(f"switchyard: free: tensor is {type_of(tensor)}, want one of switchyard.empty")
    if math.prod(tensor.shape) == 0:
        return
    stream = 0
    if getattr(tensor, "is_cuda", False):
        from . import _cuda

        stream = _cuda.stream_of(tensor)
    for block in _comm.blocks():
        if block.address == address:
            block.free(stream)
            return
    raise errors.Freed("switchyard: free: not a tensor of switchyard.empty, or given back before")
