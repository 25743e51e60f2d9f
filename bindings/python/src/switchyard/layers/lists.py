"""Row lists: which rows each expert's products read, in blocks of an expert each. Nothing here asks the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .waits import await_counts

#: How many choices a program of the kernels that count and fill has.
_CHOICES = 128
#: How many programs make lists of rows by expert: few, since they may wait for a kernel that wants a multiprocessor too.
_WAITING = 64


class Lists(NamedTuple):
    """Entries in blocks of ``block`` rows. A block belongs to one expert; entries that are none are -1."""

    block: int
    #: [entries]: what each entry reads, ``row * top_k + choice``.
    entries: Tensor
    #: [blocks]: the expert of each block.
    experts: Tensor
    #: [experts + 1]: the first block of each expert, and how many there are.
    starts: Tensor
    #: [rows * top_k]: the entry of each choice, -1 for none. Empty where rows lie by expert.
    places: Tensor
    top_k: int
    #: How many rows of tokens there can be.
    rows: int


class Words(NamedTuple):
    """Words by which kernels of other streams and these products wait for one another."""

    #: How many rows of each expert have landed.
    landed: Tensor
    #: How many rows of each expert are made.
    ready: Tensor
    #: Not zero once the dispatch has ended, well or not.
    over: Tensor
    #: Zero at first; not zero once a wait for rows was given up. Then nothing more is made, and ready stays as it is.
    failed: Tensor
    #: For how many ns a wait lasts in which nothing lands.
    patience: int


def ends_of(words: Words | None) -> tuple[Any, Any, int]:
    """The arguments that end a kernel's waits."""
    return (words.over, words.failed, words.patience) if words is not None else (None, None, 0)


@triton.jit
def _expert_of(indices, flat, total, offsets, counts, top_k, RANKS: tl.constexpr, R: tl.constexpr):
    """The local expert of choices, -1 for those of rows that did not come."""
    row = flat // top_k
    rank = tl.arange(0, R)
    first = tl.load(offsets + rank, mask=rank < RANKS, other=0)
    many = tl.load(counts + rank, mask=rank < RANKS, other=0)
    inside = (row[:, None] >= first[None, :]) & (row[:, None] < (first + many)[None, :])
    there = (tl.sum(inside.to(tl.int32), 1) > 0) & (flat < total)
    return tl.load(indices + flat, mask=there, other=-1).to(tl.int32)


