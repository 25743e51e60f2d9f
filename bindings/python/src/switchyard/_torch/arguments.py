"""The tensors and options of torch's calls of a backend."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from .._core.work import Several
from . import calls
from .work import Work


def listed(sizes: Any) -> list[int]:
    """Split sizes as the other backends take them."""
    return [] if sizes is None else sizes.tolist() if hasattr(sizes, "tolist") else list(sizes)


def number(backend: Any) -> None:
    """Have a backend number its calls, which those of torch 2.15 do unasked."""
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 15):
        backend._set_sequence_number_for_group()


def ours(*tensors: Tensor) -> bool:
    return all(map(calls._ours, tensors))


def flat(tensors: list[list[Tensor]]) -> list[Tensor]:
    return [x for each in tensors for x in each]


def kinds_of(tensors: list[Tensor], op: str) -> list[Any]:
    """Data type and operator of the reductions of tensors as the library takes them, None for what it cannot do."""
    return [None if x.is_complex() else calls.kind_of(x, op) for x in tensors]


def every(parts: list[Any], outputs: list[Tensor]) -> Any:
    """Several pieces of work as one."""
    if len(parts) == 1:
        return parts[0]

    def back() -> None:
        for part in parts:
            part.wait()

    return Work(Several([part._done for part in parts]), outputs, back)
