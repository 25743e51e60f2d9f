"""Dispatch and combine of torch tensors, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import errors
from .._core.arguments import type_of
from .._core.dispatched import (
    BESIDE_ROWS,
    DISPATCHED,
    GIVEN,
    OF_TOKENS,
    ROUTING_ALIGN,
    UNWEIGHTED,
    Combining,
    Dispatched,
    Output,
    Parts,
    Routing,
    biases_of,
)
from .._core.dispatcher import Calls
from .._once import once
from .compiler import uncompiled, uncompiled_methods
from .cuda import capturing
from .operators import dispatches
from .profile import named
from .tensors import description, tensor_on, written

for _call in (Dispatched.host_counts, Dispatched.keep, Dispatched.take, Calls._receive, Calls._route):
    uncompiled(_call)


@uncompiled_methods
class Kinds:
    """A dispatcher in torch's words."""

    def __init__(self, d: Calls) -> None:
        self.device = torch.device("cuda", d._index) if d._index >= 0 else torch.device("cpu")
        self.token, self.row, self.sum, self.index = (
            getattr(torch, name) for name in (d.dtype, d.row_dtype, d.combine_dtype, d.index_dtype)
        )
        self.dispatcher, self.trims = d, d._index < 0
        #: By name a tensor like a part: to make another from it takes less than from a type and a device.
        self._like: dict[str, Tensor] = {}
        #: Rows and scales of outputs by where the rows begin, which do not hold one. Rows that are lent stay where they are.
        self._lent: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._bytes = torch.empty(0, dtype=torch.uint8, device=self.device)
        #: Torch begins memory of GPUs at multiples of 512.
        self._slack = 0 if self.device.type == "cuda" else ROUTING_ALIGN - 1

    def part(self, output: Output, name: str) -> Tensor:
        """A part of an output. On the host it is as long as rows came."""
        about = output.slot.described.get(name)
        if about is None:
            about = output.slot.described[name] = self._describe(output, name)
        if self.trims and name in BESIDE_ROWS:
            output.counts = output.counts or output.host()
            if name != "scales":
                about = about[:]
                about[6] = output.counts.rows
        x = tensor_on(about.buffer_info()[0], output._hold)
        if name == "rows":
            return x.view(self.row) if self.dispatcher._float8 else x
        if name != "scales":
            return x
        d = self.dispatcher
        return d._scales(x, output.counts.rows if self.trims and output.counts else d.max_rows, d.max_rows)

    def lent(self, output: Output) -> tuple[Tensor, Tensor | None]:
        """Rows and scales of an output by padded experts, [experts, capacity, their extent], for who gives it back by release:
        the tensors do not hold it."""
        made = self._lent.get(output._rows)
        if made is None:
            with torch.inference_mode(False):  # others may write to aliases
                scales = self._by_expert(output, "scales", None) if self.dispatcher._float8 else None
                made = self._by_expert(output, "rows", None), scales
            self._lent[output.slot.parts["rows"][0]] = made
        rows, scales = made
        return rows.detach(), None if scales is None else scales.detach()

    def held(self, output: Output, name: str) -> Tensor:
        """One of them, as a tensor that holds the output."""
        return self._by_expert(output, name, output._hold)

    def _by_expert(self, output: Output, name: str, hold: int | None) -> Tensor:
        d, about = self.dispatcher, self._describe(output, name)
        x = tensor_on(about.buffer_info()[0], hold)
        if name == "rows":
            return (x.view(self.row) if d._float8 else x).view(-1, d._row_capacity(), d.hidden)
        return d._scales(x, d.max_rows, d.max_rows) if name == "scales" else x  # type: ignore[no-any-return]

    def rows(self, output: Output) -> Tensor:
        """The rows of an output."""
        return self.part(output, "rows")

    def capturing(self) -> bool:
        """Whether the current stream is captured."""
        return self.dispatcher._index >= 0 and capturing()

    def beside(self, parts: Parts, length: int) -> tuple[list[Tensor | None], list[int]]:
        """Memory for parts of an output."""
        made: list[Tensor | None] = []
        places: list[int] = []
        for name, each, tail in parts:
            if not each:
                made.append(None)
                places += (0, 0)
                continue
            like = self._like.get(name)
            if like is None:
                kind = getattr(torch, self.dispatcher._shape(name, 0)[0])
                like = self._like[name] = torch.empty(0, dtype=kind, device=self.device)
            x = like.new_empty(length, *tail)  # which is read sooner than a tuple
            made.append(x)
            places += (x.data_ptr(), length * each)
        return made, places

    def room(self, size: int) -> tuple[Tensor, int]:
        """Memory for a routing."""
        memory = self._bytes.new_empty(size + self._slack)
        return memory, -(-memory.data_ptr() // ROUTING_ALIGN) * ROUTING_ALIGN

    def within(self, memory: Tensor, at: int, size: int, name: str) -> Tensor:
        """A part of an output that lies in memory for a routing."""
        begin = at - memory.data_ptr()
        kind = getattr(torch, self.dispatcher._shape(name, size)[0])
        part = memory[begin : begin + size].view(kind)
        return part.view(-1, 2) if name == "sources" else part

    def _describe(self, output: Output, name: str) -> Any:
        address, size = output.slot.parts[name]
        kind, shape = self.dispatcher._shape(name, size)
        dtype = getattr(torch, kind)
        return description(address, self.device, torch.uint8 if dtype.itemsize == 1 else dtype, *shape)


def _token(output: Output) -> Tensor:
    """The output's handle as a tensor that holds the output."""
    about = description(output._hold, torch.device("cpu"), torch.int64, 1)
    return tensor_on(about.buffer_info()[0], output._hold)


def kinds(d: Calls) -> Kinds:
    found: Kinds = d._torch
    if found is None:
        found = d._torch = Kinds(d)
        d._operated = dispatches(d)
    return found


# Arguments


def _plain(d: Calls, name: str, x: Any, dtype: torch.dtype) -> Tensor:
    """A tensor of the dispatcher's device with its numbers one after the other."""
    if type(x) is Tensor and x.dtype is dtype and x.get_device() == d._index and x.is_contiguous():
        return x  # what is asked most, soonest
    if not isinstance(x, Tensor):
        raise errors.InvalidType(f"switchyard: {name} is {type_of(x)}, want a tensor")
    here = kinds(d).device
    if x.get_device() != d._index or x.layout is not torch.strided:
        raise errors.InvalidArgument(f"switchyard: {name} is on {x.device}, the dispatcher on {here}")
    if x.dtype is not dtype:
        raise errors.InvalidType(f"switchyard: {name} is {x.dtype}, the dispatcher was made for {dtype}")
    return x if x.is_contiguous() else x.contiguous()


def _rows(d: Calls, name: str, x: Any, dtype: torch.dtype) -> Tensor:
    x = _plain(d, name, x, dtype)
    if x.dim() != 2 or x.shape[1] != d.hidden:
        d._check_rows(name, x.shape)
    return aligned(x)


def aligned(x: Tensor) -> Tensor:
    """A tensor of rows as GPUs move them."""
    if not x.is_contiguous():
        return x.contiguous()
    return x.clone() if x.is_cuda and x.data_ptr() % 16 else x


def _choices(d: Calls, idx: Any, weights: Any, tokens: int) -> tuple[Tensor, Tensor | None]:
    """Expert indices and weights as the library takes them."""
    k, want = kinds(d), (tokens, d.top_k)
    if type(idx) is not Tensor or idx.dtype is not k.index:
        given = isinstance(idx, Tensor)
        idx = torch.as_tensor(idx, device=None if given else k.device)
        if (given or idx.numel()) and (idx.dtype.is_floating_point or idx.dtype.is_complex or idx.dtype is torch.bool):
            raise errors.InvalidType(f"switchyard: experts is {idx.dtype}, want integers")
        idx = _narrowed(idx, k.index)
    idx = _plain(d, "experts", idx, k.index)
    if weights is not None:
        if type(weights) is not Tensor or weights.dtype is not torch.float32:
            weights = torch.as_tensor(weights, device=None if isinstance(weights, Tensor) else k.device).to(torch.float32)
        weights = _plain(d, "weights", weights, torch.float32)
        if weights.shape != want:
            d._check_choices(tokens, idx.shape, weights.shape)
    if idx.shape != want:
        d._check_choices(tokens, idx.shape, None if weights is None else weights.shape)
    return idx, weights


def _narrowed(idx: Tensor, kind: torch.dtype) -> Tensor:
    """Expert indices as integers of a type. One that this has no room for stays no expert: on the host it is refused here."""
    if idx.dtype is kind or not idx.numel():
        return idx.to(kind)
    wide, kept = idx.to(torch.int64), torch.iinfo(kind)
    if idx.dtype is torch.uint64:
        wide = torch.where(wide < 0, torch.iinfo(torch.int64).max, wide)  # what 64 bits have no room for
    elif torch.iinfo(idx.dtype).max <= kept.max:
        return wide.to(kind)
    if wide.is_cuda:
        return wide.clamp(kept.min, kept.max).to(kind)
    over = (wide > kept.max - (idx.dtype is torch.uint64)) | (wide < kept.min)
    if over.any():
        value = idx.flatten().tolist()[int(over.flatten().to(torch.uint8).argmax())]
        raise errors.InvalidArgument(f"switchyard: experts has {value}, and the dispatcher takes indices of {kind}")
    return wide.to(kind)


def _scales_of(d: Calls, scales: Any, x: Tensor) -> tuple[int, int]:
    """Where the scales lie that come with tokens."""
    if scales is None:
        return 0, 0
    scales = _plain(d, "scales", scales, (torch.float32, torch.int32)[d._exponents])
    return scales.data_ptr(), scales.numel() * 4


# Dispatch


def place(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.data_ptr(), x.numel() * x.element_size())


def _send(d: Calls, x: Tensor, scales: Any, idx: Tensor, weights: Tensor | None, first: bool) -> Output:
    at = 0 if weights is None else weights.data_ptr()
    beside = (0, 0) if scales is None else _scales_of(d, scales, x)
    return d._dispatch(x.data_ptr(), beside, idx.data_ptr(), at, x.shape[0], first, (x, idx, weights, scales))


class _Dispatch(torch.autograd.Function):
    """Sends tokens; what arrives are the rows, and their weights where there are some."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor | None, d: Calls, send: Callable[[], Output], out: list[Output]
    ) -> Any:
        output = send()
        out.append(output)
        ctx.dispatcher, ctx.tokens = d, x.shape[0]
        ctx.save_for_backward(_token(output))
        ctx.set_materialize_grads(False)
        rows = kinds(d).part(output, "rows")
        if d._float8:
            ctx.mark_non_differentiable(rows)
        return rows if weights is None else (rows, kinds(d).part(output, "row_weights"))

    @staticmethod
    @once("a dispatch")
    def backward(ctx: Any, d_rows: Tensor | None, d_row_weights: Tensor | None = None) -> Any:  # type: ignore[override]
        (token,) = ctx.saved_tensors  # which holds the output
        d = ctx.dispatcher
        dx, d_weights = dispatch_backward(d, d_rows, d_row_weights, int(token[0]), ctx.tokens)
        return None if d._float8 else dx.to(kinds(d).token), d_weights, None, None, None


@named("dispatch backward")
def dispatch_backward(
    d: Calls, d_rows: Tensor | None, d_row_weights: Tensor | None, handle: int, tokens: int
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the tokens, in the type of combines, and of their weights, where those of rows are given."""
    k = kinds(d)
    if d_rows is None:
        d_rows = torch.zeros((d.max_rows, d.hidden), dtype=k.sum, device=k.device)
    d_rows = aligned(d_rows.to(k.sum))
    dx = torch.empty((tokens, d.hidden), dtype=k.sum, device=k.device)
    d_weights = None
    if d_row_weights is not None:
        d_row_weights = d_row_weights.contiguous()
        d_weights = torch.empty((tokens, d.top_k), dtype=torch.float32, device=k.device)
    buffers = [*place(dx), *place(d_rows), *place(d_row_weights), *place(d_weights), 0, 0, 0, 0, 0, 0, 0, 0]
    d._combine_by(buffers, handle, 0, (1, UNWEIGHTED, False, False), (dx, d_rows, d_row_weights, d_weights))
    return dx, d_weights


def tokens_gradient(d: Calls, d_rows: Tensor, dispatched: Dispatched) -> Tensor:
    d_rows = _rows(d, "d_rows", d_rows, kinds(d).sum)
    output = dispatched._given()
    d._check_length("d_rows", d_rows.shape[0], output)
    return dispatch_backward(d, d_rows, None, output.alive(), dispatched.tokens)[0]


def _recorded(d: Calls, x: Tensor, weights: Tensor | None, send: Callable[[], Output]) -> Dispatched:
    """A dispatch with gradients, which send makes. Weights are those that come with the rows: others go back with combine."""
    if d._float8 and x.requires_grad:
        raise errors.Unsupported(
            "switchyard: tokens that become float8 have no gradient: detach() them, and use Dispatcher.dispatch_backward"
        )
    out: list[Output] = []
    made = _Dispatch.apply(x, weights, d, send, out)
    got = Dispatched(d, kinds(d), out[0], x.shape[0], weights, {})
    if isinstance(made, Tensor):
        got.rows = made
    else:
        got.rows, got._parts["row_weights"] = made
    return got


def _plainly(d: Calls, x: Tensor, output: Output) -> Dispatched:
    """A dispatch that was made without gradients."""
    return Dispatched(d, kinds(d), output, x.shape[0], None, {})


@named("dispatch")
def dispatch(d: Calls, x: Tensor, idx: Any, weights: Any, scales: Any, async_op: bool) -> Dispatched:
    x = _rows(d, "x", x, kinds(d).token)
    idx, weights = _choices(d, idx, weights, x.shape[0])
    beside = weights if d._weighs_rows else None
    if (x.requires_grad or (beside is not None and beside.requires_grad)) and torch.is_grad_enabled():
        got = _recorded(d, x, beside, lambda: _send(d, x, scales, idx, weights, async_op))
    else:
        got = _plainly(d, x, _send(d, x, scales, idx, weights, async_op))
    got._weights, got._half = weights, async_op
    return got


@named("redispatch")
def redispatch(d: Calls, x: Tensor, dispatched: Dispatched, scales: Any, async_op: bool) -> Dispatched:
    x = _rows(d, "x", x, kinds(d).token)
    if x.shape[0] != dispatched.tokens:
        raise errors.InvalidArgument(f"switchyard: x has {x.shape[0]} tokens, the dispatch had {dispatched.tokens}")
    output = dispatched._given()

    def send() -> Output:
        d._redispatch(x.data_ptr(), _scales_of(d, scales, x), output, x.shape[0], async_op, (x, scales))
        return output

    if "rows" in vars(dispatched):  # somebody has them: gradients that need what was there are refused
        written(dispatched.rows)
    gradients = x.requires_grad and torch.is_grad_enabled()
    got = _recorded(d, x, None, send) if gradients else _plainly(d, x, send())
    got._weights, got._parts, got._half = dispatched._weights, dispatched._parts, async_op
    return got


# Combine


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor | None, given: Tensor | None, first: Tensor | None, second: Tensor | None,
        d: Calls, output: Output, make: Callable[[], Tensor], weighting: int,
    ) -> Tensor:  # fmt: skip
        y = make()
        # Rows that are not weighted are not needed again, and those that are hold what they lie in.
        ctx.save_for_backward(_token(output), None if weighting == UNWEIGHTED else rows, given)
        ctx.dispatcher, ctx.weighting, ctx.shape = d, weighting, rows.shape
        ctx.weighed = weights is not None
        return y

    @staticmethod
    @once("a combine", lambda ctx: any(ctx.needs_input_grad[1:3]))  # the gradients of rows and weights depend on the weights
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        token, rows, given = ctx.saved_tensors
        d_rows, d_weights = combine_backward(ctx.dispatcher, dy, rows, given, int(token[0]), ctx.weighting, ctx.shape)
        by_choice = d_weights if ctx.weighting == DISPATCHED and ctx.weighed else None
        by_row = d_weights if ctx.weighting == GIVEN else None
        biases = (dy if need else None for need in ctx.needs_input_grad[3:5])
        return d_rows, by_choice, by_row, *biases, None, None, None, None


