"""Dispatch and combine as operators for compiled graphs. Dispatchers go by name, a dispatch by a tensor that holds it."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .. import errors
from .._core.dispatched import DISPATCHED, GIVEN, PARTS, UNWEIGHTED, Combining, Dispatched, Output, biases_of, named
from .._core.dispatcher import Calls
from . import moe
from .compiler import outside
from .moe import kinds

# Behind the rows and the handle: what a dispatch has besides, empty where it has not.
_OTHERS = PARTS[1:]
_ROW_WEIGHTS = 2 + _OTHERS.index("row_weights")


def _find(name: str) -> Calls:
    found: Calls = named[name]
    return found


def _empty(x: Tensor, shape: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=x.device)


@torch.library.custom_op("switchyard::dispatch", mutates_args=())
def _dispatch_op(
    x: Tensor, scales: Optional[Tensor], idx: Tensor, weights: Optional[Tensor], dispatcher: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    d = _find(dispatcher)
    k = kinds(d)
    x = moe._rows(d, "x", x, k.token)
    choices, factors = moe._choices(d, idx, weights, x.shape[0])
    output = moe._send(d, x, scales, choices, factors, False)
    parts = [k.part(output, name) if output.slot.parts[name][1] else _empty(x, (0,), torch.int32) for name in _OTHERS]
    return (k.part(output, "rows"), moe._token(output), *parts)  # type: ignore[return-value]


@_dispatch_op.register_fake
def _(x, scales, idx, weights, dispatcher):  # type: ignore[no-untyped-def]
    d = _find(dispatcher)
    k, size = kinds(d), d.comm.size
    # On the host there are as many rows as came.
    rows = torch.library.get_ctx().new_dynamic_size() if k.trims else d.max_rows
    local = len(d.local_experts)
    shapes = {
        "scales": ((0,), torch.int32),
        "counts": ((local,), torch.int32),
        "offsets": ((d._groups + 1,), torch.int32),
        "rank_counts": ((size,), torch.int32),
        "indices": ((rows, d.top_k) if d.by_token else (0,), torch.int64 if d.by_token else torch.int32),
        "row_weights": (
            (rows, d.top_k) if d.by_token else (rows,) if d._weighs_rows else (0,),
            torch.float32 if d._weighs_rows else torch.int32,
        ),
        "sources": ((rows, 2) if d._tells_sources else (0,), torch.int32),
        "landed": ((local,) if d._tells_landed else (0,), torch.int32),
    }
    parts = {name: _empty(x, *shapes[name]) for name in _OTHERS}
    if d._float8:
        parts["scales"] = _scales(d, rows, x)
    return (_empty(x, (rows, d.hidden), k.row), torch.empty(1, dtype=torch.int64, device="cpu"), *parts.values())


def _scales(d: Calls, rows: Any, x: Tensor) -> Tensor:
    """Scales as Calls._scales has them."""
    n, capacity = d._scale_words, d._row_capacity()
    shape, strides = (rows, n), (1, d.max_rows) if d._columns else (n, 1)  # type: tuple[Any, ...], tuple[int, ...]
    if d._columns and d.layout in ("padded", "slab"):
        shape, strides = (d.max_rows // capacity, capacity, n), (n * capacity, 1, capacity)
    return torch.empty_strided(shape, strides, dtype=(torch.float32, torch.int32)[d._exponents], device=x.device)


def _dispatch_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, _, _, weights, ctx.dispatcher = inputs
    ctx.tokens, ctx.weighed = x.shape[0], weights is not None
    ctx.save_for_backward(output[1])


def _dispatch_backward(ctx: Any, d_rows: Tensor, *others: Any) -> Any:
    (handle,) = ctx.saved_tensors
    d = _find(ctx.dispatcher)
    beside = others[_ROW_WEIGHTS - 1] if d._weighs_rows and ctx.weighed else None
    dx, d_weights = _dispatch_backward_op(d_rows, beside, handle, ctx.tokens, ctx.dispatcher)
    return None if d._float8 else dx.to(kinds(d).token), None, None, None if beside is None else d_weights, None


_dispatch_op.register_autograd(_dispatch_backward, setup_context=_dispatch_setup)


@torch.library.custom_op("switchyard::dispatch_backward", mutates_args=())
def _dispatch_backward_op(
    d_rows: Tensor, d_row_weights: Optional[Tensor], handle: Tensor, tokens: int, dispatcher: str
) -> tuple[Tensor, Tensor]:
    d = _find(dispatcher)
    dx, d_weights = moe.dispatch_backward(d, d_rows, d_row_weights, int(handle[0]), tokens)
    return dx, _empty(dx, (0,), torch.float32) if d_weights is None else d_weights


@_dispatch_backward_op.register_fake
def _(d_rows, d_row_weights, handle, tokens, dispatcher):  # type: ignore[no-untyped-def]
    d = _find(dispatcher)
    weights = (0,) if d_row_weights is None else (tokens, d.top_k)
    return _empty(d_rows, (tokens, d.hidden), kinds(d).sum), _empty(d_rows, weights, torch.float32)


@torch.library.custom_op("switchyard::combine", mutates_args=())
def _combine_op(
    rows: Tensor, handle: Tensor, weights: Optional[Tensor], given: Optional[Tensor], first: Optional[Tensor],
    second: Optional[Tensor], weighting: int, tokens: int, dispatcher: str,
) -> Tensor:  # fmt: skip
    d = _find(dispatcher)
    k = kinds(d)
    rows = moe._rows(d, "rows", rows, k.sum)
    biases = [None if b is None else moe._rows(d, "bias", b, k.sum) for b in (first, second)]
    factors = None if given is None else moe._plain(d, "weights", given, torch.float32)
    y = _empty(rows, (tokens, d.hidden), k.sum)
    held = (y, rows, factors, None, *biases, None, None)
    d._combine_by([n for x in held for n in moe.place(x)], int(handle[0]), 0, (0, weighting, False, False), held)
    return y


@_combine_op.register_fake
def _(rows, handle, weights, given, first, second, weighting, tokens, dispatcher):  # type: ignore[no-untyped-def]
    return _empty(rows, (tokens, _find(dispatcher).hidden), rows.dtype)


def _combine_setup(ctx: Any, inputs: Any, output: Any) -> None:
    rows, handle, weights, given, first, second, ctx.weighting, ctx.tokens, ctx.dispatcher = inputs
    ctx.weighed, ctx.biases = weights is not None, (first is not None, second is not None)
    ctx.save_for_backward(handle, rows, given)


def _combine_backward(ctx: Any, dy: Tensor) -> Any:
    handle, rows, given = ctx.saved_tensors
    d_rows, d_weights = _combine_backward_op(dy, rows, given, handle, ctx.weighting, ctx.dispatcher)
    by_choice = d_weights if ctx.weighed else None
    by_row = d_weights if ctx.weighting == GIVEN else None
    return d_rows, None, by_choice, by_row, *(dy if there else None for there in ctx.biases), None, None, None


_combine_op.register_autograd(_combine_backward, setup_context=_combine_setup)


@torch.library.custom_op("switchyard::combine_backward", mutates_args=())
def _combine_backward_op(
    dy: Tensor, rows: Tensor, given: Optional[Tensor], handle: Tensor, weighting: int, dispatcher: str
) -> tuple[Tensor, Tensor]:
    d = _find(dispatcher)
    d_rows, d_weights = moe.combine_backward(
        d, dy, None if weighting == UNWEIGHTED else rows, given, int(handle[0]), weighting, rows.shape
    )
    return d_rows, _empty(dy, (0,), torch.float32) if d_weights is None else d_weights


@_combine_backward_op.register_fake
def _(dy, rows, given, handle, weighting, dispatcher):  # type: ignore[no-untyped-def]
    shape = (0,) if weighting == UNWEIGHTED else (dy.shape[0], _find(dispatcher).top_k) if given is None else given.shape
    return torch.empty_like(rows), _empty(dy, tuple(shape), torch.float32)


# The methods of a dispatcher in a compiled graph. Halves are made as one: the compiler orders calls by itself.


class _Held(Output):
    """An output that a tensor holds."""

    __slots__ = ("_token",)

    def __init__(self, d: Calls, token: Tensor) -> None:
        super().__init__(d, int(token[0]), 0, None, token.data_ptr())
        self._token = token

    def __del__(self) -> None:
        """The tensor gives it back."""


class Compiled(Dispatched):
    """A dispatch in a compiled graph, where a tensor holds its output. A call outside of the graph makes one of that."""

    _dispatcher: Any
    _handle: Tensor

    def _given(self) -> Output:
        if self._output is None:
            self._side, self._output = kinds(self._dispatcher), _Held(self._dispatcher, self._handle)
        return self._output

    def release(self) -> None:
        if not torch.compiler.is_compiling():  # in a graph it goes with the last tensor on it
            self._given()
            super().release()


def dispatch(
    d: Calls, x: Tensor, idx: Tensor, weights: Tensor | None, scales: Tensor | None, async_op: bool
) -> Dispatched:
    if d._float8 and x.requires_grad:
        raise errors.Unsupported("switchyard: tokens that become float8 have no gradient: detach() them")
    if weights is not None and weights.dtype is not torch.float32:
        weights = weights.to(torch.float32)
    rows, handle, *others = torch.ops.switchyard.dispatch(x, scales, idx, weights, d.name)
    got = Compiled(d, None, None, x.shape[0], weights, dict(zip(_OTHERS, others)))
    got.rows, got._handle = rows, handle
    return got


def redispatch(d: Any, x: Tensor, dispatched: Dispatched, scales: Tensor | None, async_op: bool) -> Dispatched:
    return outside(d.redispatch, x, dispatched, scales=scales, async_op=async_op)  # type: ignore[no-any-return]


def combine(
    d: Any, rows: Tensor, dispatched: Dispatched, weights: Tensor | None, weighted: bool, token_weights: Any, bias: Any,
    sum_weights: bool, ready: Any, out: Any, release: bool, async_op: bool,
) -> Any:  # fmt: skip
    rare = sum_weights or token_weights is not None or ready is not None or out is not None or release
    if rare or not isinstance(dispatched, Compiled):
        return outside(
            d.combine, rows, dispatched, weights=weights, weighted=weighted, token_weights=token_weights, bias=bias,
            sum_weights=sum_weights, ready=ready, out=out, release=release, async_op=async_op,
        )  # fmt: skip
    weighting = d._weighting(weights, weighted, None)
    first, second = (*biases_of(bias), None, None)[:2]
    by_choice = dispatched._weights if weighting == DISPATCHED else None
    y = torch.ops.switchyard.combine(
        rows, dispatched._handle, by_choice, weights, first, second, weighting, dispatched.tokens, d.name
    )
    return Combining(None, y, None) if async_op else y
