"""Rows one for each token and rows one for each choice: the way there and back, on this rank alone."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from switchyard._core.dtypes import DTYPES
from switchyard._torch.moe import aligned, place
from torch import Tensor

from .._results import Result
from .._routings import Routing
from ..utils.sizes import align


def starts_of(counts: Tensor, alignment: int) -> tuple[Tensor, Tensor]:
    """The first row of each expert, where each begins at a multiple of alignment, and where its last row ends."""
    room = torch.div(counts + alignment - 1, alignment, rounding_mode="floor") * alignment
    first = (room.cumsum(0) - room).to(torch.int32)
    return first, first + counts


def most_rows(rows: int, top_k: int, local: int, alignment: int) -> int:
    """How many rows choices can take at most."""
    return align(rows * min(top_k, local) + (alignment - 1) * local, alignment)


class Expanded(NamedTuple):
    """Rows one for each choice, experts one after the other, their rows in the order of tokens."""

    rows: Tensor
    scales: Optional[Tensor]
    weights: Optional[Tensor]
    #: [tokens, top_k], the row of each choice, -1 for none.
    slots: Tensor
    #: [experts + 1] of int64: how many of the rows each expert has with its padding, and whether rows were left out.
    rooms: Optional[Tensor]


def expand(result: Result, routing: Routing, alignment: int, length: int, rooms: bool = False) -> Expanded:
    """The rows of a dispatch one for each choice, length of them. Padding between experts is zero, on the host also rows behind
    the last."""
    x, scales, weights, indices, counts = result.rows, result.scales, result.weights, result.indices, result.came.counts
    slots = indices.new_empty(indices.shape, dtype=torch.int32)
    rows = x.new_empty((length, x.shape[1]))
    factors = None if scales is None else scales.new_empty((length, scales.shape[1]))
    beside = None if weights is None else weights.new_empty(length)
    told = indices.new_empty(counts.shape[0] + 1) if rooms else None
    by = routing.made.dispatcher  # type: ignore[union-attr]
    by._expand(_places(indices, counts, slots, told, x, rows, scales, factors, weights, beside), alignment, length)
    return Expanded(rows, factors, beside, slots, told)


def fold(
    x: Tensor, weights: Optional[Tensor], slots: Tensor, routing: Routing, summed: bool = True
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """Rows one for each token, the sums of the rows of its choices, in float32 and in the order of choices, and the weight of
    each choice [tokens, top_k], 0 for none."""
    by = routing.engine.combines(routing, x.shape[1], x.dtype).dispatcher
    rows = sums = None
    if summed:
        rows = aligned(x)
        sums = x.new_empty((slots.shape[0], x.shape[1]))
    beside = None if weights is None else weights.new_empty(slots.shape)
    by._fold(_places(rows, slots, sums, weights, beside), DTYPES[str(x.dtype)[6:]])
    return sums, beside


def _places(*parts: Optional[Tensor]) -> list[int]:
    """Where tensors lie, and their bytes."""
    return [n for part in parts for n in place(part)]


def column_major(scales: Tensor) -> Tensor:
    """Scales with the rows of a column one after the other, and columns at multiples of 16 bytes."""
    n, words = scales.shape
    made = torch.empty((words, align(max(n, 1), 4)), dtype=scales.dtype, device=scales.device)
    view = made.t()[:n]
    return view.copy_(scales)
