"""Handles of the second generation."""

from __future__ import annotations

from functools import cached_property
from typing import Optional

import torch
from switchyard._core.arguments import Bound
from switchyard._torch.compiler import uncompiled_methods
from torch import Tensor

from .._handles import places
from .._results import Result
from .._routings import Routing, ranks_of
from ..utils.sizes import aligned
from . import _expand


@uncompiled_methods
class EPHandle(Bound):
    """Where the tokens of a dispatch went, and what this rank got.

    - ``psum_num_recv_tokens_per_expert``: [local experts], where the rows of each end: with do_expand its last row, else
      all that came up to it, at multiples of expert_alignment;
    - ``psum_num_recv_tokens_per_scaleup_rank``: [ranks], the tokens that came from each rank and those before it;
    - ``recv_src_metadata``: [tokens, top_k + 2], the token's number among all ranks, that on its rank, and with do_expand
      the rows of its choices, -1 for none;
    - ``dst_buffer_slot_idx``: [tokens, top_k], the number of a sent token among those to the rank of each choice, -1 for none;
    - ``num_recv_tokens_per_expert_list``: rows of each local expert at multiples of expert_alignment, empty without a wait of
      the host.

    Tensors that the host does not need are made when they are read.
    """

    token_metadata_at_forward: Optional[Tensor] = None
    channel_linked_list: Optional[Tensor] = None
    #: [tokens, top_k]: with do_expand the row of each choice, -1 for none.
    slots: Tensor

    def __init__(
        self, routing: Routing, result: Result, topk_idx: Optional[Tensor], do_expand: bool, alignment: int, most: int,
        num_sms: int,
    ) -> None:  # fmt: skip
        self.do_expand, self.num_experts, self.expert_alignment = do_expand, routing.shape.experts, alignment
        self.num_max_tokens_per_rank, self.num_sms = most, num_sms
        if topk_idx is not None:
            self.topk_idx = topk_idx
        self._routing, self._came, self._indices = routing, result.came, result.indices
        self.num_recv_tokens = result.indices.shape[0]
        self._length = 0 if routing.counted else self.num_recv_tokens
        self.num_recv_tokens_per_expert_list = aligned(result.chosen, alignment) if routing.counted else []
        local = routing.shape.experts // routing.engine.size
        self.num_expanded_tokens = (
            sum(self.num_recv_tokens_per_expert_list)
            if routing.counted
            else _expand.most_rows(self.num_recv_tokens, routing.shape.top_k, local, alignment)
        )

    @cached_property
    def topk_idx(self) -> Tensor:
        """The choices of the dispatch: the very tensor without do_handle_copy."""
        return self._routing.idx

    @cached_property
    def num_unaligned_recv_tokens_per_expert(self) -> Tensor:
        return self._came.counts

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> Tensor:
        first, end = _expand.starts_of(self.num_unaligned_recv_tokens_per_expert, self.expert_alignment)
        if self.do_expand:
            return end
        room = torch.div(end - first + self.expert_alignment - 1, self.expert_alignment, rounding_mode="floor")
        return first + (room * self.expert_alignment).to(torch.int32)

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Tensor:
        return self._came.rank_counts.cumsum(0).to(torch.int32)

    def expanded(self, result: Result) -> tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
        """Rows, scales and weights of a dispatch that went these ways, one for each choice."""
        made = _expand.expand(result, self._routing, self.expert_alignment, self.num_expanded_tokens)
        self.slots = made.slots
        return made.rows, made.scales, made.weights

    @cached_property
    def recv_src_metadata(self) -> Tensor:
        rank, token = self._came.sources.unbind(1)
        slots = self.slots if self.do_expand else torch.full_like(self._indices, -1, dtype=torch.int32)
        number = rank * self.num_max_tokens_per_rank + token
        return torch.cat((number[:, None], token[:, None], slots), 1)

    @cached_property
    def dst_buffer_slot_idx(self) -> Tensor:
        size, idx = self._routing.engine.size, self._routing.idx
        inside, _ = ranks_of(idx, self.num_experts, size)
        rank = torch.div(idx.clamp(min=0), self.num_experts // size, rounding_mode="floor")
        return torch.where(idx < 0, -1, places(inside).gather(1, rank))