@triton.jit
def _count(
    indices, offsets, counts, table, total, top_k, blocks,
    RANKS: tl.constexpr, R: tl.constexpr, EXPERTS: tl.constexpr, E: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """How many choices each expert has in each part of the choices: table[expert, part]."""
    part = tl.program_id(0)
    flat = part * C + tl.arange(0, C)
    expert = _expert_of(indices, flat, total, offsets, counts, top_k, RANKS, R)
    e = tl.arange(0, E)
    many = tl.sum((expert[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(table + e * blocks + part, many, mask=e < EXPERTS)


@triton.jit
def _add_up(table, totals, blocks, B: tl.constexpr):
    """For each expert how many choices it has in the parts before, and in all."""
    e = tl.program_id(0)
    before = 0
    for at in range(0, blocks, B):
        b = at + tl.arange(0, B)
        many = tl.load(table + e * blocks + b, mask=b < blocks, other=0)
        tl.store(table + e * blocks + b, before + tl.cumsum(many, 0) - many, mask=b < blocks)
        before += tl.sum(many, 0)
    tl.store(totals + e, before)


@triton.jit
def _fill(
    indices, offsets, counts, table, totals, entries, experts, starts, places, total, top_k, blocks, most,
    RANKS: tl.constexpr, R: tl.constexpr, EXPERTS: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Writes what _count and _add_up have found. Entries of an expert are in the order of choices."""
    part = tl.program_id(0)
    e = tl.arange(0, E)
    many = tl.load(totals + e, mask=e < EXPERTS, other=0)
    tiles = (many + BLOCK - 1) // BLOCK
    end = tl.cumsum(tiles, 0)
    # The choices of this part.
    flat = part * C + tl.arange(0, C)
    expert = _expert_of(indices, flat, total, offsets, counts, top_k, RANKS, R)
    mine = (expert[:, None] == e[None, :]).to(tl.int32)
    first = (end - tiles) * BLOCK + tl.load(table + e * blocks + part, mask=e < EXPERTS, other=0)
    place = tl.sum(mine * (tl.cumsum(mine, 0) - 1 + first[None, :]), 1)
    tl.store(entries + place, flat, mask=expert >= 0)
    tl.store(places + flat, tl.where(expert >= 0, place, -1), mask=flat < total)
    # Some blocks, which are an expert's, and what of their entries is none.
    t = part * TILES + tl.arange(0, TILES)
    owner = tl.sum((end[None, :] <= t[:, None]).to(tl.int32), 1)
    tl.store(experts + t, owner, mask=t < most)
    last = tl.sum(tl.where(owner[:, None] == e[None, :], (end - tiles)[None, :] * BLOCK + many[None, :], 0), 1)
    slot = t[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    none = (slot >= last[:, None]) & (t < most)[:, None]
    tl.store(entries + slot, tl.full(slot.shape, -1, tl.int32), mask=none)
    if part == 0:
        tl.store(starts + e, end - tiles, mask=e < EXPERTS)
        tl.store(starts + EXPERTS, tl.sum(tiles, 0))


@triton.jit
def _by_expert(
    offsets, counts, entries, experts, starts, most, over, failed, patience,
    EXPERTS: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """The same of rows that lie by expert: the entries of an expert are its rows."""
    e = tl.arange(0, E)
    if WAIT:
        many = await_counts(counts, e, e < EXPERTS, over, failed, patience)
    else:
        many = tl.load(counts + e, mask=e < EXPERTS, other=0)
    tiles = (many + BLOCK - 1) // BLOCK
    end = tl.cumsum(tiles, 0)
    if tl.program_id(0) == 0:
        tl.store(starts + e, end - tiles, mask=e < EXPERTS)
        tl.store(starts + EXPERTS, tl.sum(tiles, 0))
    for t in range(tl.program_id(0), tl.minimum(most, tl.sum(tiles, 0)), tl.num_programs(0)):
        owner = tl.sum((end <= t).to(tl.int32), 0)
        first = t - tl.sum(tl.where(e == owner, end - tiles, 0), 0)
        rows = tl.sum(tl.where(e == owner, many, 0), 0)
        i = first * BLOCK + tl.arange(0, BLOCK)
        tl.store(experts + t, owner)
        tl.store(entries + t * BLOCK + tl.arange(0, BLOCK), tl.where(i < rows, tl.load(offsets + owner) + i, -1))


def _power(n: int) -> int:
    return triton.next_power_of_2(max(n, 2))


def room_for(choices: int, experts: int, block: int) -> int:
    """The most entries that these numbers of choices and experts can have."""
    return max(choices // block + min(experts, choices), 1) * block


def room_of(counts: Sequence[int], block: int) -> int:
    """How many entries experts with these numbers of choices have."""
    return max(sum(-(-n // block) for n in counts), 1) * block


def by_token(indices: Tensor, offsets: Tensor, counts: Tensor, experts: int, block: int, room: int) -> Lists:
    """The lists of rows by token. indices are [rows, top_k], those of each rank begin at offsets, and counts of them came. room
    is how many entries there can be."""
    rows, top_k = indices.shape
    total, ranks = rows * top_k, counts.shape[0]
    parts = max(triton.cdiv(total, _CHOICES), 1)
    tiles = room // block
    new = lambda n: torch.empty(max(n, 1), dtype=torch.int32, device=indices.device)  # noqa: E731
    table, totals, places = new(experts * parts), new(experts), new(total)
    entries, owners, starts = new((tiles + 1) * block), new(tiles), new(experts + 1)
    sizes: dict[str, Any] = {"RANKS": ranks, "R": _power(ranks), "EXPERTS": experts, "E": _power(experts), "C": _CHOICES}
    _count[(parts,)](indices, offsets, counts, table, total, top_k, parts, **sizes)
    _add_up[(experts,)](table, totals, parts, B=min(_power(parts), 1024))
    _fill[(parts,)](
        indices, offsets, counts, table, totals, entries, owners, starts, places, total, top_k, parts, tiles, **sizes,
        BLOCK=block, TILES=_power(triton.cdiv(tiles, parts)), num_warps=8,
    )  # fmt: skip
    return Lists(block, entries, owners, starts, places, top_k, rows)


def by_expert(rows: int, offsets: Tensor, counts: Tensor, block: int, room: int, words: Words | None = None) -> Lists:
    """The lists of rows by expert: there are counts from offsets on. With words they are waited for, as they are -1 until the
    call that is under way knows them."""
    experts, tiles = counts.shape[0], room // block
    new = lambda n: torch.empty(max(n, 1), dtype=torch.int32, device=counts.device)  # noqa: E731
    entries, owners, starts = new((tiles + 1) * block), new(tiles), new(experts + 1)
    _by_expert[(max(min(tiles, _WAITING), 1),)](
        offsets, counts, entries, owners, starts, tiles, *ends_of(words), EXPERTS=experts, E=_power(experts), BLOCK=block,
        WAIT=words is not None, num_warps=1,
    )  # fmt: skip
    return Lists(block, entries, owners, starts, counts.new_empty(0), 1, rows)