@named("combine backward")
def combine_backward(
    d: Calls, dy: Tensor, rows: Tensor | None, given: Tensor | None, handle: int, weighting: int, shape: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """The gradients of rows, and of what weighted them."""
    dy = aligned(dy)
    d_rows = torch.empty(shape, dtype=dy.dtype, device=dy.device)
    d_weights = None
    if weighting == GIVEN:
        d_weights = torch.zeros(given.shape, dtype=torch.float32, device=dy.device)  # type: ignore[union-attr]
    elif weighting != UNWEIGHTED:
        d_weights = torch.empty((dy.shape[0], d.top_k), dtype=torch.float32, device=dy.device)
    buffers = [*place(d_rows), *place(d_weights), *place(dy), *place(rows), *place(given)]
    d._combine_backward(buffers, handle, weighting, (d_rows, d_weights, dy, rows, given))
    return d_rows, d_weights


def _check_out(d: Calls, out: Any, tokens: int) -> None:
    """Refuse what a combine cannot write."""
    _plain(d, "out", out, kinds(d).sum)  # which would write to a copy of what is not contiguous
    d._check_out(out.shape, tokens)
    if not out.is_contiguous() or (out.is_cuda and out.data_ptr() % 16):
        raise errors.InvalidArgument("switchyard: combine: out is not contiguous, or does not begin at a multiple of 16 bytes")
    written(out)


@named("combine")
def combine(
    d: Calls, rows: Tensor, dispatched: Dispatched | Routing, weights: Any, weighted: bool, token_weights: Any, bias: Any,
    sum_weights: bool, ready: Any, out: Any, release: bool, async_op: bool,
) -> Any:  # fmt: skip
    weighting = d._weighting(weights, weighted, token_weights)
    k = kinds(d)
    rows = _rows(d, "rows", rows, k.sum)
    way: Output | Routing = dispatched if isinstance(dispatched, Routing) else dispatched._given()
    tokens, by_choice = dispatched.tokens, dispatched._weights
    n = rows.shape[0]
    if n != d.max_rows:
        d._check_length("rows", n, way)
    if weighting != DISPATCHED:
        by_choice = None
    asked = weights is None and bias is None and ready is None and out is None and not sum_weights
    if asked and weighting != OF_TOKENS:  # what is asked most, soonest
        gradients = rows.requires_grad or (by_choice is not None and by_choice.requires_grad)
        if not gradients or not torch.is_grad_enabled():
            y, size = rows.new_empty((tokens, d.hidden)), d._sum_bytes
            buffers = (y.data_ptr(), tokens * size, rows.data_ptr(), n * size, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
            if way is dispatched:
                d._check_by_routing(release, async_op, False)
            d._combine(buffers, way, (0, weighting, async_op, release), (y, rows))
            return Combining(dispatched, y, (y, rows)) if async_op else y
    biases: list[Any] = biases_of(bias)
    if weights is not None:
        weights = _plain(d, "weights", weights, torch.float32)
    biases = [_rows(d, "bias", b, k.sum) for b in biases]
    d._check_combine(n, tokens, None if weights is None else weights.shape, sum_weights, [b.shape for b in biases])
    first, second = (*biases, None, None)[:2]
    if ready is not None:
        ready = _plain(d, "ready", ready, torch.int32)
    if token_weights is not None:
        token_weights = _plain(d, "token_weights", token_weights, torch.float32)
        d._check_token_weights(token_weights.shape, tokens)
    if out is not None:
        _check_out(d, out, tokens)
    sums = torch.empty((tokens, d.top_k), dtype=torch.float32, device=k.device) if sum_weights else None

    def make() -> Tensor:
        y: Tensor = torch.empty((tokens, d.hidden), dtype=k.sum, device=k.device) if out is None else out
        held = (y, rows, weights, sums, first, second, ready, token_weights)
        buffers = [n for x in held for n in place(x)]
        d._combine(buffers, way, (0, weighting, async_op, release), held)
        return y

    inputs = (rows, by_choice, weights, first, second)
    if token_weights is not None and torch.is_grad_enabled() and (rows.requires_grad or token_weights.requires_grad):
        raise errors.Unsupported("switchyard: combine: token_weights, and gradients are asked for: give weights to dispatch")
    gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if way is dispatched:
        d._check_by_routing(release, async_op, gradients)
    if gradients:
        if release:
            raise errors.InvalidArgument("switchyard: combine: release, and gradients need the dispatch")
        if out is not None:
            raise errors.InvalidArgument("switchyard: combine: out, and gradients are asked for")
        y = _Combine.apply(*inputs, d, way, make, weighting)
    else:
        y = make()
    result = y if sums is None else (y, sums)
    return Combining(dispatched, result, (rows, weights, token_weights, biases, ready)) if async_op else result
