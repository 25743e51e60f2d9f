"""The low-latency calls as operators for compiled graphs, which make the calls of the buffers when the graph runs. Halves are
made as one: the compiler orders calls by itself."""

from __future__ import annotations

from typing import Any, Optional

import torch
from switchyard._torch.compiler import outside
from switchyard._torch.moe import kinds
from torch import Tensor

from .. import _checks as checks
from .._handles import FewHandle
from .._streams import streaming
from .._tokens import InGraph, buffers, handle_of, plain, token_of
from ..utils.event import EventOverlap


class FewInGraph(InGraph, FewHandle):
    """A handle in a compiled graph."""

    def __init__(self, token: Tensor) -> None:
        self._token = token


@torch.library.custom_op("switchyard_deep_ep::low_latency_dispatch", mutates_args=())
def _dispatch_op(
    x: Tensor, idx: Tensor, most: int, experts: int, ranks: int, use_fp8: bool, round_scale: bool, use_ue8m0: bool, buffer: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # Rows and scales hold the dispatcher's memory: nobody knows when the graph reads them.
    _, counts, handle, _, _ = buffers[buffer].low_latency_dispatch(
        x, idx, most, experts, use_fp8=use_fp8, round_scale=round_scale, use_ue8m0=use_ue8m0
    )
    live = handle.routing.live
    side, output = kinds(live.made.dispatcher), live.got._output
    scales = side.held(output, "scales") if use_fp8 else x.new_empty(0, dtype=torch.float32)
    return side.held(output, "rows"), scales, counts, token_of(handle)


@_dispatch_op.register_fake
def _(x, idx, most, experts, ranks, use_fp8, round_scale, use_ue8m0, buffer):  # type: ignore[no-untyped-def]
    local, room, hidden = experts // ranks, ranks * most, x.shape[-1]
    rows = x.new_empty((local, room, hidden), dtype=torch.float8_e4m3fn if use_fp8 else x.dtype)
    scales, blocks = x.new_empty(0, dtype=torch.float32), -(-hidden // 128)
    if use_ue8m0:
        scales = x.new_empty((local, -(-blocks // 4), room), dtype=torch.int32).transpose(1, 2)
    elif use_fp8:
        scales = x.new_empty((local, blocks, room), dtype=torch.float32).transpose(1, 2)
    counts = x.new_empty(2 + local, dtype=torch.int32)[2:]  # they lie behind two other numbers
    return rows, scales, counts, torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.custom_op("switchyard_deep_ep::low_latency_combine", mutates_args=())
def _combine_op(x: Tensor, idx: Tensor, weights: Tensor, token: Tensor, buffer: str) -> Tensor:
    y: Tensor = buffers[buffer].low_latency_combine(x, idx, weights, handle_of(token))[0]
    return y


@_combine_op.register_fake
def _(x, idx, weights, token, buffer):  # type: ignore[no-untyped-def]
    return x.new_empty((idx.shape[0], x.shape[-1]))


@torch.library.custom_op("switchyard_deep_ep::low_latency_combine_", mutates_args=("out",))
def _combine_into_op(out: Tensor, x: Tensor, idx: Tensor, weights: Tensor, token: Tensor, buffer: str) -> None:
    buffers[buffer].low_latency_combine(x, idx, weights, handle_of(token), out=out)


@_combine_into_op.register_fake
def _(out, x, idx, weights, token, buffer):  # type: ignore[no-untyped-def]
    pass


# The methods of a buffer in a compiled graph.


def _ended() -> None:
    """The hook of a call that was made as one."""


def dispatch(
    buffer: Any, x: Tensor, idx: Tensor, most: int, experts: int, stats: Optional[Tensor], use_fp8: bool, round_scale: bool,
    use_ue8m0: bool, return_recv_hook: bool, rare: dict[str, Any],
) -> Any:  # fmt: skip
    if rare:
        leave = streaming if "async_finish" in rare else outside
        return leave(
            buffer.low_latency_dispatch, x, idx, most, experts, stats, use_fp8=use_fp8, round_scale=round_scale,
            use_ue8m0=use_ue8m0, return_recv_hook=return_recv_hook, **rare,
        )  # fmt: skip
    ranks = buffer.group_size
    checks.stats("low_latency_dispatch", "cumulative_local_expert_recv_stats", stats, experts // ranks, x.device)
    rows, scales, counts, token = torch.ops.switchyard_deep_ep.low_latency_dispatch(
        plain(x), idx, most, experts, ranks, use_fp8, round_scale, use_ue8m0, buffer._name
    )
    if stats is not None:
        stats.add_(counts)
    hook = _ended if return_recv_hook else None
    return (rows, scales) if use_fp8 else rows, counts, FewInGraph(token), EventOverlap(), hook


def combine(
    buffer: Any, x: Tensor, idx: Tensor, weights: Tensor, handle: Any, return_recv_hook: bool, out: Optional[Tensor],
    rare: dict[str, Any],
) -> Any:  # fmt: skip
    if rare or not isinstance(handle, FewInGraph):
        leave, how = streaming if "async_finish" in rare else outside, {"return_recv_hook": return_recv_hook, "out": out}
        return leave(buffer.low_latency_combine, x, idx, weights, handle, **how, **rare)
    sent = plain(x), idx, plain(weights), handle._token, buffer._name
    y = out
    if out is None:
        y = torch.ops.switchyard_deep_ep.low_latency_combine(*sent)
    else:
        torch.ops.switchyard_deep_ep.low_latency_combine_(out, *sent)
    return y, EventOverlap(), _ended if return_recv_hook else None
