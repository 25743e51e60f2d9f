"""Sums in the order of a token's choices. Rows come back one by one, and the rank of the token adds them up in float32, behind
the biases, and rounds once.

The combine of a dispatcher adds ranks in ascending order, and a rank's own rows before they cross.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._routings import Routing, ranks_of_choices

# As many rows go together as dispatchers of this many tokens bring: a few choices of each token, or one where tokens are more.
ROOM = 8192


def by_choice(x: Tensor, routing: Routing, slots: Tensor, biases: Sequence[Tensor]) -> Tensor:
    """The sums of biases and of the rows of all choices; slots [tokens here, top_k] has the row in x of each, -1 for none."""
    return _summed(x, routing, routing.idx, routing.shape.experts, slots, biases)


def by_rank(x: Tensor, routing: Routing, indices: Tensor, biases: Sequence[Tensor]) -> Tensor:
    """The sums of biases and of the rows [tokens here, hidden] of all ranks, each where the token's first choice of the rank
    is; indices [tokens here, top_k] has the choices on this rank, -1 elsewhere."""
    size = routing.engine.size
    rank = ranks_of_choices(routing.idx, routing.shape.experts, size)
    top_k = rank.shape[1]
    before = torch.ones((top_k, top_k), dtype=torch.bool, device=rank.device).tril(-1)
    again = ((rank[:, :, None] == rank[:, None, :]) & before).any(2)
    here = indices >= 0
    first = here & (here.cumsum(1) == 1)
    number = torch.arange(indices.shape[0], device=indices.device)[:, None]
    return _summed(x, routing, torch.where(again, -1, rank), size, torch.where(first, number, -1), biases)


def _summed(x: Tensor, routing: Routing, ways: Tensor, experts: int, slots: Tensor, biases: Sequence[Tensor]) -> Tensor:
    """The sums of biases and rows: ways [tokens, top_k] has the expert that each row comes from, slots the rows here."""
    tokens, top_k = ways.shape
    sized = routing.sized()
    step = min(top_k, max(1, ROOM // sized.tokens))
    shape = sized._replace(experts=experts, top_k=1, tokens=sized.tokens * step, open=False)
    y = torch.zeros((tokens, x.shape[1]), dtype=torch.float32, device=x.device)
    for bias in biases:
        y += bias
    for some, here in zip(ways.split(step, 1), slots.split(step, 1)):
        each = Routing(routing.engine, shape, some.reshape(-1, 1).contiguous(), False)
        came = routing.engine.combine(_packed(x, here.flatten()), each).view(tokens, some.shape[1], x.shape[1])
        for rows in came.unbind(1):
            y += rows
    return y.to(x.dtype)


def _packed(x: Tensor, slots: Tensor) -> Tensor:
    """The rows of x that slots name, without those of -1. Behind them are others, as many as slots are more."""
    if not x.shape[0]:
        return x.new_zeros((slots.shape[0], x.shape[1]))
    named, last = slots >= 0, slots.shape[0]
    place = torch.where(named, named.cumsum(0) - 1, last)
    rows = torch.zeros(last + 1, dtype=torch.int64, device=x.device).scatter_(0, place, slots.clamp(min=0).to(torch.int64))
    return x.index_select(0, rows[:last])
