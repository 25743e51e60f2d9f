"""Rows one for each token and rows one for each choice: the way there and back, on this rank alone."""

from __future__ import annotations

from typing import Optional

import torch
from switchyard._core import abi
from switchyard._core.dtypes import DTYPES
from switchyard._core.native import library
from torch import Tensor

from ..utils.sizes import align


def starts_of(counts: Tensor, alignment: int) -> tuple[Tensor, Tensor]:
    """The first row of each expert, where each begins at a multiple of alignment, and where its last row ends."""
    room = torch.div(counts + alignment - 1, alignment, rounding_mode="floor") * alignment
    first = (room.cumsum(0) - room).to(torch.int32)
    return first, first + counts


def most_rows(rows: int, top_k: int, local: int, alignment: int) -> int:
    """How many rows choices can take at most."""
    return align(rows * min(top_k, local) + (alignment - 1) * local, alignment)


def slots_of(indices: Tensor, counts: Tensor, alignment: int) -> Tensor:
    """The row of each choice [rows, top_k], -1 for none: experts one after the other, their rows in the order of tokens."""
    flat, local = indices.flatten(), counts.shape[0]
    expert = torch.where(flat < 0, local, flat)
    order = expert.argsort(stable=True)
    first, _ = starts_of(counts, alignment)
    shift = torch.cat((first - (counts.cumsum(0) - counts), first.new_zeros(1)))
    place = torch.arange(flat.shape[0], device=flat.device) + shift[expert[order]]
    slots = torch.empty_like(flat).scatter_(0, order, place)
    return torch.where(flat < 0, -1, slots).view(indices.shape).to(torch.int32)


def tokens_of(slots: Tensor, length: int) -> Tensor:
    """The choice that each of length rows is, token by token, -1 in padding."""
    flat = slots.flatten().to(torch.int64)
    choice = torch.arange(flat.shape[0], device=flat.device)
    found = torch.full((length + 1,), -1, dtype=torch.int64, device=flat.device)
    return found.scatter_(0, torch.where(flat < 0, length, flat), choice)[:length]


def choices_in_order(indices: Tensor, length: int) -> Tensor:
    """The choice that each of length rows is where experts follow each other without padding, and length is all of them."""
    flat = indices.view(-1)
    return flat.argsort(stable=True)[flat.shape[0] - length :]  # behind those that are none


def slots_in_order(indices: Tensor, found: Tensor) -> Tensor:
    """The row of each choice, -1 for none, where found says which choice each row is."""
    slots = torch.full((indices.numel(),), -1, dtype=torch.int32, device=indices.device)
    rows = torch.arange(found.shape[0], dtype=torch.int32, device=indices.device)
    return slots.scatter_(0, found, rows).view(indices.shape)


def _place(x: Optional[Tensor]) -> abi.Memory:
    """Where a tensor lies, and its bytes."""
    return (0, 0) if x is None else (x.data_ptr(), x.numel() * x.element_size())


def on_host(
    x: Tensor, scales: Optional[Tensor], weights: Optional[Tensor], indices: Tensor, experts: int, alignment: int, length: int
) -> tuple[Tensor, Optional[Tensor], Optional[Tensor], Tensor]:
    """Rows, scales and weights one for each choice, and the row of each choice, by one call of the library."""
    slots = indices.new_empty(indices.shape, dtype=torch.int32)
    rows = x.new_empty((length, x.shape[1]))
    factors = None if scales is None else scales.new_empty((length, scales.shape[1]))
    beside = None if weights is None else weights.new_empty(length)
    parts = indices, slots, x, rows, scales, factors, weights, beside
    call = abi.expand_call([n for part in parts for n in _place(part)], indices.shape[1], experts, alignment, length)
    lib = library()
    lib.check(lib.expand(call.buffer_info()[0]))
    return rows, factors, beside, slots


def spread(x: Tensor, found: Tensor, top_k: int, padded: bool = True) -> Tensor:
    """Rows one for each choice. Padding is zero."""
    if not x.shape[0]:
        return torch.zeros((found.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
    plain = x.view(torch.uint8) if x.element_size() == 1 else x
    token = torch.div(found, top_k, rounding_mode="floor")
    if not padded:
        rows = plain.index_select(0, token)
        return rows if plain is x else rows.view(x.dtype)
    token = token.clamp_(min=0)
    rows = plain.index_select(0, token).masked_fill_((found < 0)[:, None], 0)
    return rows.view(x.dtype)


def weights_of(weights: Tensor, found: Tensor, padded: bool = True) -> Tensor:
    """The weight of each row, 0 in padding."""
    if not padded:
        return weights.view(-1).index_select(0, found)
    if not weights.numel():
        return torch.zeros(found.shape, dtype=weights.dtype, device=weights.device)
    return torch.where(found < 0, 0.0, weights.flatten()[found.clamp(min=0)])


def gather(x: Tensor, slots: Tensor) -> Tensor:
    """The entry of each choice [rows, top_k], 0 for none."""
    if not x.shape[0]:
        return torch.zeros(slots.shape, dtype=x.dtype, device=x.device)
    return torch.where(slots < 0, 0.0, x[slots.clamp(min=0)])


def fold(x: Tensor, slots: Tensor) -> Tensor:
    """Rows one for each token: the sums of the rows of its choices, in float32 and in the order of choices."""
    if x.is_cpu:
        y = x.new_empty((slots.shape[0], x.shape[1]))
        lib, dtype = library(), DTYPES[str(x.dtype)[6:]]
        call = abi.fold_call(_place(x), _place(slots), _place(y), slots.shape[1], dtype)
        lib.check(lib.fold(call.buffer_info()[0]))
        return y
    made = torch.zeros((slots.shape[0], x.shape[1]), dtype=torch.float32, device=x.device)
    if x.shape[0]:
        for slot in slots.unbind(1):
            rows = x.index_select(0, slot.clamp(min=0)).to(torch.float32)
            made += rows.masked_fill_((slot < 0)[:, None], 0)
    return made.to(x.dtype)


def column_major(scales: Tensor) -> Tensor:
    """Scales with the rows of a column one after the other, and columns at multiples of 16 bytes."""
    n, words = scales.shape
    made = torch.empty((words, align(max(n, 1), 4)), dtype=scales.dtype, device=scales.device)
    view = made.t()[:n]
    return view.copy_(scales)
