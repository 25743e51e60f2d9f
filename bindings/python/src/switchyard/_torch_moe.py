"""Dispatch and combine of torch tensors, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _cuda, errors
from ._dispatched import BESIDE_ROWS, GIVEN, UNWEIGHTED, Combining, Dispatched, Output, biases_of
from ._tensors import description, tensor_on

if TYPE_CHECKING:
    from .moe import Dispatcher


class Kinds:
    """What a dispatcher is in torch's words."""

    def __init__(self, d: Dispatcher) -> None:
        self.device = torch.device("cuda", d._index) if d._index >= 0 else torch.device("cpu")
        self.token, self.row, self.sum, self.index = (
            getattr(torch, name) for name in (d.dtype, d.row_dtype, d.combine_dtype, d.index_dtype)
        )
        self.stream: Callable[[int], int] = _cuda.raw_stream
        self.dispatcher, self.trims = d, d._index < 0

    def part(self, output: Output, name: str) -> Tensor:
        """A part of an output. On the host it is as long as rows came."""
        about = output.slot.described.get(name)
        if about is None:
            about = output.slot.described[name] = self._describe(output, name)
        if self.trims and name in BESIDE_ROWS and name != "scales":
            output.counts = output.counts or output.host()
            about = about[:]
            about[6] = output.counts.rows
        x = tensor_on(about.buffer_info()[0], output._hold)
        if name == "rows":
            return x.view(self.row) if self.dispatcher._float8 else x
        if name != "scales":
            return x
        d = self.dispatcher
        return d._scales(x, output.host().rows if self.trims else d.max_rows)

    def _describe(self, output: Output, name: str) -> Any:
        address, size = output.slot.parts[name]
        kind, shape = self.dispatcher._shape(name, size)
        dtype = getattr(torch, kind)
        return description(address, self.device, torch.uint8 if dtype.itemsize == 1 else dtype, *shape)


def _token(output: Output) -> Tensor:
    """The output's handle as a tensor that holds the output."""
    about = description(output._hold, torch.device("cpu"), torch.int64, 1)
    return tensor_on(about.buffer_info()[0], output._hold)


def kinds(d: Dispatcher) -> Kinds:
    found: Kinds = d._torch or d._load_torch()
    return found


# Arguments


def _plain(d: Dispatcher, name: str, x: Any, dtype: torch.dtype) -> Tensor:
    """A tensor of the dispatcher's device with its numbers one after the other."""
    if not isinstance(x, Tensor):
        raise errors.InvalidType(f"switchyard: {name} is a {type(x).__name__}, want a tensor")
    here = kinds(d).device
    if x.get_device() != d._index or x.layout is not torch.strided:
        raise errors.InvalidArgument(f"switchyard: {name} is on {x.device}, the dispatcher on {here}")
    if x.dtype is not dtype:
        raise errors.InvalidType(f"switchyard: {name} is {x.dtype}, the dispatcher was made for {dtype}")
    return x if x.is_contiguous() else x.contiguous()


def _rows(d: Dispatcher, name: str, x: Any, dtype: torch.dtype) -> Tensor:
    x = _plain(d, name, x, dtype)
    if x.dim() != 2 or x.shape[1] != d.hidden:
        d._check_rows(name, x.shape)
    if d._index >= 0 and x.data_ptr() % 16:
        x = x.clone()
    return x


def _choices(d: Dispatcher, idx: Any, weights: Any, tokens: int) -> tuple[Tensor, Tensor | None]:
    """Expert indices and weights as the library takes them."""
    k = kinds(d)
    if not isinstance(idx, Tensor):
        idx = torch.as_tensor(idx, device=k.device)
    if idx.dtype is not k.index:
        if idx.numel() and (idx.dtype.is_floating_point or idx.dtype.is_complex or idx.dtype is torch.bool):
            raise errors.InvalidType(f"switchyard: idx is {idx.dtype}, want integers")
        idx = idx.to(k.index)
    idx = _plain(d, "idx", idx, k.index)
    if weights is not None:
        if not isinstance(weights, Tensor):
            weights = torch.as_tensor(weights, device=k.device)
        if weights.dtype is not torch.float32:
            weights = weights.to(torch.float32)
        weights = _plain(d, "weights", weights, torch.float32)
        if weights.shape != (tokens, d.top_k):
            d._check_choices(tokens, idx.shape, weights.shape)
    if idx.shape != (tokens, d.top_k):
        d._check_choices(tokens, idx.shape, None if weights is None else weights.shape)
    return idx, weights


def _scales_of(d: Dispatcher, scales: Any, x: Tensor) -> tuple[int, int]:
    """Where the scales lie that come with tokens."""
    if scales is None:
        return 0, 0
    scales = _plain(d, "scales", scales, (torch.float32, torch.int32)[d._format])
    return scales.data_ptr(), scales.numel() * 4


