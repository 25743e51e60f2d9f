"""Handles of the first generation: sequences, whose parts are made when somebody asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from switchyard import errors
from switchyard._core.arguments import Bound
from switchyard._torch.compiler import uncompiled_methods
from torch import Tensor

from ._results import Result
from ._routings import LentRouting, Routing, ranks_of


@uncompiled_methods
class Parts(Bound):
    """A sequence whose parts are made once, when they are read."""

    _length = 0
    _parts: dict[int, Any]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return tuple(self[j] for j in range(self._length)[i])
        if not -self._length <= i < self._length:
            raise IndexError(f"deep_ep: a handle has {self._length} parts, not one of number {i}")
        i %= self._length
        if i not in self._parts:
            self._parts[i] = self._make(i)
        return self._parts[i]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self._length))

    def _make(self, i: int) -> Any:
        raise NotImplementedError


@uncompiled_methods
class Handle(Parts):
    """The handle of Buffer.dispatch: rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix, recv_src_idx,
    is_token_in_rank, send_head.

    Of rank_prefix_matrix this rank knows its own column, others are -1. There is one channel.
    """

    _length = 6

    def __init__(self, routing: Routing, result: Result, length: int) -> None:
        self.routing, self.length, self._came, self._parts = routing, length, result.came, {}

    def _make(self, i: int) -> Tensor:
        size, idx = self.routing.engine.size, self.routing.idx
        if i == 0:
            matrix = torch.full((size, size), -1, dtype=torch.int32, device=idx.device)
            matrix[:, self.routing.engine.group.rank()] = self._came.rank_counts.cumsum(0)
            return matrix
        if i == 2:
            counts = self._came.rank_counts
            return (counts.cumsum(0) - counts).to(torch.int32)[:, None]
        if i == 3:
            return self._came.sources[:, 1].contiguous()
        inside, _ = ranks_of(idx, self.routing.shape.experts, size)
        if i == 4:
            return inside
        if i == 1:
            return inside.sum(0, dtype=torch.int32)[:, None]
        return places(inside)


def places(inside: Tensor) -> Tensor:
    """The number of each token among those that go to each rank, -1 for none: [tokens, ranks], int32."""
    return torch.where(inside, inside.cumsum(0) - 1, -1).to(torch.int32)


@uncompiled_methods
class FewHandle(Parts):
    """The handle of Buffer.low_latency_dispatch: src_info, layout_range, num_max_dispatch_tokens_per_rank, hidden, num_experts.

    src_info [local experts, rows] has the token of each row, layout_range [local experts, ranks] the first row of each rank in
    its upper half and their number in its lower. Both are read where the rows lie.
    """

    _length = 5

    def __init__(self, routing: LentRouting, counts: Tensor) -> None:
        self.routing, self._live, self._counts, self._parts = routing, routing.live, counts, {}

    def _make(self, i: int) -> Any:
        if i > 1:
            shape = self.routing.shape
            return (shape.tokens, shape.hidden, shape.experts)[i - 2]
        if self._live is None or self._live.got is None:
            raise errors.Freed("deep_ep: src_info and layout_range of this handle went with its rows, which were given back")
        sources = self._live.got.sources.view(self._counts.shape[0], -1, 2)
        if i == 0:
            return sources[:, :, 1].contiguous()
        size, room = self.routing.engine.size, sources.shape[1]
        here = torch.arange(room, device=sources.device) < self._counts[:, None]
        rank = torch.where(here, sources[:, :, 0], size).to(torch.int64)
        counts = torch.zeros((rank.shape[0], size + 1), dtype=torch.int64, device=rank.device)
        counts = counts.scatter_add_(1, rank, torch.ones_like(rank))[:, :size]
        return ((counts.cumsum(1) - counts) << 32) | counts
