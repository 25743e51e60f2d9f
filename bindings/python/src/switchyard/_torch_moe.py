"""Dispatch and combine of torch tensors, with their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import errors
from ._torch import tensor_at

if TYPE_CHECKING:
    from .moe import Dispatched, Dispatcher


def _tensor(d: Dispatcher, name: str, x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise errors.InvalidType(f"switchyard: {name} is a {type(x).__name__}, want a tensor")
    _on_host(name, x)
    if x.dtype is not getattr(torch, d.dtype):
        raise errors.InvalidType(f"switchyard: {name} is {x.dtype}, the dispatcher was made for {d.dtype}")
    d._check_rows(name, x.shape)
    return x.contiguous()


def _on_host(name: str, x: Tensor) -> None:
    if not x.is_cpu:
        raise errors.Unsupported(f"switchyard: {name} is on {x.device}: dispatchers work on host tensors")


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, idx: Tensor, weights: Tensor, d: Dispatcher, out: list[Dispatched]) -> Tensor:
        output = d._dispatch(x.data_ptr(), _nbytes(x), idx.data_ptr(), weights.data_ptr(), idx.numel(), (x, idx, weights))
        ctx.dispatcher, ctx.output, ctx.shape = d, output, x.shape
        out.append(d._dispatched(output, x.shape[0], weights))
        if output.nbytes == 0:
            return x.new_empty((0, d.hidden))
        return tensor_at(output.memory(), (-1, d.hidden), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad = grad.contiguous()
        dx = grad.new_empty(ctx.shape)
        ctx.dispatcher._combine(dx.data_ptr(), _nbytes(dx), grad.data_ptr(), _nbytes(grad), ctx.output, True, (dx, grad))
        return dx, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, d: Dispatcher, dispatched: Dispatched) -> Tensor:
        output = dispatched._output
        y = rows.new_empty((dispatched.tokens, d.hidden))
        d._combine(y.data_ptr(), _nbytes(y), rows.data_ptr(), _nbytes(rows), output, False, (y, rows))
        ctx.save_for_backward(rows)
        ctx.dispatcher, ctx.output = d, output
        ctx.weights = (weights.shape, weights.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        grad = grad.contiguous()
        d, (shape, dtype) = ctx.dispatcher, ctx.weights
        d_rows, d_weights = torch.empty_like(rows), torch.empty(shape, dtype=torch.float32)
        d._call(
            d.comm._lib.combine_backward,
            (d_rows, d_weights, grad, rows),
            d_rows.data_ptr(),
            _nbytes(d_rows),
            d_weights.data_ptr(),
            d_weights.numel(),
            grad.data_ptr(),
            _nbytes(grad),
            rows.data_ptr(),
            _nbytes(rows),
            ctx.output.handle,
        )
        return d_rows, d_weights.to(dtype), None, None


def dispatch(d: Dispatcher, x: Tensor, idx: Any, weights: Any) -> Dispatched:
    x = _tensor(d, "x", x)
    idx = torch.as_tensor(idx)
    if idx.numel() and (idx.dtype.is_floating_point or idx.dtype.is_complex or idx.dtype is torch.bool):
        raise errors.InvalidType(f"switchyard: idx is {idx.dtype}, want integers")
    idx = idx.to(torch.int32).contiguous()
    weights = torch.as_tensor(weights)
    _on_host("idx", idx)
    _on_host("weights", weights)
    d._check_choices(x.shape[0], idx.shape, weights.shape)
    out: list[Dispatched] = []
    plain = weights.detach().to(torch.float32).contiguous()
    rows = _Dispatch.apply(x, idx, plain, d, out)
    out[0].rows, out[0]._weights = rows, weights
    return out[0]


def combine(d: Dispatcher, rows: Tensor, dispatched: Dispatched) -> Tensor:
    rows = _tensor(d, "rows", rows)
    if rows.shape[0] != dispatched.num_rows:
        raise errors.InvalidArgument(f"switchyard: combine: {rows.shape[0]} rows, the dispatch had {dispatched.num_rows}")
    return _Combine.apply(rows, torch.as_tensor(dispatched._weights), d, dispatched)