def _differentiable(d: Dispatcher, x: Tensor) -> None:
    if d._float8 and x.requires_grad:
        raise errors.Unsupported(
            "switchyard: tokens that become float8 have no gradient: detach() them, and use Dispatcher.dispatch_backward"
        )


# Dispatch


def _place(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.data_ptr(), x.numel() * x.element_size())


def _send(d: Dispatcher, x: Tensor, scales: Any, idx: Tensor, weights: Tensor | None, first: bool) -> Output:
    at = 0 if weights is None else weights.data_ptr()
    beside = (0, 0) if scales is None else _scales_of(d, scales, x)
    return d._dispatch(x.data_ptr(), beside, idx.data_ptr(), at, x.shape[0], first, (x, idx, weights, scales))


class _Dispatch(torch.autograd.Function):
    """Sends tokens; what arrives are the rows, and their weights where there are some."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor | None, d: Dispatcher, send: Callable[[], Output], out: list[Output]
    ) -> Any:
        output = send()
        out.append(output)
        ctx.dispatcher, ctx.handle, ctx.tokens = d, output.handle, x.shape[0]
        ctx.save_for_backward(_token(output))
        ctx.set_materialize_grads(False)
        rows = kinds(d).part(output, "rows")
        if d._float8:
            ctx.mark_non_differentiable(rows)
        return rows if weights is None else (rows, kinds(d).part(output, "row_weights"))

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor | None, d_row_weights: Tensor | None = None) -> Any:  # type: ignore[override]
        (token,) = ctx.saved_tensors  # which holds the output
        d = ctx.dispatcher
        dx, d_weights = dispatch_backward(d, d_rows, d_row_weights, int(token[0]), ctx.tokens)
        return None if d._float8 else dx.to(kinds(d).token), d_weights, None, None, None


def dispatch_backward(
    d: Dispatcher, d_rows: Tensor | None, d_row_weights: Tensor | None, handle: int, tokens: int
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the tokens, in the type of combines, and of their weights, where those of rows are given."""
    k = kinds(d)
    if d_rows is None:
        d_rows = torch.zeros((d.max_rows, d.hidden), dtype=k.sum, device=k.device)
    d_rows = d_rows.to(k.sum).contiguous()
    dx = torch.empty((tokens, d.hidden), dtype=k.sum, device=k.device)
    d_weights = None
    if d_row_weights is not None:
        d_row_weights = d_row_weights.contiguous()
        d_weights = torch.zeros((tokens, d.top_k), dtype=torch.float32, device=k.device)
    buffers = [*_place(dx), *_place(d_rows), *_place(d_row_weights), *_place(d_weights), 0, 0, 0, 0, 0, 0]
    d._combine(buffers, handle, (1, UNWEIGHTED, False, False), (dx, d_rows, d_row_weights, d_weights))
    return dx, d_weights


def tokens_gradient(d: Dispatcher, d_rows: Tensor, dispatched: Dispatched) -> Tensor:
    d_rows = _rows(d, "d_rows", d_rows, kinds(d).sum)
    d._check_length("d_rows", d_rows.shape[0], dispatched._output)
    return dispatch_backward(d, d_rows, None, dispatched._output.alive(), dispatched.tokens)[0]


def _dispatched(d: Dispatcher, x: Tensor, weights: Tensor | None, send: Callable[[], Output], async_op: bool) -> Dispatched:
    """What a dispatch that send makes becomes to its caller."""
    beside = weights if d._weighs_rows else None  # others come back with combine
    if torch.is_grad_enabled() and (x.requires_grad or (beside is not None and beside.requires_grad)):
        _differentiable(d, x)
        out: list[Output] = []
        made = _Dispatch.apply(x, beside, d, send, out)
        got = Dispatched(d, out[0], x.shape[0], weights, {})
        if isinstance(made, Tensor):
            got.rows = made
        else:
            got.rows, got._parts["row_weights"] = made
    else:
        output = send()
        got = Dispatched(d, output, x.shape[0], weights, {})
        got.rows = d._torch.part(output, "rows")
    got._half = async_op
    return got


def dispatch(d: Dispatcher, x: Tensor, idx: Any, weights: Any, scales: Any, async_op: bool) -> Dispatched:
    x = _rows(d, "x", x, kinds(d).token)
    idx, weights = _choices(d, idx, weights, x.shape[0])
    return _dispatched(d, x, weights, lambda: _send(d, x, scales, idx, weights, async_op), async_op)


