"""The low-latency calls of the first generation: rows by expert, in room for all tokens of all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Optional

import torch
from switchyard import errors
from switchyard._core.arguments import Bound
from switchyard._torch.compiler import operates, uncompiled, uncompiled_methods
from torch import Tensor

from .. import _checks as checks
from .._engine import Engine, Engines
from .._handles import FewHandle
from .._results import Shape, remember
from .._routings import LentRouting
from .._streams import Streams, device_of
from .._tokens import compiling, given
from ..utils.event import EventOverlap
from ..utils.sizes import ALIGNMENT, align

Hook = Optional[Callable[[], Any]]


@uncompiled_methods
class FewTokens(Bound):
    """Dispatch and combine of few tokens. Two results can be held at a time: later ones take their memory."""

    group: Any
    group_size: int
    #: By which compiled graphs know it.
    _name: str
    _streams: Streams
    _engines: Engines
    _combine_buffers: dict[Any, Tensor]

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """The bytes of two results and two combines. Memory is taken by calls, as they need it."""
        return align(4 * num_experts * num_max_dispatch_tokens_per_rank * hidden * 2, ALIGNMENT)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing is to be cleaned."""

    @operates
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Optional[Tensor] = None,
        dispatch_wait_recv_cost_stats: Optional[Tensor] = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        use_nvfp4: bool = False,
        x_global_scale: Optional[Tensor] = None,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: Optional[Tensor] = None,
        use_ue8m0_for_sf: bool = False,
    ) -> tuple[Any, Tensor, FewHandle, EventOverlap, Hook]:
        """Send tokens to their experts: rows [local experts, ranks * most tokens, hidden], with scales for float8, their
        numbers, a handle, an event and a hook that ends the call."""
        if compiling():
            from . import _few_ops

            unusual = given(
                dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats, use_nvfp4=use_nvfp4,
                x_global_scale=x_global_scale, async_finish=async_finish, topk_weights=topk_weights,
                use_ue8m0_for_sf=use_ue8m0_for_sf,
            )  # fmt: skip
            return _few_ops.dispatch(  # type: ignore[no-any-return]
                self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, cumulative_local_expert_recv_stats, use_fp8,
                round_scale, use_ue8m0, return_recv_hook, unusual,
            )  # fmt: skip
        stats, most = cumulative_local_expert_recv_stats, num_max_dispatch_tokens_per_rank
        told = () if stats is None else checks.stats_known(stats)
        rare = use_nvfp4 or use_ue8m0_for_sf or x_global_scale is not None or topk_weights is not None
        key = usual = event = None
        rare = rare or told is None or dispatch_wait_recv_cost_stats is not None
        if not rare and type(x) is Tensor and not x.requires_grad:
            key = most, num_experts, use_fp8, round_scale, use_ue8m0, told
            usual = None if async_finish else self._engines.few.get(key)
        sent = None if usual is None else usual[0].send_few(usual[1], x, topk_idx, return_recv_hook)
        if sent is None:
            call = "low_latency_dispatch"
            if use_nvfp4 or x_global_scale is not None or use_ue8m0_for_sf:
                raise NotImplementedError(f"deep_ep: {call}: use_nvfp4 is not supported")
            if topk_weights is not None:
                raise NotImplementedError(f"deep_ep: {call}: topk_weights: weights go with low_latency_combine")
            if dispatch_wait_recv_cost_stats is not None:
                raise NotImplementedError(f"deep_ep: {call}: dispatch_wait_recv_cost_stats is not supported")
            if use_ue8m0 and not (use_fp8 and round_scale):
                raise AssertionError(f"deep_ep: {call}: use_ue8m0 needs use_fp8 and round_scale")
            _one_way(call, async_finish, return_recv_hook)
            quantize = "" if not use_fp8 else "ue8m0" if use_ue8m0 else "power_of_two" if round_scale else "float32"
            engine, shape, rows, idx = self._checked_few(x, topk_idx, most, num_experts, stats, quantize)
            remember(self._engines.few, key, (engine, shape))
            send = partial(engine.send_few, shape, rows, topk_idx, return_recv_hook, idx)
            if async_finish:
                sent, event = self._streams.run(engine.device, None, True, (x, topk_idx, stats), partial(_added, send, stats))
            else:
                sent = send()
        got, routing, counts = sent  # type: ignore[misc]
        hook: Hook = None
        if return_recv_hook:
            hook = partial(_receive_rows, got, counts, stats)
        elif stats is not None and event is None:
            stats.add_(counts)
        rows, scales = got._side.lent(got._output)
        ended = EventOverlap() if event is None else EventOverlap(event, (x, topk_idx))
        return (rows, scales) if use_fp8 else rows, counts, FewHandle(routing, counts), ended, hook

    def _checked_few(
        self, x: Any, topk_idx: Any, most: int, num_experts: int, stats: Any, quantize: str
    ) -> tuple[Engine, Shape, Tensor, Tensor]:
        """Refuse arguments of a dispatch that are wrong. The engine, the shape of the call, and its tokens and their choices as
        they are sent."""
        call = "low_latency_dispatch"
        x = checks.rows(call, x)
        checks.at_most(call, x, most, "num_max_dispatch_tokens_per_rank")
        experts = checks.experts(call, num_experts, self.group_size)
        idx, _ = checks.choices(call, topk_idx, None, x.shape[0], x.device)
        device = device_of(f"{call}: x", x)
        checks.stats(call, "cumulative_local_expert_recv_stats", stats, experts // self.group_size, x.device)
        shape = Shape(experts, idx.shape[1], x.shape[1], x.dtype, most, 0, True, quantize)
        return self._engines.of(device), shape, x, idx

    @operates
    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: FewHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Optional[Tensor] = None,
        combine_wait_recv_cost_stats: Optional[Tensor] = None,
        **signals: Any,
    ) -> tuple[Tensor, EventOverlap, Hook]:
        """Bring rows back: the sums of each token's rows times its weights, an event and a hook that ends the call."""
        if compiling():
            from . import _few_ops

            unusual = given(
                zero_copy=zero_copy, async_finish=async_finish, combine_wait_recv_cost_stats=combine_wait_recv_cost_stats
            )
            return _few_ops.combine(  # type: ignore[no-any-return]
                self, x, topk_idx, topk_weights, handle, return_recv_hook, out, {**unusual, **signals}
            )
        call = "low_latency_combine"
        if signals:
            raise NotImplementedError(f"deep_ep: {call}: {', '.join(sorted(signals))}: overlap signals are not supported")
        if combine_wait_recv_cost_stats is not None:
            raise NotImplementedError(f"deep_ep: {call}: combine_wait_recv_cost_stats is not supported")
        if async_finish:
            _one_way(call, async_finish, return_recv_hook)
        if not isinstance(handle, FewHandle):
            raise errors.InvalidType(f"deep_ep: {call}: handle is {type(handle).__name__}, want low_latency_dispatch's")
        routing, size = handle.routing, self.group_size
        engine, shape = routing.engine, routing.shape
        if zero_copy:
            x = self.get_next_low_latency_combine_buffer(handle)
        made = None
        if not async_finish and topk_idx is routing.theirs and self._engines.own.get(engine.device) is engine:
            want = (shape.experts // size, size * shape.tokens, shape.hidden)
            if type(x) is Tensor and type(topk_weights) is Tensor and x.shape == want:
                made = engine.combine_few(x, routing, topk_weights, return_recv_hook, out, False)
        if made is not None:
            if return_recv_hook:
                return made._result, EventOverlap(), partial(_receive, engine, made, made._result)
            return made, EventOverlap(), None
        engine, rows, weights, into = self._checked_back(x, topk_idx, topk_weights, routing, out)
        if return_recv_hook:
            result = rows.new_empty(routing.tokens, rows.shape[-1]) if out is None else out
            if out is None:
                into = result
            combining = engine.combine_few(rows, routing, weights, True, into, True)
            return result, EventOverlap(), partial(_receive, engine, combining, result)

        def whole() -> Tensor:
            made: Tensor = engine.combine_few(rows, routing, weights, False, into, True)
            return made if out is None or made is out else out.copy_(made)

        if not async_finish:
            return whole(), EventOverlap(), None
        inputs = (rows, topk_idx, weights, out)
        result, event = self._streams.run(engine.device, None, True, inputs, whole)
        return result, EventOverlap(event, inputs), None

    def _checked_back(
        self, x: Any, topk_idx: Any, topk_weights: Any, routing: LentRouting, out: Any
    ) -> tuple[Engine, Tensor, Tensor, Optional[Tensor]]:
        """Refuse arguments of a combine that are wrong. The engine, the rows and weights as they are sent, and out if a combine
        can write there."""
        call, shape, tokens = "low_latency_combine", routing.shape, routing.tokens
        engine = self._engines.of(device_of(f"{call}: x", x))
        if routing.engine is not engine:
            raise errors.InvalidArgument(f"deep_ep: {call}: the handle is of another group or device")
        want = (shape.experts // self.group_size, self.group_size * shape.tokens, shape.hidden)
        if x.shape != want:
            raise errors.InvalidArgument(f"deep_ep: {call}: x has shape {tuple(x.shape)}, want {want}")
        rows = checks.rows(call, x, 3)
        idx, weights = checks.choices(call, topk_idx, topk_weights, tokens, rows.device)
        if weights is None or idx.shape != routing.idx.shape:
            ways = tuple(routing.idx.shape)
            raise errors.InvalidArgument(f"deep_ep: {call}: topk_idx has shape {tuple(idx.shape)}, want {ways}")
        if topk_idx is not routing.theirs or routing.changed():
            weights = weights.masked_fill(idx < 0, 0)
        into = None  # sums are written where they belong, unless a combine cannot write there
        if out is not None:
            if out.shape != (tokens, shape.hidden) or out.dtype is not rows.dtype or out.device != rows.device:
                about = f"{tuple(out.shape)} of {out.dtype}, want {(tokens, shape.hidden)} of {rows.dtype}"
                raise errors.InvalidArgument(f"deep_ep: {call}: out is {about}")
            if out.is_contiguous() and out.data_ptr() % 16 == 0:
                into = out
        return engine, rows, weights, into

    def get_next_low_latency_combine_buffer(self, handle: FewHandle) -> Tensor:
        """A tensor that low_latency_combine with zero_copy takes its rows from."""
        shape, device = handle.routing.shape, handle.routing.engine.device
        key = (shape.experts, shape.tokens, shape.hidden, device)
        if key not in self._combine_buffers:
            size = (shape.experts // self.group_size, self.group_size * shape.tokens, shape.hidden)
            self._combine_buffers[key] = torch.empty(size, dtype=torch.bfloat16, device=device)
        return self._combine_buffers[key]

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        raise NotImplementedError("deep_ep: low_latency_update_mask_buffer: enable_shrink is not supported")

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        raise NotImplementedError("deep_ep: low_latency_query_mask_buffer: enable_shrink is not supported")

    def low_latency_clean_mask_buffer(self) -> None:
        raise NotImplementedError("deep_ep: low_latency_clean_mask_buffer: enable_shrink is not supported")


def _added(send: Callable[[], Any], stats: Optional[Tensor]) -> Any:
    """A dispatch, whose counts are added to stats."""
    sent = send()
    if stats is not None:
        stats.add_(sent[2])
    return sent


@uncompiled
def _receive_rows(got: Any, counts: Tensor, stats: Optional[Tensor]) -> None:
    """End a dispatch, which writes the counts."""
    got.wait()
    if stats is not None:
        stats.add_(counts)


@uncompiled
def _receive(engine: Any, combining: Any, into: Tensor) -> None:
    """End a combine."""
    y = engine.ended(combining)
    if y is not into:
        into.copy_(y)


def _one_way(call: str, async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise AssertionError(f"deep_ep: {call}: async_finish and return_recv_hook exclude each other")
