"""The buffer of DeepEP's first generation: normal mode here, few tokens in _low_latency."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from switchyard import errors
from torch import Tensor

from .. import _checks as checks
from .._engine import Engine, Engines, close_all
from .._handles import Handle
from .._results import Routing, Shape, choices_of, ranks_of
from .._streams import Streams, check, device_of
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
        """None: all ranks are on one host."""
        return 0


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
        self._streams = Streams()
        self._engines = Engines(group)
        self._destroyed = False
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
        """Give back the memory that the group's calls have taken, together with all ranks. Results and handles stay as they
        are; calls of other buffers of the group take memory anew. Later calls of this one raise."""
        if not self._destroyed:
            self._destroyed = True
            self._engines.end()
            close_all(self.group)

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether float8 can be sent."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Bound the multiprocessors that a dispatch takes, for calls without a config. On the host it says nothing."""
        if new_num_sms % 2:
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
        raise NotImplementedError("deep_ep: internode_dispatch: dispatch serves groups of any size on one host")

    def internode_combine(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("deep_ep: internode_combine: combine serves groups of any size on one host")

    # Calls

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
        call = "get_dispatch_layout"
        check(call, previous_event, async_finish, allocate_on_comm_stream)
        checks.experts(call, num_experts, self.group_size)
        device = device_of(f"{call}: topk_idx", topk_idx)
        idx = checks.indices(call, topk_idx)

        def count() -> tuple[Tensor, Tensor, Tensor]:
            wide = checks.known(call, idx, num_experts, waits=not async_finish)
            inside, _ = ranks_of(wide, num_experts, self.group_size)
            flat = torch.where(wide < 0, num_experts, wide).flatten()
            chosen = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
            chosen.scatter_add_(0, flat, torch.ones(flat.shape, dtype=torch.int32, device=device))
            return inside.sum(0, dtype=torch.int32), chosen[:num_experts], inside

        made, event = self._streams.run(device, previous_event, async_finish, (idx,), count)
        return made[0], None, made[1], made[2], EventOverlap(event)

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
        check("dispatch", previous_event, async_finish, allocate_on_comm_stream)
        sent = checks.tokens("dispatch", x)
        device = device_of("dispatch: x", sent.x)
        engine = self._engines.of(device)
        sms = config.num_sms if config is not None else Buffer.num_sms if Buffer._bounded else 0
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise errors.InvalidArgument("deep_ep: dispatch: topk_idx and topk_weights do not go with a handle")
            known = self._routing("dispatch", handle, engine)
            return self._again(sent, handle, known, sms, previous_event, async_finish)
        if topk_idx is None and is_token_in_rank is None:
            raise errors.InvalidArgument("deep_ep: dispatch: neither topk_idx nor is_token_in_rank nor a handle is there")
        if num_tokens_per_expert is None:
            raise errors.InvalidArgument("deep_ep: dispatch: num_tokens_per_expert is missing")
        experts = checks.experts("dispatch", num_tokens_per_expert.shape[0], self.group_size)
        weights: Optional[Tensor] = None
        if topk_idx is not None:
            idx, weights = checks.choices("dispatch", topk_idx, topk_weights, sent.x.shape[0], sent.x.device)
        else:
            size = self.group_size
            idx = checks.matrix("dispatch", "is_token_in_rank", is_token_in_rank, sent.x.shape[0], size, device)
        if num_worst_tokens:
            checks.at_most("dispatch", sent.x, num_worst_tokens, "num_worst_tokens")

        def send() -> tuple[Any, ...]:
            theirs = topk_idx is not None and idx.dtype is torch.int64
            ways = idx if theirs else choices_of(idx.to(torch.bool)) if topk_idx is None else idx.to(torch.int64)
            among, rows = experts if topk_idx is not None else self.group_size, sent.x
            shape = Shape(
                among, ways.shape[1], rows.shape[1], rows.dtype, num_worst_tokens, num_worst_tokens, False, "", sent.kind, sms
            )
            result, routing = engine.dispatch(shape, sent.x, sent.scales, ways, weights, num_worst_tokens, theirs)
            chosen: list[int] = []
            if not num_worst_tokens:
                chosen = result.chosen if topk_idx is not None else engine.totals(num_tokens_per_expert)
            return result, routing, aligned(chosen, expert_alignment)

        inputs = (sent.x, sent.scales, idx, weights)
        (result, routing, chosen), event = self._streams.run(device, previous_event, async_finish, inputs, send)
        handle = Handle(routing, result, num_worst_tokens)
        indices = result.indices if topk_idx is not None else None
        rows = sent.returned(result.rows, result.scales)
        return rows, indices, result.weights, chosen, handle, EventOverlap(event)

    def _again(self, sent: checks.Tokens, handle: Handle, routing: Routing, sms: int, previous: Any, is_async: bool) -> Any:
        """Send other tokens the ways of a handle."""
        tokens, engine = routing.tokens, routing.engine
        if sent.x.shape[0] != tokens:
            raise errors.InvalidArgument(f"deep_ep: dispatch: x has {sent.x.shape[0]} tokens, those of the handle are {tokens}")
        x = sent.x
        shape = routing.sized()._replace(hidden=x.shape[1], dtype=x.dtype, scales=sent.kind, max_sms=sms)
        result, event = self._streams.run(
            engine.device,
            previous,
            is_async,
            (x, sent.scales),
            lambda: engine.redispatch(x, sent.scales, None, routing, shape, handle.length),
        )
        return sent.returned(result.rows, result.scales), None, None, None, None, EventOverlap(event)

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
        check("combine", previous_event, async_finish, allocate_on_comm_stream)
        x = checks.rows("combine", x)
        engine = self._engines.of(device_of("combine: x", x))
        routing = self._routing("combine", handle, engine)
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
