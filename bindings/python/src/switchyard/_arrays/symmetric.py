"""Arrays in the symmetric heap of the host."""

from __future__ import annotations

import math
from typing import Any

from .. import errors
from .._core.comm import Communicator


def empty(shape: tuple[int, ...], dtype: Any, comm: Communicator) -> Any:
    import numpy as np

    try:
        kind = np.dtype(dtype or np.float32)
    except TypeError:
        raise errors.InvalidType(f"switchyard: empty: dtype is {dtype!r}, want a data type of numpy's") from None
    if kind.hasobject:
        raise errors.InvalidType(f"switchyard: empty: dtype is {kind}: Python objects cannot lie in symmetric memory")
    block = comm._alloc(math.prod(shape) * kind.itemsize)
    if block.size == 0:
        return np.empty(shape, kind)
    return np.frombuffer(block.memory(), kind).reshape(shape)
