"""What is asked of torch tensors before their memory is handed to the library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import errors

#: Tensors whose memory is what it seems. Subclasses of others may have none.
PLAIN = (Tensor, torch.nn.Parameter)


def is_tensor(x: Any, name: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type torch.Tensor\n"
            f"             but got {type(x)} instead."
        )


def contiguous(x: Tensor, name: str) -> None:
    if not x.is_contiguous():
        raise errors.InvalidArgument(f"Tensors must be contiguous ({name} of {tuple(x.shape)} has strides {x.stride()})")


def same_dtype(output: Tensor, input: Tensor) -> None:
    if output.dtype is not input.dtype:
        raise errors.InvalidArgument(f"Invalid usage of tensors with different dtypes: found {output.dtype} and {input.dtype}")


def real(x: Tensor) -> Tensor:
    """The numbers as they lie in memory."""
    if x.is_complex():
        return torch.view_as_real(x)
    if x.is_neg():
        raise errors.InvalidArgument(
            "switchyard: a tensor with a pending negation has other numbers in memory: resolve_neg() it"
        )
    return x