def redispatch(d: Dispatcher, x: Tensor, dispatched: Dispatched, scales: Any, async_op: bool) -> Dispatched:
    x = _rows(d, "x", x, kinds(d).token)
    if x.shape[0] != dispatched.tokens:
        raise errors.InvalidArgument(f"switchyard: x has {x.shape[0]} tokens, the dispatch had {dispatched.tokens}")
    output = dispatched._output

    def send() -> Output:
        d._redispatch(x.data_ptr(), _scales_of(d, scales, x), output, x.shape[0], async_op, (x, scales))
        return output

    torch.autograd.graph.increment_version(dispatched.rows)  # gradients that need what was there are refused
    got = _dispatched(d, x, None, send, async_op)
    got._weights = dispatched._weights
    got._parts = dispatched._parts
    return got


# Combine


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor | None, given: Tensor | None, first: Tensor | None, second: Tensor | None,
        d: Dispatcher, output: Output, make: Callable[[], Tensor], weighting: int,
    ) -> Tensor:  # fmt: skip
        y = make()
        # Rows that are not weighted are not needed again, and those that are hold what they lie in.
        ctx.save_for_backward(_token(output), None if weighting == UNWEIGHTED else rows, given)
        ctx.dispatcher, ctx.weighting, ctx.shape = d, weighting, rows.shape
        ctx.weighed = None if weights is None else weights.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        token, rows, given = ctx.saved_tensors
        d_rows, d_weights = combine_backward(ctx.dispatcher, dy, rows, given, int(token[0]), ctx.weighting, ctx.shape)
        by_choice = d_weights if ctx.weighting not in (GIVEN, UNWEIGHTED) and ctx.weighed is not None else None
        by_row = d_weights if ctx.weighting == GIVEN else None
        biases = (dy if need else None for need in ctx.needs_input_grad[3:5])
        return d_rows, by_choice, by_row, *biases, None, None, None, None


def combine_backward(
    d: Dispatcher, dy: Tensor, rows: Tensor | None, given: Tensor | None, handle: int, weighting: int, shape: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """The gradients of rows, and of what weighted them."""
    dy = dy.contiguous()
    d_rows = torch.empty(shape, dtype=dy.dtype, device=dy.device)
    d_weights = None
    if weighting == GIVEN:
        d_weights = torch.zeros(given.shape, dtype=torch.float32, device=dy.device)  # type: ignore[union-attr]
    elif weighting != UNWEIGHTED:
        d_weights = torch.empty((dy.shape[0], d.top_k), dtype=torch.float32, device=dy.device)
    buffers = [*_place(d_rows), *_place(d_weights), *_place(dy), *_place(rows), *_place(given)]
    d._combine_backward(buffers, handle, weighting, (d_rows, d_weights, dy, rows, given))
    return d_rows, d_weights


def combine(
    d: Dispatcher, rows: Tensor, dispatched: Dispatched, weights: Any, weighted: bool, bias: Any, sum_weights: bool, ready: Any,
    release: bool, async_op: bool,
) -> Any:  # fmt: skip
    weighting = d._weighting(weights, weighted)
    biases: list[Any] = biases_of(bias)
    k = kinds(d)
    rows = _rows(d, "rows", rows, k.sum)
    output, tokens = dispatched._output, dispatched.tokens
    if rows.shape[0] != d.max_rows:
        d._check_length("rows", rows.shape[0], output)
    if weights is not None:
        weights = _plain(d, "weights", weights, torch.float32)
    if biases:
        biases = [_rows(d, "bias", b, k.sum) for b in biases]
        for b in biases:
            if b.shape[0] != tokens:
                raise errors.InvalidArgument(f"switchyard: bias has {b.shape[0]} rows, the dispatch had {tokens} tokens")
    first, second = (*biases, None, None)[:2]
    if ready is not None:
        ready = _plain(d, "ready", ready, torch.int32)
    sums = torch.zeros((tokens, d.top_k), dtype=torch.float32, device=k.device) if sum_weights else None

    def make() -> Tensor:
        y = torch.empty((tokens, d.hidden), dtype=k.sum, device=k.device)
        if weights is None and first is None and sums is None and ready is None:
            size = d._sum_bytes
            buffers: Sequence[int] = (
                y.data_ptr(), tokens * size, rows.data_ptr(), rows.shape[0] * size, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            )  # fmt: skip
        else:
            held = (y, rows, weights, sums, first, second, ready)
            buffers = [n for x in held for n in _place(x)]
        d._combine(buffers, output.alive(), (0, weighting, async_op, release), (y, rows, weights, sums, biases, ready))
        if release:
            output.released = True
        return y

    by_choice = dispatched._weights if weighting not in (GIVEN, UNWEIGHTED) else None
    inputs = (rows, by_choice, weights, first, second)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        if release:
            raise errors.InvalidArgument("switchyard: combine: release, and gradients need the dispatch")
        y = _Combine.apply(*inputs, d, output, make, weighting)
    else:
        y = make()
    result = y if sums is None else (y, sums)
    return Combining(dispatched, result, (y, rows, weights, sums, biases, ready)) if async_op else result
