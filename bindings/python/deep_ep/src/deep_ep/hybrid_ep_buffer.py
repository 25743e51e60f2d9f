"""The buffer of DeepEP's branch hybrid-ep: rows come one for each choice, expert after expert."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Optional

import torch
from switchyard import errors
from switchyard._core.arguments import Bound
from switchyard._torch.compiler import uncompiled_methods
from torch import Tensor

from . import _checks as checks
from ._engine import Engines
from ._handles import Parts
from ._results import Result, Shape
from ._routings import Routing
from ._streams import device_of
from .buffers import _expand
from .buffers.legacy import checked
from .utils.sizes import aligned


def indices_to_map(
    topk_idx: Tensor, topk_weights: Optional[Tensor], num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Optional[Tensor]]:
    """Choices [tokens, top_k], -1 for none, as a mask [tokens, experts], and their weights at the same places."""
    idx = checks.in_range("indices_to_map", checks.indices("indices_to_map", topk_idx), num_of_experts)
    shape = (num_of_tokens, num_of_experts + 1)
    at = torch.where(idx < 0, num_of_experts, idx)
    chosen = torch.zeros(shape, dtype=torch.bool, device=idx.device).scatter_(1, at, True)[:, :num_of_experts]
    if topk_weights is None:
        return chosen, None
    probs = torch.zeros(shape, dtype=torch.float32, device=idx.device).scatter_(1, at, topk_weights)
    return chosen, probs[:, :num_of_experts]


@uncompiled_methods
class HybridHandle(Parts):
    """Where the tokens of a dispatch went: a sequence of 11 parts. Number 7 are the rows of each local expert without padding,
    8 the tokens of this rank, and 10 a word that is not 0 where rows were dropped. The others are None.
    """

    _length = 11

    #: Rows of each local expert with padding.
    padded: Tensor
    #: The row of each choice [tokens, top_k].
    slots: Tensor
    _rooms: Optional[Tensor] = None

    def __init__(self, routing: Routing, result: Result, alignment: int, budget: Optional[int], length: int) -> None:
        self.routing, self.came, self.length, self.alignment = routing, result.came, length, alignment
        self.budget = budget
        if budget is None:
            padded = aligned(result.chosen, alignment)
            self.padded, self.rows = torch.tensor(padded, dtype=torch.int64, device="cpu"), sum(padded)
        else:
            self.rows = budget
        self._parts = {8: routing.tokens}

    def expanded(self, result: Result) -> _expand.Expanded:
        """Rows of a dispatch that went these ways, one for each choice."""
        made = _expand.expand(result, self.routing, self.alignment, self.rows, self.budget is not None)
        self.slots = made.slots
        if made.rooms is not None:
            self.padded, self._rooms = made.rooms[:-1], made.rooms
        return made

    def _make(self, i: int) -> Optional[Tensor]:
        if i == 10:
            none = self._rooms is None
            return self.came.counts.new_zeros(1) if none else self._rooms[-1:].to(torch.int32)  # type: ignore[index]
        return self.came.counts if i == 7 else None

    def tensors(self) -> Sequence[Any]:
        return self.slots, self.routing.kept.memory


@uncompiled_methods
class HybridEPBuffer(Bound):
    """Dispatch and combine for a group of ranks, with rows by expert. Memory is taken by calls, as they need it, together with
    all ranks."""

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: Optional[int] = None,
        num_sms_combine_api: Optional[int] = None,
        num_sms_preprocessing_api: Optional[int] = None,
        num_blocks_permute: Optional[int] = None,
        num_blocks_unpermute: Optional[int] = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: Optional[int] = None,
        use_mnnvl: Optional[bool] = None,
    ) -> None:
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.local_rank, self.node_rank, self.num_of_nodes = self.rank, 0, 1
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = self.group_size
        self.configurer = SimpleNamespace(
            buffer_config=SimpleNamespace(
                hidden_dim=hidden_dim,
                max_num_of_tokens_per_rank=max_num_of_tokens_per_rank,
                num_of_experts_per_rank=num_local_experts,
            )
        )
        self._max_sms = num_sms_dispatch_api or 0
        self._engines = Engines(group)

    def destroy(self) -> None:
        """Have later calls of this buffer raise. The memory that the group's calls have taken is given back together with all
        ranks, with the last buffer of the group that is destroyed."""
        self._engines.end()

    def empty_jit_cache(self) -> None:
        """Nothing is compiled."""

    def update_template_config(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("deep_ep: HybridEPBuffer.update_template_config: there are no templates of kernels")

    def dispatch(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("deep_ep: HybridEPBuffer.dispatch is not supported, use dispatch_with_permute")

    def combine(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("deep_ep: HybridEPBuffer.combine is not supported, use combine_with_unpermute")

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Optional[Tensor] = None,
        topk_weights: Optional[Tensor] = None,
        num_of_experts_per_rank: Optional[int] = None,
        num_of_experts: Optional[int] = None,
        use_fp8: Optional[bool] = None,
        routing_map: Optional[Tensor] = None,
        probs: Optional[Tensor] = None,
        scaling_factor: Optional[Tensor] = None,
        num_permuted_tokens: Optional[int] = None,
        pad_multiple: Optional[int] = None,
        handle: Optional[HybridHandle] = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: Optional[int] = None,
        use_host_meta: Optional[bool] = None,
    ) -> tuple[Tensor, Optional[Tensor], Optional[Tensor], Tensor, HybridHandle]:
        """Send tokens to their experts: rows, their probabilities, their scales, how many each local expert got with padding,
        and a handle. With num_permuted_tokens and non_blocking there are as many rows, others are dropped, and the last part of
        the handle says so."""
        call = "dispatch_with_permute"
        sent = checks.tokens(call, hidden if scaling_factor is None else (hidden, scaling_factor))
        engine = self._engines.of(device_of(f"{call}: hidden", sent.x))
        if handle is None:
            given = (topk_idx, topk_weights, routing_map, probs, num_of_experts)
            idx, beside, experts = self._choices(call, engine, sent.x, *given)
        else:
            routing = self._routing(call, handle, engine)
            idx, experts = routing.idx, routing.shape.experts
            if sent.x.shape[0] != idx.shape[0]:
                tokens = f"{sent.x.shape[0]} tokens, those of the handle are {idx.shape[0]}"
                raise errors.InvalidArgument(f"deep_ep: {call}: hidden has {tokens}")
            beside = None if probs is None else _at(probs, idx, call, experts)
        if use_host_meta is not None:
            non_blocking = not use_host_meta
        budget = num_permuted_tokens if non_blocking else None
        alignment = max(pad_multiple or 1, 1)
        if handle is None and non_blocking and (budget is None or budget % alignment):
            raise errors.InvalidArgument(
                f"deep_ep: {call}: num_permuted_tokens is {budget}, want a multiple of {alignment} where non_blocking is set"
            )
        kinds = {"hidden": sent.x.shape[1], "dtype": sent.x.dtype, "scales": sent.kind, "max_sms": self._max_sms}
        if handle is None:
            most = self.configurer.buffer_config.max_num_of_tokens_per_rank if non_blocking else 0
            if most:
                checks.at_most(call, sent.x, most, "max_num_of_tokens_per_rank")
            shape = Shape(experts, idx.shape[1], tokens=most, **kinds)
            result, routing = engine.dispatch(shape, sent.x, sent.scales, idx, beside, self.group_size * most)
            handle = HybridHandle(routing, result, alignment, budget, self.group_size * most)
        else:
            shape = routing.sized()._replace(**kinds)
            result = engine.redispatch(sent.x, sent.scales, beside, routing, shape, handle.length)
        made = handle.expanded(result)
        return made.rows, made.weights, made.scales, handle.padded, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Optional[Tensor] = None,
        handle: Optional[HybridHandle] = None,
        pad_multiple: Optional[int] = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: Optional[int] = None,
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Bring rows back: the sums of each token's rows, and with probs [rows] those of its choices, [tokens, experts]."""
        call = "combine_with_unpermute"
        x = checks.rows(call, hidden)
        engine = self._engines.of(device_of(f"{call}: hidden", x))
        routing = self._routing(call, handle, engine)
        assert handle is not None
        if x.shape[0] != handle.rows:
            raise errors.InvalidArgument(f"deep_ep: {call}: hidden has {x.shape[0]} rows, the dispatch brought {handle.rows}")
        given = None
        if probs is not None:
            if probs.shape != (handle.rows,):
                raise errors.InvalidArgument(f"deep_ep: {call}: probs has shape {tuple(probs.shape)}, want ({handle.rows},)")
            given = probs.detach().to(torch.float32).contiguous()
        rows, weights = _expand.fold(x, given, handle.slots, routing)
        if weights is None:
            return engine.combine(rows, routing), None
        y, sums = engine.combine(rows, routing, weights)
        return y, indices_to_map(routing.idx, sums, routing.idx.shape[0], routing.shape.experts)[1]

    def _choices(
        self, call: str, engine: Any, x: Tensor, topk_idx: Any, topk_weights: Any, routing_map: Any, probs: Any, experts: Any
    ) -> tuple[Tensor, Optional[Tensor], int]:
        """The choices of tokens, their weights, and the number of experts."""
        if routing_map is None:
            if topk_idx is None or experts is None:
                raise errors.InvalidArgument(f"deep_ep: {call}: neither routing_map nor topk_idx with num_of_experts is there")
            idx, weights = checks.choices(call, topk_idx, topk_weights, x.shape[0], x.device)
            return idx.to(torch.int64, copy=True), weights, checks.experts(call, experts, self.group_size)
        chosen = checks.matrix(call, "routing_map", routing_map, rows=x.shape[0], device=x.device)
        if chosen.dtype is not torch.bool:
            raise errors.InvalidType(f"deep_ep: {call}: routing_map is {chosen.dtype}, want torch.bool")
        experts = checks.experts(call, chosen.shape[1], self.group_size)
        engine.refuse_capture("a call with a routing_map, whose number of choices the host has to know,")
        top_k = max(engine.most(int(chosen.sum(1).max()) if chosen.numel() else 0), 1)
        order = chosen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :top_k]
        idx = torch.where(chosen.gather(1, order), order, -1)
        return idx, None if probs is None else _at(probs, idx, call, experts), experts

    @staticmethod
    def _routing(call: str, handle: Any, engine: Any) -> Routing:
        if not isinstance(handle, HybridHandle):
            raise errors.InvalidType(f"deep_ep: {call}: handle is {type(handle).__name__}, want dispatch_with_permute's")
        return checked(call, handle.routing, engine)


def _at(probs: Any, idx: Tensor, call: str, experts: int) -> Tensor:
    """The probability of each choice, 0 for none."""
    probs = checks.matrix(call, "probs", probs, rows=idx.shape[0], columns=experts, device=idx.device)
    return probs.to(torch.float32).gather(1, idx.clamp(min=0)).masked_fill_(idx < 0, 0)
