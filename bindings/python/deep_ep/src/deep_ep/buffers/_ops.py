"""Calls of both generations whose results have lengths that the host knows, as operators for compiled graphs, which make the
calls of the buffers when the graph runs.

A call for whose counts the host waits, and one on a stream of its own, is none: the graph ends before it.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from switchyard._torch.compiler import leaving, outside
from torch import Tensor

from .. import _checks as checks
from .._handles import Handle
from .._streams import streaming
from .._tokens import InGraph, buffers, compiling, handle_of, plain, token_of
from ..utils.event import EventOverlap
from . import _expand
from ._ep_handle import EPHandle

counting = leaving("deep_ep: the host waits for the counts of this call")


def _maybe(x: Optional[Tensor], like: Tensor) -> Tensor:
    """A result, or an empty one."""
    return like.new_empty(0, dtype=torch.float32) if x is None else x


def _token_of(handle: Any, before: Optional[Tensor]) -> Tensor:
    """A token for the handle that a call has made, an empty tensor for one that has a token."""
    return token_of(handle) if before is None else torch.empty_like(before)


def _some_token() -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


# Combine


@torch.library.custom_op("switchyard_deep_ep::combine", mutates_args=())
def _combine_op(
    x: Tensor, weights: Optional[Tensor], first: Optional[Tensor], second: Optional[Tensor], token: Tensor, sent: int,
    top_k: int, buffer: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    biases = [b for b in (first, second) if b is not None]
    y, sums, _ = buffers[buffer].combine(x, handle_of(token), weights, biases or None)
    return y, _maybe(sums, x).contiguous()


@_combine_op.register_fake
def _(x, weights, first, second, token, sent, top_k, buffer):  # type: ignore[no-untyped-def]
    sums = x.new_empty((0,) if weights is None else (sent, top_k), dtype=torch.float32)
    return x.new_empty((sent, x.shape[-1])), sums


def combine(buffer: Any, x: Tensor, handle: Any, weights: Optional[Tensor], bias: Any, ours: Any, how: dict[str, Any]) -> Any:
    """A combine by a handle of a graph, which is one of ours."""
    if how:
        return streaming(buffer.combine, x, handle, weights, bias, **how)
    given = list(bias) if isinstance(bias, (tuple, list)) else [] if bias is None else [bias]
    if not isinstance(handle, ours) or len(given) > 2:
        return outside(buffer.combine, x, handle, weights, bias)
    first, second = (*map(plain, given), None, None)[:2]
    y, sums = torch.ops.switchyard_deep_ep.combine(
        plain(x), plain(weights), first, second, handle._token, handle._sent, handle._ways, buffer._name
    )
    return y, None if weights is None else sums, EventOverlap()


# Of the first generation


class NormalInGraph(InGraph, Handle):
    """A handle of Buffer.dispatch in a compiled graph."""

    def __init__(self, token: Tensor, sent: int, ways: int, length: int) -> None:
        self._token, self._sent, self._ways, self.length = token, sent, ways, length


@torch.library.custom_op("switchyard_deep_ep::get_dispatch_layout", mutates_args=())
def _layout_op(idx: Tensor, experts: int, ranks: int, buffer: str) -> tuple[Tensor, Tensor, Tensor]:
    by_rank, _, by_expert, inside, _ = buffers[buffer].get_dispatch_layout(idx, experts)
    return by_rank, by_expert, inside


@_layout_op.register_fake
def _(idx, experts, ranks, buffer):  # type: ignore[no-untyped-def]
    inside = idx.new_empty((idx.shape[0], ranks + 1), dtype=torch.bool)[:, :ranks]  # the last is for no choice
    return idx.new_empty(ranks, dtype=torch.int32), idx.new_empty(experts, dtype=torch.int32), inside


def layout(buffer: Any, idx: Tensor, experts: int, how: dict[str, Any]) -> Any:
    if how:
        return streaming(buffer.get_dispatch_layout, idx, experts, **how)
    made = torch.ops.switchyard_deep_ep.get_dispatch_layout(idx, experts, buffer.group_size, buffer._name)
    by_rank, by_expert, inside = made
    return by_rank, None, by_expert, inside, EventOverlap()


@torch.library.custom_op("switchyard_deep_ep::dispatch", mutates_args=())
def _dispatch_op(
    x: Tensor, scales: Optional[Tensor], inside: Optional[Tensor], by_expert: Optional[Tensor], idx: Optional[Tensor],
    weights: Optional[Tensor], alignment: int, sms: Optional[int], token: Optional[Tensor], length: int, top_k: int,
    buffer: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from .legacy import Config

    handle = None if token is None else handle_of(token)
    rows, indices, beside, _, made, _ = buffers[buffer].dispatch(
        x if scales is None else (x, scales), handle, is_token_in_rank=inside, num_tokens_per_expert=by_expert, topk_idx=idx,
        topk_weights=weights, expert_alignment=alignment, num_worst_tokens=0 if handle is not None else length,
        config=None if sms is None else Config(sms),
    )  # fmt: skip
    rows, factors = (rows, None) if scales is None else rows
    return rows, _maybe(factors, x), _maybe(indices, x), _maybe(beside, x), _token_of(made, token)


@_dispatch_op.register_fake
def _(x, scales, inside, by_expert, idx, weights, alignment, sms, token, length, top_k, buffer):  # type: ignore[no-untyped-def]
    factors = _maybe(None, x) if scales is None else scales.new_empty((length, scales.shape[-1]))
    indices = _maybe(None, x) if idx is None else x.new_empty((length, top_k), dtype=torch.int64)
    beside = _maybe(None, x) if weights is None else x.new_empty((length, top_k), dtype=torch.float32)
    return x.new_empty((length, x.shape[-1])), factors, indices, beside, _some_token()


def dispatch(
    buffer: Any, x: Any, handle: Any, inside: Any, by_expert: Any, idx: Any, weights: Any, alignment: int, worst: int,
    config: Any, how: dict[str, Any],
) -> Any:  # fmt: skip
    named = {
        "is_token_in_rank": inside, "num_tokens_per_expert": by_expert, "topk_idx": idx, "topk_weights": weights,
        "expert_alignment": alignment, "num_worst_tokens": worst, "config": config,
    }  # fmt: skip
    if how:
        return streaming(buffer.dispatch, x, handle, **named, **how)
    if handle is None and not worst:
        return counting(buffer.dispatch, x, handle, **named)
    pair = isinstance(x, (tuple, list))
    known = isinstance(handle, NormalInGraph)
    if (handle is not None and not known) or (pair and len(x) != 2) or (idx is None and inside is None and not known):
        return outside(buffer.dispatch, x, handle, **named)
    tokens, scales = x if pair else (x, None)
    tokens, scales, weights = plain(tokens), plain(scales), plain(weights)
    if known:
        length, ways, token = handle.length, handle._ways, handle._token
    else:
        length, ways, token = worst, buffer.group_size if idx is None else idx.shape[-1], None
    rows, factors, indices, beside, fresh = torch.ops.switchyard_deep_ep.dispatch(
        tokens, scales, inside, by_expert, idx, weights, alignment, None if config is None else config.num_sms, token, length,
        ways, buffer._name,
    )  # fmt: skip
    came = rows if scales is None else (rows, factors)
    if known:
        return came, None, None, None, None, EventOverlap()
    made = NormalInGraph(fresh, tokens.shape[0], ways, length)
    return came, None if idx is None else indices, None if weights is None else beside, [], made, EventOverlap()


# Of the second generation


@torch.library.custom_op("switchyard_deep_ep::part", mutates_args=())
def _part_op(token: Tensor, name: str, shape: list[int], device: torch.device) -> Tensor:
    part: Tensor = getattr(handle_of(token), name)
    return part.clone()  # a graph may write to it


@_part_op.register_fake
def _(token, name, shape, device):  # type: ignore[no-untyped-def]
    return torch.empty(shape, dtype=torch.int64 if name == "topk_idx" else torch.int32, device=device)


class EPInGraph(InGraph, EPHandle):
    """A handle of ElasticBuffer.dispatch in a compiled graph. A tensor of it that is read there is an operator."""

    def __init__(
        self, token: Tensor, idx: Tensor, copies: bool, experts: int, ranks: int, length: int, rows: int, expand: bool,
        alignment: int, most: int, sms: int,
    ) -> None:  # fmt: skip
        self._token, self._idx, self._device = token, None if copies else idx, idx.device
        self._sent, self._ways, self._ranks, self._local = idx.shape[0], idx.shape[1], ranks, experts // ranks
        self.do_expand, self.num_experts, self.expert_alignment = expand, experts, alignment
        self.num_max_tokens_per_rank, self.num_sms = most, sms
        self.num_recv_tokens = self._length = length
        self.num_expanded_tokens, self.num_recv_tokens_per_expert_list = rows, []

    def _part(self, name: str, *shape: int) -> Any:
        if compiling():
            return torch.ops.switchyard_deep_ep.part(self._token, name, list(shape), self._device)
        return getattr(handle_of(self._token), name)

    @property
    def topk_idx(self) -> Any:  # type: ignore[override]
        return self._part("topk_idx", self._sent, self._ways) if self._idx is None else self._idx

    @property
    def num_unaligned_recv_tokens_per_expert(self) -> Any:  # type: ignore[override]
        return self._part("num_unaligned_recv_tokens_per_expert", self._local)

    @property
    def psum_num_recv_tokens_per_expert(self) -> Any:  # type: ignore[override]
        return self._part("psum_num_recv_tokens_per_expert", self._local)

    @property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Any:  # type: ignore[override]
        return self._part("psum_num_recv_tokens_per_scaleup_rank", self._ranks)

    @property
    def recv_src_metadata(self) -> Any:  # type: ignore[override]
        return self._part("recv_src_metadata", self._length, self._ways + 2)

    @property
    def dst_buffer_slot_idx(self) -> Any:  # type: ignore[override]
        return self._part("dst_buffer_slot_idx", self._sent, self._ways)


@torch.library.custom_op("switchyard_deep_ep::dispatch_elastic", mutates_args=())
def _elastic_op(
    x: Tensor, scales: Optional[Tensor], idx: Optional[Tensor], weights: Optional[Tensor], experts: Optional[int],
    most: Optional[int], alignment: Optional[int], sms: int, copies: bool, expand: bool, columns: bool, token: Optional[Tensor],
    length: int, rows: int, top_k: int, buffer: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    came, indices, beside, made, _ = buffers[buffer].dispatch(
        x if scales is None else (x, scales), idx, weights, None, experts, most, alignment, sms,
        handle=None if token is None else handle_of(token), do_handle_copy=copies, do_cpu_sync=False, do_expand=expand,
        use_tma_aligned_col_major_sf=columns,
    )  # fmt: skip
    came, factors = (came, None) if scales is None else came
    return came, _maybe(factors, x), _maybe(indices, x), _maybe(beside, x), _token_of(made, token)


@_elastic_op.register_fake
def _(  # type: ignore[no-untyped-def]
    x, scales, idx, weights, experts, most, alignment, sms, copies, expand, columns, token, length, rows, top_k, buffer
):
    factors = _maybe(None, x) if scales is None else scales.new_empty((rows, scales.shape[-1]))
    if columns and scales is not None:
        factors = _expand.column_major(factors)
    indices = _maybe(None, x) if expand else x.new_empty((length, top_k), dtype=torch.int64)
    each = (rows,) if expand else (length, top_k)
    beside = _maybe(None, x) if weights is None else x.new_empty(each, dtype=torch.float32)
    return x.new_empty((rows, x.shape[-1])), factors, indices, beside, _some_token()


def dispatch_elastic(
    buffer: Any, x: Any, idx: Any, weights: Any, stats: Any, experts: Any, most: Any, alignment: Any, sms: int, handle: Any,
    copies: bool, cpu_sync: Optional[bool], expand: bool, columns: bool, how: dict[str, Any],
) -> Any:  # fmt: skip
    arguments = x, idx, weights, stats, experts, most, alignment, sms
    named = {
        "handle": handle, "do_handle_copy": copies, "do_cpu_sync": cpu_sync, "do_expand": expand,
        "use_tma_aligned_col_major_sf": columns,
    }  # fmt: skip
    if how:
        return streaming(buffer.dispatch, *arguments, **named, **how)
    if handle is None and (cpu_sync is None or cpu_sync):
        return counting(buffer.dispatch, *arguments, **named)
    known, pair, ranks = isinstance(handle, EPInGraph), isinstance(x, (tuple, list)), buffer.num_ranks
    bound = most or buffer.num_max_tokens_per_rank
    missing = not known if handle is not None else idx is None or experts is None or not bound
    if missing or (pair and len(x) != 2):
        return outside(buffer.dispatch, *arguments, **named)
    tokens, scales = x if pair else (x, None)
    tokens, scales, weights = plain(tokens), plain(scales), plain(weights)
    if known:
        expand, among, top_k, length, token = handle.do_expand, handle.num_experts, handle._ways, handle._length, handle._token
        rows = handle.num_expanded_tokens if expand else length
    else:
        among, top_k, length, token = experts, idx.shape[-1], ranks * bound, None
        rows = _expand.most_rows(length, top_k, among // ranks, alignment or 1)
    checks.stats("dispatch", "cumulative_local_expert_recv_stats", stats, among // ranks, tokens.device)
    came, factors, indices, beside, fresh = torch.ops.switchyard_deep_ep.dispatch_elastic(
        tokens, scales, idx, weights, experts, most, alignment, sms, copies, expand, columns, token, length,
        rows if expand else length, top_k, buffer._name,
    )  # fmt: skip
    if not known:
        handle = EPInGraph(fresh, idx, copies, among, ranks, length, rows, expand, alignment or 1, bound, sms)
    if stats is not None:
        stats.add_(handle.num_unaligned_recv_tokens_per_expert)
    recv = came if scales is None else (came, factors)
    return recv, None if expand else indices, None if weights is None else beside, handle, EventOverlap()
