"""The buffer of DeepEP's first generation: normal mode here, few tokens in _low_latency."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Optional

import torch
from switchyard import errors
from switchyard._torch.compiler import operates, uncompiled_methods
from switchyard._torch.cuda import capturing
from torch import Tensor

from .. import _checks as checks
from .._engine import Engine, Engines
from .._handles import Handle
from .._results import Shape, remember
from .._routings import Routing, choices_of, ranks_of
from .._streams import Streams, check, device_of
from .._tokens import compiling, given, named
from ..utils.event import EventHandle, EventOverlap
from ..utils.sizes import ALIGNMENT, align, aligned
from ._low_latency import FewTokens


class Config(NamedTuple):
    """How kernels of DeepEP are tuned. num_sms bounds the multiprocessors of a call; the other numbers say nothing here."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """A number of bytes that grows with rows and ranks. Memory is taken by calls, as they need it."""
        return align(self.num_max_nvl_chunked_recv_tokens * hidden_bytes * num_ranks, ALIGNMENT)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: memory is taken by calls, as they need it."""
        return 0


@uncompiled_methods
class Buffer(FewTokens):
    """Dispatch and combine for a group of ranks. Memory is taken by calls, as they need it, together with all ranks."""

    num_sms: int = 20
    _bounded = False

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        *,
        allow_nvlink_for_normal_mode: bool = True,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        if comm is not None or group is None:
            raise NotImplementedError("deep_ep: Buffer: comm: groups of MPI are not supported, pass group=")
        if enable_shrink:
            raise NotImplementedError("deep_ep: Buffer: enable_shrink is not supported")
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy, self.enable_shrink = low_latency_mode, explicitly_destroy, False
        self._name = named(self)
        self._streams = Streams()
        self._engines = Engines(group)
        self._destroyed = False
        #: The results of checks, by the sizes and types of a call's tensors.
        self._shapes: dict[Any, Shape] = {}
        self._seen: Optional[checks.Seen] = None
        self._combine_buffers: dict[Any, Tensor] = {}

    # Sizes and ranks

    @property
    def runtime(self) -> Optional[Buffer]:
        """This object until destroy, None after it."""
        return None if self._destroyed else self

    def is_available(self) -> bool:
        return not self._destroyed

    def get_num_rdma_ranks(self) -> int:
        return 1

    def destroy(self) -> None:
        """Have later calls of this buffer raise. The memory that the group's calls have taken is given back together with all
        ranks, with the last buffer of the group that is destroyed. Results and handles stay as they are."""
        if not self._destroyed:
            self._destroyed = True
            self._engines.end()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether float8 can be sent."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Bound the multiprocessors that a dispatch takes, for calls without a config. On the host it says nothing."""
        if checks.num_sms("set_num_sms", new_num_sms) % 2:
            raise AssertionError(f"deep_ep: set_num_sms: {new_num_sms} is odd")
        Buffer.num_sms, Buffer._bounded = new_num_sms, True

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> Any:
        """The stream of asynchronous calls."""
        return self._streams.side()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    def get_local_buffer_tensor(self, *_: Any, **__: Any) -> Tensor:
        raise NotImplementedError("deep_ep: get_local_buffer_tensor: there is no raw buffer")

    def dispatch_pcie(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("deep_ep: dispatch_pcie: dispatch serves hosts with PCIe")

    def combine_pcie(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("deep_ep: combine_pcie: combine serves hosts with PCIe")

    def internode_dispatch(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("deep_ep: internode_dispatch: dispatch serves ranks of any hosts")

    def internode_combine(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("deep_ep: internode_combine: combine serves ranks of any hosts")

    # Calls

    @operates
    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Optional[Tensor], Tensor, Tensor, EventOverlap]:
        """Count the choices of this rank's tokens: tokens to each rank, None, tokens to each expert, and which token goes to
        which rank. An index that is no expert is refused; with async_finish on a GPU, and in a capture, it counts for nobody,
        and dispatch refuses it."""
        if compiling():
            from . import _ops

            how = given(
                previous_event=previous_event, async_finish=async_finish, allocate_on_comm_stream=allocate_on_comm_stream
            )
            return _ops.layout(self, topk_idx, num_experts, how)  # type: ignore[no-any-return]
        call = "get_dispatch_layout"
        check(call, previous_event, async_finish, allocate_on_comm_stream)
        checks.experts(call, num_experts, self.group_size)
        device = device_of(f"{call}: topk_idx", topk_idx)
        idx = checks.indices(call, topk_idx)

        def count() -> tuple[Tensor, Tensor, Tensor]:
            wide = checks.in_range(call, idx, num_experts, waits=not async_finish)
            inside, _ = ranks_of(wide, num_experts, self.group_size)
            flat = torch.where(wide < 0, num_experts, wide).flatten()
            chosen = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
            chosen.scatter_add_(0, flat, torch.ones(flat.shape, dtype=torch.int32, device=device))
            return inside.sum(0, dtype=torch.int32), chosen[:num_experts], inside

        made, event = self._streams.run(device, previous_event, async_finish, (idx,), count)
        self._seen = None
        if not topk_idx.is_inference() and not (idx.is_cuda and (async_finish or capturing())):  # else nobody knows
            self._seen = checks.Seen(weakref.ref(topk_idx), topk_idx._version, num_experts)
        return made[0], None, made[1], made[2], EventOverlap(event)

    @operates
    def dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_rank: Optional[Tensor] = None,
        num_tokens_per_rdma_rank: Optional[Tensor] = None,
        is_token_in_rank: Optional[Tensor] = None,
        num_tokens_per_expert: Optional[Tensor] = None,
        topk_idx: Optional[Tensor] = None,
        topk_weights: Optional[Tensor] = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Optional[Config] = None,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        """Send tokens to the ranks of their experts: rows, local experts, weights, rows of each local expert, a handle and an
        event. With a handle the rows go the ways of an earlier dispatch."""
        if compiling():
            from . import _ops

            how = given(
                previous_event=previous_event, async_finish=async_finish, allocate_on_comm_stream=allocate_on_comm_stream
            )
            return _ops.dispatch(  # type: ignore[no-any-return]
                self, x, handle, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights, expert_alignment,
                num_worst_tokens, config, how,
            )  # fmt: skip
        if allocate_on_comm_stream:
            check("dispatch", previous_event, async_finish, allocate_on_comm_stream)
        sms = config.num_sms if config is not None else Buffer.num_sms if Buffer._bounded else 0
        if handle is not None:
            return self._again(x, handle, topk_idx, topk_weights, sms, previous_event, async_finish)
        key = shape = sent = None
        idx: Any = topk_idx
        if num_tokens_per_expert is not None and topk_idx is not None:
            usual = checks.known(x, topk_idx, topk_weights)
            if usual is not None:
                tokens, scales, sizes = usual
                key = sizes, num_tokens_per_expert.shape, expert_alignment, num_worst_tokens, sms
                shape, weights = self._shapes.get(key), topk_weights
        if shape is None or (num_worst_tokens and tokens.shape[0] > num_worst_tokens):
            sent, shape, idx, weights = self._checked(
                x, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights, expert_alignment, num_worst_tokens, sms
            )
            if sent.as_given(x):
                remember(self._shapes, key, shape)
            tokens, scales = sent.x, sent.scales
        engine = self._engines.own.get(tokens.device) or self._engines.of(tokens.device)
        theirs, totals, event = topk_idx is not None and idx.dtype is torch.int64, None, None
        if theirs and previous_event is None and not async_finish:
            seen: Any = self._seen
            last = None if seen is None else seen.idx()  # no tensor of inference mode, which has no version
            known = last is not None and last is idx and seen.version == last._version and seen.experts == shape.experts
            result, routing = engine.dispatch(shape, tokens, scales, idx, weights, num_worst_tokens, True, known)
        else:
            by_rank = num_tokens_per_expert if topk_idx is None else None
            call = shape, tokens, scales, idx, weights, num_worst_tokens
            (result, routing, totals), event = self._sent(engine, call, by_rank, previous_event, async_finish)
        chosen: list[int] = [] if num_worst_tokens else result.chosen if totals is None else totals
        if expert_alignment != 1:
            chosen = aligned(chosen, expert_alignment)
        handle = Handle(routing, result, num_worst_tokens)
        indices = result.indices if topk_idx is not None else None
        if sent is not None:
            rows = sent.returned(result.rows, result.scales)
        else:
            rows = result.rows if scales is None else (result.rows, result.scales)
        return rows, indices, result.weights, chosen, handle, EventOverlap(event)

    def _sent(
        self, engine: Engine, call: tuple[Any, ...], by_rank: Optional[Tensor], previous: Any, is_async: bool
    ) -> tuple[Any, Any]:
        """A dispatch by choices, or by the ranks of tokens, on the stream that it is for, and its event. By ranks the rows of
        each expert come from the counts of tokens for experts that all ranks were given."""
        shape, tokens, scales, idx, weights, worst = call
        theirs = by_rank is None and idx.dtype is torch.int64

        def send() -> tuple[Any, ...]:
            ways = idx if theirs else idx.to(torch.int64) if by_rank is None else choices_of(idx.to(torch.bool))
            made = engine.dispatch(shape, tokens, scales, ways, weights, worst, theirs)
            return *made, None if by_rank is None or worst else engine.totals(by_rank)

        return self._streams.run(engine.device, previous, is_async, (tokens, scales, idx, weights), send)

    def _checked(
        self, x: Any, is_token_in_rank: Any, num_tokens_per_expert: Any, topk_idx: Any, topk_weights: Any,
        expert_alignment: int, worst: int, sms: int,
    ) -> tuple[checks.Tokens, Shape, Tensor, Optional[Tensor]]:  # fmt: skip
        """The tokens of a dispatch, the shape of the call, and what says where they go, once all of it was looked at."""
        sent = checks.tokens("dispatch", x)
        device, size = device_of("dispatch: x", sent.x), self.group_size
        checks.num_sms("dispatch: config", sms)
        self._engines.of(device)  # which says that the buffer was destroyed
        checks.alignment("dispatch", "expert_alignment", expert_alignment)
        if topk_idx is None and is_token_in_rank is None:
            raise errors.InvalidArgument("deep_ep: dispatch: neither topk_idx nor is_token_in_rank nor a handle is there")
        if num_tokens_per_expert is None:
            raise errors.InvalidArgument("deep_ep: dispatch: num_tokens_per_expert is missing")
        experts = checks.experts("dispatch", num_tokens_per_expert.shape[0], size)
        weights: Optional[Tensor] = None
        if topk_idx is not None:
            idx, weights = checks.choices("dispatch", topk_idx, topk_weights, sent.x.shape[0], sent.x.device)
            among, top_k = experts, idx.shape[1]
        else:
            idx = checks.matrix("dispatch", "is_token_in_rank", is_token_in_rank, sent.x.shape[0], size, device)
            among, top_k = size, size
        if worst:
            checks.at_most("dispatch", sent.x, worst, "num_worst_tokens")
        rows = sent.x
        return sent, Shape(among, top_k, rows.shape[1], rows.dtype, worst, worst, False, "", sent.kind, sms), idx, weights

    def _again(
        self, x: Any, handle: Any, topk_idx: Any, topk_weights: Any, sms: int, previous: Any, is_async: bool
    ) -> tuple[Any, ...]:  # fmt: skip
        """Send other tokens the ways of a handle."""
        key = shape = sent = None
        if type(handle) is Handle and topk_idx is None and topk_weights is None:
            usual = checks.known(x, None, None)
            if usual is not None:
                tokens, scales, sizes = usual
                routing = handle.routing
                key = sizes, routing.sized(), sms
                shape = self._shapes.get(key)
        if shape is None or tokens.shape[0] != routing.tokens or self._engines.own.get(tokens.device) is not routing.engine:
            sent = checks.tokens("dispatch", x)
            tokens, scales = sent.x, sent.scales
            device_of("dispatch: x", tokens)
            checks.num_sms("dispatch: config", sms)
            if topk_idx is not None or topk_weights is not None:
                raise errors.InvalidArgument("deep_ep: dispatch: topk_idx and topk_weights do not go with a handle")
            routing = self._routing("dispatch", handle, self._engines.of(tokens.device))
            n, want = tokens.shape[0], routing.tokens
            if n != want:
                raise errors.InvalidArgument(f"deep_ep: dispatch: x has {n} tokens, those of the handle are {want}")
            shape = routing.sized()._replace(hidden=tokens.shape[1], dtype=tokens.dtype, scales=sent.kind, max_sms=sms)
            if sent.as_given(x):
                remember(self._shapes, key, shape)
        engine, event = routing.engine, None
        if previous is None and not is_async:
            result = engine.redispatch(tokens, scales, None, routing, shape, handle.length)
        else:
            inputs = (tokens, scales)
            result, event = self._streams.run(
                engine.device, previous, is_async, inputs,
                lambda: engine.redispatch(tokens, scales, None, routing, shape, handle.length),
            )  # fmt: skip
        if sent is not None:
            rows = sent.returned(result.rows, result.scales)
        else:
            rows = result.rows if scales is None else (result.rows, result.scales)
        return rows, None, None, None, None, EventOverlap(event)

    @operates
    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Optional[Tensor] = None,
        bias: Any = None,
        config: Optional[Config] = None,
        previous_event: Optional[EventOverlap] = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Optional[Tensor], EventOverlap]:
        """Bring rows back: the sums of each token's rows, those of its weights, and an event."""
        if compiling():
            from . import _ops

            how = given(
                previous_event=previous_event, async_finish=async_finish, allocate_on_comm_stream=allocate_on_comm_stream
            )
            return _ops.combine(self, x, handle, topk_weights, bias, _ops.NormalInGraph, how)  # type: ignore[no-any-return]
        if allocate_on_comm_stream:
            check("combine", previous_event, async_finish, allocate_on_comm_stream)
        x = checks.rows("combine", x)
        engine = self._engines.own.get(x.device) or self._engines.of(device_of("combine: x", x))
        routing = handle.routing if type(handle) is Handle else None
        if routing is None or routing.engine is not engine:
            routing = self._routing("combine", handle, engine)
        if topk_weights is None and bias is None and previous_event is None and not async_finish:
            return engine.combine(x, routing), None, EventOverlap()
        biases = checks.biases("combine", bias, x, routing.tokens)
        weights: Optional[Tensor] = None
        if topk_weights is not None:
            weights = checks.matrix("combine", "topk_weights", topk_weights, rows=x.shape[0], device=x.device)
            if weights.dtype is not torch.float32:
                raise errors.InvalidType(f"deep_ep: combine: topk_weights is {weights.dtype}, want float32")

        def back() -> tuple[Tensor, Optional[Tensor]]:
            sums = None if weights is None else engine.sum_over_ranks(weights, routing)
            return engine.combine(x, routing, bias=biases), sums

        inputs = (x, weights, biases)
        (y, sums), event = self._streams.run(engine.device, previous_event, async_finish, inputs, back)
        return y, sums, EventOverlap(event)

    def _routing(self, call: str, handle: Any, engine: Engine) -> Routing:
        """The routing of a handle of this group."""
        if not isinstance(handle, Handle):
            raise errors.InvalidType(f"deep_ep: {call}: handle is {type(handle).__name__}, want one that dispatch returned")
        return checked(call, handle.routing, engine)


def checked(call: str, routing: Routing, engine: Engine) -> Routing:
    if routing.engine is not engine:
        raise errors.InvalidArgument(
            f"deep_ep: {call}: the handle is of another group or device: {routing.engine.size} ranks on "
            f"{routing.engine.device}, and not {engine.size} on {engine.device}"
        )
    return routing
