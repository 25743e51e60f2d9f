"""The buffer of DeepEP 2.5, and what else that version has."""

from __future__ import annotations

from typing import Any, NoReturn, Optional, Union

import torch
from switchyard._torch.compiler import operates, uncompiled_methods
from torch import Tensor

from ..utils.event import EventOverlap
from ._ep_handle import EPHandle
from .allocator import BufferAllocator
from .elastic import ElasticBuffer, _refused


@uncompiled_methods
class EPBuffer(ElasticBuffer):
    """Dispatch and combine for a group of ranks. Memory is taken by calls, as they need it, together with all ranks."""

    def __init__(
        self,
        group: Any,
        num_bytes: Optional[int] = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: Union[BufferAllocator, int] = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: Optional[int] = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        super().__init__(
            group,
            num_bytes,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            use_fp8_dispatch=use_fp8_dispatch,
            deterministic=deterministic,
            allow_hybrid_mode=allow_hybrid_mode,
            allow_multiple_reduction=allow_multiple_reduction,
            prefer_overlap_with_compute=prefer_overlap_with_compute,
            num_allocated_qps=num_allocated_qps,
            explicitly_destroy=explicitly_destroy,
        )
        plan = lb_allocation_plan_or_num_bytes
        self.num_lb_bytes = plan.num_bytes if isinstance(plan, BufferAllocator) else plan
        if isinstance(plan, BufferAllocator):
            device = "cuda" if torch.cuda.is_available() else "cpu"
            plan.materialize(torch.empty(plan.num_bytes, dtype=torch.uint8, device=device))

    @operates
    def dispatch(  # type: ignore[override]
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
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: Optional[EPHandle] = None,
        do_handle_copy: bool = False,
        do_cpu_sync: Optional[bool] = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """Send tokens to the ranks of their experts, as ElasticBuffer does. With defer_epilogue it returns the event alone,
        whose wait returns rows, local experts, weights and the handle."""
        if do_handle_copy:
            raise AssertionError("deep_ep: EPBuffer.dispatch: do_handle_copy is no more: a handle has the very topk_idx")
        _check_deferred("dispatch", defer_epilogue, async_with_compute_stream)
        made = super().dispatch(
            x,
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            num_sms,
            previous_event=previous_event,
            async_with_compute_stream=async_with_compute_stream,
            allocate_on_comm_stream=allocate_on_comm_stream,
            handle=handle,
            do_handle_copy=False,
            do_cpu_sync=do_cpu_sync,
            do_expand=do_expand,
            use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
        )
        return _given_by_wait(made) if defer_epilogue else made

    @operates
    def combine(  # type: ignore[override]
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Optional[Tensor] = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """Bring rows back, as ElasticBuffer does. With defer_epilogue it returns the event alone, whose wait returns the sums
        and the weight of each choice."""
        _check_deferred("combine", defer_epilogue, async_with_compute_stream)
        made = super().combine(
            x,
            handle,
            topk_weights,
            bias,
            previous_event=previous_event,
            async_with_compute_stream=async_with_compute_stream,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )
        return _given_by_wait(made) if defer_epilogue else made


def _check_deferred(call: str, defer_epilogue: bool, is_async: bool) -> None:
    if defer_epilogue and not is_async:
        raise AssertionError(f"deep_ep: EPBuffer.{call}: defer_epilogue needs async_with_compute_stream")


def _given_by_wait(made: tuple[Any, ...]) -> EventOverlap:
    """The event of a call, whose wait returns the other results."""
    event: EventOverlap = made[-1]
    event.register_hook_after_wait(lambda: made[:-1])
    return event


for _name in ("lb_get_theoretical_num_sms", "lb_prefetch_weights", "lb_reduce_grads"):
    setattr(EPBuffer, _name, staticmethod(_refused(f"EPBuffer.{_name}", "moving experts for balance")))


class _Absent:
    """A buffer of DeepEP 2.5 for other ends than experts."""

    _ends = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._refuse()

    @classmethod
    def _refuse(cls) -> NoReturn:
        raise NotImplementedError(f"deep_ep: {cls.__name__}: {cls._ends} is not supported")

    @classmethod
    def get_buffer_size_hint(cls, *_: Any, **__: Any) -> NoReturn:
        cls._refuse()


class BucketBuffer(_Absent):
    """Collectives of lists of tensors: refused."""

    _ends = "gathering and scattering"


class BucketSession(_Absent):
    """A run of a BucketBuffer's collectives: refused."""

    _ends = "gathering and scattering"


class EngramBuffer(_Absent):
    """Memory of other ranks by key: refused."""

    _ends = "Engram"


class PPBuffer(_Absent):
    """Sending to the next stage: refused."""

    _ends = "sending between pipeline stages"
