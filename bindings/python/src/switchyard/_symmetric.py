"""Tensors in the symmetric heap, which peers write in place."""

from __future__ import annotations

import math
import sys
from typing import Any

from . import _comm, errors
from ._comm import Communicator


def _communicator(group: Any) -> Communicator:
    from ._array_calls import communicator

    return communicator(group)


def empty(*size: Any, dtype: Any = None, group: Any = None) -> Any:
    shape = tuple(size[0]) if len(size) == 1 and not hasattr(size[0], "__index__") else tuple(size)
    shape = tuple(int(n) for n in shape)
    if any(n < 0 for n in shape):
        raise errors.InvalidArgument(f"switchyard: empty: shape {shape} has a negative dimension")
    torch: Any = sys.modules.get("torch")
    comm = _communicator(group)
    if torch is not None and (dtype is None or isinstance(dtype, torch.dtype)):
        from . import _torch

        dtype = dtype or torch.get_default_dtype()
        return _torch.tensor_of(comm.alloc(math.prod(shape) * dtype.itemsize), shape, dtype)
    import numpy as np

    kind = np.dtype(dtype or np.float32)
    block = comm.alloc(math.prod(shape) * kind.itemsize)
    if block.size == 0:
        return np.empty(shape, kind)
    return np.frombuffer(block.memory(), kind).reshape(shape)


def free(tensor: Any) -> None:
    address = tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.__array_interface__["data"][0]
    if math.prod(tensor.shape) == 0:
        return
    for block in _comm.blocks():
        if block.address == address:
            block.free()
            return
    raise errors.Freed("switchyard: free: not a tensor of switchyard.empty, or given back before")
