"""Dispatch and combine without gradients, of torch tensors that are as the dispatcher wants them. Nothing is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._core.dispatched import OF_TOKENS, UNWEIGHTED, Combining, Dispatched, Result, Routing
from .._core.dispatcher import Calls
from .moe import aligned, kinds, place
from .operators import delivers
from .profile import profiled, span
from .tensors import written


def delivery(d: Calls) -> Callable[..., Result]:
    """The function that makes the deliveries of a dispatcher, by an operator where they are usual."""
    kinds(d)
    return delivers(d, partial(deliver, d))


def deliver(
    d: Calls, x: Tensor, idx: Tensor, weights: Tensor | None, scales: Tensor | None, length: int | None, choices: bool
) -> Result:
    """A dispatch without gradients, of tensors that are as the dispatcher wants them, and all that it leaves; with choices also
    a copy of idx, in its lists."""
    if d._index >= 0:
        x = aligned(x)
    at = 0 if weights is None else weights.data_ptr()
    beside = (0, 0) if scales is None else (scales.data_ptr(), scales.numel() * 4)
    side, held = d._torch or kinds(d), (x, idx, weights, scales)
    call = (side, x.data_ptr(), beside, idx.data_ptr(), at, x.shape[0], length, choices, held)
    if not profiled():
        return d._deliver(*call)
    with span("dispatch"):
        return d._deliver(*call)


def lease(d: Calls, x: Tensor, idx: Tensor, first: bool) -> tuple[Dispatched, Tensor]:
    """A dispatch by expert without gradients and weights, or its first half, and the choices of each expert in memory of their
    own. It is what an operator makes of tensors that are as usual."""
    if d._index >= 0:
        x = aligned(x)
    local = len(d._local_experts)
    numbers = torch.empty(2 * local + 3 + d._ranks, dtype=torch.int32, device=x.device)
    told = (numbers.data_ptr(), 4 * numbers.numel())
    call = (x.data_ptr(), (0, 0), idx.data_ptr(), 0, x.shape[0], first, (x, idx, numbers), told)
    if not profiled():
        output = d._dispatch(*call)
    else:
        with span("dispatch"):
            output = d._dispatch(*call)
    got = Dispatched(d, d._torch or kinds(d), output, x.shape[0], None, {})
    got._half = first
    return got, numbers[2 : local + 2]


def bring(
    d: Calls, rows: Tensor, way: Dispatched | Routing, *, weights: Tensor | None = None, token_weights: Tensor | None = None,
    biases: Sequence[Tensor] = (), out: Tensor | None = None, async_op: bool = False,
) -> Any:  # fmt: skip
    """A combine without gradients, of tensors that are as the dispatcher wants them; rows may have any extents before the last.
    Rows by token are not weighted: with weights [rows, top_k] there are also their sums. Rows by expert are weighted with
    token_weights."""
    if d._operated is not None and weights is None and not biases:
        weighting = UNWEIGHTED if token_weights is None else OF_TOKENS
        came = rows.numel() // d.hidden
        brought = d._operated.bring(rows, way, came, weighting, token_weights, False, out, async_op)
        if brought is not None:
            return brought
    if d._index >= 0:
        rows = aligned(rows)
    tokens, each = way._tokens, d._sum_bytes
    if out is None:
        y = rows.new_empty(tokens, d.hidden)  # which is read sooner than a tuple
    else:
        y = out
        written(out)
    buffers = [y.data_ptr(), tokens * each, rows.data_ptr(), rows.numel() // d.hidden * each]
    sums, held = None, (y, rows, weights, token_weights, biases)  # type: Tensor | None, Any
    if weights is not None:
        sums = weights.new_empty(tokens, d.top_k)
        held = (held, sums)
        buffers += (*place(weights), *place(sums))
    else:
        buffers += (0, 0, 0, 0)
    if biases:
        biases = [aligned(b) for b in biases]
        held = (held, biases)
        buffers += (*place(biases[0]), *(place(biases[1]) if len(biases) > 1 else (0, 0)))
    else:
        buffers += (0, 0, 0, 0)
    weighting = UNWEIGHTED
    if token_weights is None:
        buffers += (0, 0, 0, 0)
    else:
        weighting = OF_TOKENS
        buffers += (0, 0, token_weights.data_ptr(), tokens * d.top_k * 4)
    handle, routing = (0, way._name) if type(way) is Routing else (way._output.alive(), 0)  # type: ignore[union-attr]
    if not profiled():
        d._combine_by(buffers, handle, routing, (0, weighting, async_op, False), held)
    else:
        with span("combine"):
            d._combine_by(buffers, handle, routing, (0, weighting, async_op, False), held)
    result = y if sums is None else (y, sums)
    return Combining(way, result, held) if async_op else result
