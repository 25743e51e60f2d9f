"""The buffer of DeepEP's second generation."""

from __future__ import annotations

from typing import Any, Optional

import torch
from switchyard import errors
from switchyard._core.arguments import Bound
from switchyard._torch.compiler import operates, uncompiled_methods
from torch import Tensor

from .. import _checks as checks
from .._engine import Engines
from .._results import Shape, remember
from .._routings import Routing
from .._streams import Streams, device_of
from .._tokens import compiling, given, named
from ..utils.event import EventHandle, EventOverlap
from ..utils.sizes import ALIGNMENT, align, get_logical_domain_size, get_physical_domain_size
from . import _expand, _in_order
from ._ep_handle import EPHandle
from .legacy import checked


@uncompiled_methods
class ElasticBuffer(Bound):
    """Dispatch and combine for a group of ranks. Memory is taken by calls, as they need it, together with all ranks."""

    def __init__(
        self,
        group: Any,
        num_bytes: Optional[int] = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        if num_cpu_bytes:
            raise NotImplementedError("deep_ep: ElasticBuffer: num_cpu_bytes: Engram is not supported")
        self.group, self.rank_idx, self.num_ranks = group, group.rank(), group.size()
        self.num_max_tokens_per_rank, self.explicitly_destroy = num_max_tokens_per_rank, explicitly_destroy
        self.deterministic, self.allow_hybrid_mode = deterministic, allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        hint = self.get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)
        self.num_bytes = hint if num_bytes is None else num_bytes
        self.num_allocated_qps = num_allocated_qps or 1
        self.num_scaleout_ranks, self.num_scaleup_ranks = get_logical_domain_size(group)
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_rdma_ranks, self.num_nvlink_ranks = get_physical_domain_size(group)
        #: By which compiled graphs know it.
        self._name = named(self)
        self._streams = Streams()
        self._engines = Engines(group)
        self._destroyed = False
        #: The results of checks, by the sizes and types of a call's tensors.
        self._shapes: dict[Any, Shape] = {}

    # Sizes and ranks

    @property
    def runtime(self) -> Optional[ElasticBuffer]:
        """This object until destroy, None after it."""
        return None if self._destroyed else self

    def destroy(self) -> None:
        """Have later calls of this buffer raise. The memory that the group's calls have taken is given back together with all
        ranks, with the last buffer of the group that is destroyed. Results and handles stay as they are."""
        if not self._destroyed:
            self._destroyed = True
            self._engines.end()

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """A number of bytes that grows with rows and ranks. Memory is taken by calls, as they need it."""
        return align(max(2 * group.size() * num_max_tokens_per_rank * hidden * 2, 1), ALIGNMENT)

    def get_logical_domain_size(self) -> tuple[int, int]:
        return get_logical_domain_size(self.group)

    def get_physical_domain_size(self) -> tuple[int, int]:
        return get_physical_domain_size(self.group)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """0: calls take the multiprocessors that they need."""
        return 0

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        return self.num_allocated_qps

    @staticmethod
    def capture() -> EventHandle:
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """The stream of asynchronous calls."""
        return self._streams.side()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Wait on the host until all ranks are here, and have run what they had enqueued."""
        import switchyard

        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        switchyard.barrier(self.group)

    # Calls

    @operates
    def dispatch(
        self,
        x: Any,
        topk_idx: Optional[Tensor] = None,
        topk_weights: Optional[Tensor] = None,
        cumulative_local_expert_recv_stats: Optional[Tensor] = None,
        num_experts: Optional[int] = None,
        num_max_tokens_per_rank: Optional[int] = None,
        expert_alignment: Optional[int] = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: Optional[EPHandle] = None,
        do_handle_copy: bool = True,
        do_cpu_sync: Optional[bool] = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, Optional[Tensor], Optional[Tensor], EPHandle, EventOverlap]:
        """Send tokens to the ranks of their experts: rows, local experts (None with do_expand), weights, a handle and an event.
        With a handle the rows go the ways of an earlier dispatch."""
        if compiling():
            from . import _ops

            how = given(previous_event=previous_event, async_with_compute_stream=async_with_compute_stream)
            return _ops.dispatch_elastic(  # type: ignore[no-any-return]
                self, x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, num_experts, num_max_tokens_per_rank,
                expert_alignment, num_sms, handle, do_handle_copy, do_cpu_sync, do_expand, use_tma_aligned_col_major_sf, how,
            )  # fmt: skip
        most, among, rows_of = num_max_tokens_per_rank or self.num_max_tokens_per_rank, num_experts, expert_alignment
        key = shape = sent = None
        idx: Any = topk_idx
        weights = topk_weights
        bare = idx is num_experts is num_max_tokens_per_rank is expert_alignment is None and not (do_cpu_sync or do_expand)
        if bare and type(handle) is EPHandle and self._engines.has(handle._routing.engine):
            idx, among = handle._routing.idx, handle.num_experts
            most, rows_of = handle.num_max_tokens_per_rank, handle.expert_alignment
        if idx is not None and (handle is None or idx is not topk_idx):
            usual, stats = checks.known(x, idx, weights), cumulative_local_expert_recv_stats
            told = () if stats is None else checks.stats_known(stats)
            if usual is not None and told is not None:
                tokens, scales, sizes = usual
                key = sizes, among, most, rows_of, num_sms, told
                shape = self._shapes.get(key)
        if shape is None or (most and tokens.shape[0] > most):
            sent, idx, weights = self._checked(
                x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, num_experts, num_max_tokens_per_rank,
                expert_alignment, num_sms, handle, do_cpu_sync, do_expand,
            )  # fmt: skip
            if handle is not None:
                most, among = handle.num_max_tokens_per_rank, handle.num_experts
            tokens, scales, hidden = sent.x, sent.scales, sent.x.shape[1]
            shape = Shape(int(among or 0), idx.shape[1], hidden, tokens.dtype, most, 0, False, "", sent.kind, num_sms)
            if sent.as_given(x):
                remember(self._shapes, key, shape)
        engine = self._engines.own.get(tokens.device) or self._engines.of(tokens.device)
        alignment = expert_alignment or 1
        if handle is not None:
            length = handle._length
        elif do_cpu_sync is None or do_cpu_sync:
            length = 0
        elif most:
            length = self.num_ranks * most
        else:
            raise errors.InvalidArgument("deep_ep: dispatch: num_max_tokens_per_rank is needed without do_cpu_sync")

        wide, made, event = idx.dtype is torch.int64, None, None
        theirs, at_once = do_handle_copy and wide, previous_event is None and not async_with_compute_stream
        if handle is None and wide and at_once:
            made = engine.dispatch(shape, tokens, scales, idx, weights, length, theirs)

        def send() -> tuple[Any, ...]:
            kept = handle
            if kept is None:
                ways = idx if wide else idx.to(torch.int64)
                result, routing = made or engine.dispatch(shape, tokens, scales, ways, weights, length, theirs)
                bound = routing.shape.tokens
                kept = EPHandle(routing, result, None if do_handle_copy else topk_idx, do_expand, alignment, bound, num_sms)
            else:
                result = engine.redispatch(tokens, scales, weights, kept._routing, shape, length)
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(result.came.counts)
            rows, factors, indices, beside = result.rows, result.scales, result.indices, result.weights
            if kept.do_expand:
                rows, factors, beside = kept.expanded(result)
            if factors is not None and use_tma_aligned_col_major_sf:
                factors = _expand.column_major(factors)
            return rows, factors, indices, beside, kept

        if at_once:
            rows, factors, indices, beside, kept = send()
        else:
            inputs = (tokens, scales, idx, weights)
            came, event = self._streams.run(engine.device, previous_event, async_with_compute_stream, inputs, send)
            rows, factors, indices, beside, kept = came
        if sent is not None:
            recv = sent.returned(rows, factors)
        else:
            recv = rows if scales is None else (rows, factors)
        return recv, None if kept.do_expand else indices, beside, kept, EventOverlap(event)

    def _checked(
        self, x: Any, topk_idx: Any, topk_weights: Any, stats: Any, experts: Any, most: Any, alignment: Any, sms: Any,
        handle: Any, do_cpu_sync: Any, do_expand: bool,
    ) -> tuple[checks.Tokens, Tensor, Optional[Tensor]]:  # fmt: skip
        """The tokens of a dispatch, their choices and weights, once all of it was looked at."""
        sent = checks.tokens("dispatch", x)
        device = device_of("dispatch: x", sent.x)
        self._engines.of(device)  # which says that the buffer was destroyed
        if handle is not None:
            topk_idx = self._routing("dispatch", handle, topk_idx, do_cpu_sync, do_expand).idx
            most = self._same("num_max_tokens_per_rank", most, handle)
            self._same("expert_alignment", alignment, handle)
            experts = self._same("num_experts", experts, handle)
        elif topk_idx is None or experts is None:
            raise errors.InvalidArgument("deep_ep: dispatch: topk_idx and num_experts are needed where there is no handle")
        checks.experts("dispatch", experts, self.num_ranks)
        if alignment is not None:
            checks.alignment("dispatch", "expert_alignment", alignment)
        checks.num_sms("dispatch", sms)
        most = most or self.num_max_tokens_per_rank
        if most:
            checks.at_most("dispatch", sent.x, most, "num_max_tokens_per_rank")
        checks.stats("dispatch", "cumulative_local_expert_recv_stats", stats, experts // self.num_ranks, device)
        return sent, *checks.choices("dispatch", topk_idx, topk_weights, sent.x.shape[0], device)

    @operates
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Optional[Tensor] = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Optional[Tensor], EventOverlap]:
        """Bring rows back: the sums of each token's rows, the weight of each choice, and an event."""
        if compiling():
            from . import _ops

            how = given(previous_event=previous_event, async_with_compute_stream=async_with_compute_stream)
            return _ops.combine(self, x, handle, topk_weights, bias, _ops.EPInGraph, how)  # type: ignore[no-any-return]
        x = checks.rows("combine", x)
        engine = self._engines.of(device_of("combine: x", x))
        if not isinstance(handle, EPHandle):
            raise errors.InvalidType(f"deep_ep: combine: handle is {type(handle).__name__}, want an EPHandle")
        routing = checked("combine", handle._routing, engine)
        biases = () if bias is None else checks.biases("combine", bias, x, routing.tokens)
        want = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        if x.shape[0] != want:
            raise errors.InvalidArgument(f"deep_ep: combine: x has {x.shape[0]} rows, the dispatch brought {want}")
        if topk_weights is not None:
            shape = (want,) if handle.do_expand else (want, routing.shape.top_k)
            if topk_weights.shape != shape or topk_weights.dtype is not torch.float32:
                about = f"{tuple(topk_weights.shape)} of {topk_weights.dtype}"
                raise errors.InvalidArgument(f"deep_ep: combine: topk_weights is {about}, want {shape} of torch.float32")
            topk_weights = topk_weights.contiguous()

        def back() -> tuple[Tensor, Optional[Tensor]]:
            rows, weights = x, topk_weights
            once = handle.do_expand and not self.allow_multiple_reduction
            if once:  # any rows, as many as tokens came: only the sums of their weights are wanted
                rows = x[: handle.num_recv_tokens]
                if weights is not None:
                    _, weights = _expand.fold(x, weights, handle.slots, routing, summed=False)
            elif handle.do_expand:
                rows, weights = _expand.fold(x, weights, handle.slots, routing)
            if once:
                y = _in_order.by_choice(x, routing, handle.slots, biases)
            elif self.num_ranks > 1 and (biases or not (self.allow_multiple_reduction or self._engines.hosts == 1)):
                y = _in_order.by_rank(rows, routing, handle._indices, biases)
            else:
                made = engine.combine(rows, routing, weights, biases)
                return (made, None) if weights is None else made
            return y, None if weights is None else engine.combine(rows, routing, weights)[1]

        if previous_event is None and not async_with_compute_stream:
            return *back(), EventOverlap()
        inputs = (x, topk_weights, biases)
        (y, sums), event = self._streams.run(engine.device, previous_event, async_with_compute_stream, inputs, back)
        return y, sums, EventOverlap(event)

    def _routing(
        self, call: str, handle: Any, topk_idx: Optional[Tensor], do_cpu_sync: Optional[bool], do_expand: bool
    ) -> Routing:
        """The routing of a handle that is dispatched by once more."""
        if not isinstance(handle, EPHandle):
            raise errors.InvalidType(f"deep_ep: {call}: handle is {type(handle).__name__}, want an EPHandle")
        if topk_idx is not None or do_cpu_sync:
            raise errors.InvalidArgument(f"deep_ep: {call}: topk_idx and do_cpu_sync do not go with a handle")
        if do_expand and not handle.do_expand:
            raise errors.InvalidArgument(f"deep_ep: {call}: do_expand with a handle of a dispatch without it")
        routing: Routing = handle._routing
        return checked(call, routing, self._engines.of(routing.engine.device))

    @staticmethod
    def _same(name: str, given: Optional[int], handle: EPHandle) -> int:
        """A value of a handle, which an argument may say again."""
        value: int = getattr(handle, name)
        if given not in (None, value):
            raise errors.InvalidArgument(f"deep_ep: dispatch: {name} is {given}, that of the handle {value}")
        return value


def _refused(name: str, what: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"deep_ep: {name}: {what} is not supported")

    return refuse


for _name, _what in {
    "get_engram_storage_size_hint": "Engram",
    "engram_write": "Engram",
    "engram_fetch": "Engram",
    "get_pp_buffer_size_hint": "sending between pipeline stages",
    "pp_set_config": "sending between pipeline stages",
    "pp_send": "sending between pipeline stages",
    "pp_recv": "sending between pipeline stages",
    "get_agrs_num_max_session_bytes": "gathering and scattering",
    "get_agrs_buffer_size_hint": "gathering and scattering",
    "create_agrs_session": "gathering and scattering",
    "destroy_agrs_session": "gathering and scattering",
    "agrs_set_config": "gathering and scattering",
    "agrs_new_session": "gathering and scattering",
    "agrs_get_inplace_tensor": "gathering and scattering",
    "all_gather": "gathering and scattering",
}.items():
    setattr(ElasticBuffer, _name, staticmethod(_refused(f"ElasticBuffer.{_name}", _what)))
