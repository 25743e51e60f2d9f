"""Plans of tensors that lie one behind the other, made before there is memory for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import torch
from torch import Tensor

from ..utils.sizes import ALIGNMENT, align


class BufferAllocator:
    """Tensors that get their memory together, later. Each begins at a multiple of alignment."""

    def __init__(self) -> None:
        self.alignment, self.num_bytes, self.materialized = ALIGNMENT, 0, False
        #: The tensors, and the bytes in front of each.
        self.allocations: list[tuple[Tensor, int]] = []

    def allocate(self, shape: Union[int, Sequence[int]], dtype: torch.dtype) -> Tensor:
        """A tensor without memory, which gets some when the plan does."""
        if self.materialized:
            raise AssertionError("deep_ep: BufferAllocator.allocate: the tensors of this plan have their memory already")
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self.allocations.append((tensor, self.num_bytes))
        self.num_bytes += align(tensor.nbytes, self.alignment)
        return tensor

    def materialize(self, storage: Tensor) -> None:
        """Have the tensors lie in storage, [num_bytes] of uint8 on any device."""
        if self.materialized:
            raise AssertionError("deep_ep: BufferAllocator.materialize: the tensors of this plan have their memory already")
        if storage.dtype is not torch.uint8 or storage.shape != (self.num_bytes,) or not storage.is_contiguous():
            have = f"{tuple(storage.shape)} of {storage.dtype}"
            raise AssertionError(f"deep_ep: BufferAllocator.materialize: storage is {have}, want {self.num_bytes} bytes")
        for tensor, first in self.allocations:
            part = storage[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            torch.utils.swap_tensors(tensor, part)
        self.materialized = True
