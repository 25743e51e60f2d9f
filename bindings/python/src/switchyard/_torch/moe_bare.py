"""Dispatch and combine without gradients, of torch tensors that are as the dispatcher wants them. Nothing is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._core.dispatched import OF_TOKENS, UNWEIGHTED, Combining, Dispatched, Result, Routing
from .._core.dispatcher import Calls
from .moe import aligned, kinds, place
from .profile import named
from .tensors import written


@named("dispatch")
def deliver(
    d: Calls, x: Tensor, idx: Tensor, weights: Tensor | None, scales: Tensor | None, length: int | None, choices: bool
) -> Result:
    """A dispatch without gradients, of tensors that are as the dispatcher wants them, and all that it leaves; with choices also
    a copy of idx, in its lists."""
    x = aligned(x)
    at = 0 if weights is None else weights.data_ptr()
    beside = (0, 0) if scales is None else (scales.data_ptr(), scales.numel() * 4)
    held = (x, idx, weights, scales)
    return d._deliver(kinds(d), x.data_ptr(), beside, idx.data_ptr(), at, x.shape[0], length, choices, held)


@named("combine")
def bring(
    d: Calls, rows: Tensor, way: Dispatched | Routing, *, weights: Tensor | None = None, token_weights: Tensor | None = None,
    biases: Sequence[Tensor] = (), out: Tensor | None = None, async_op: bool = False,
) -> Any:  # fmt: skip
    """A combine without gradients, of tensors that are as the dispatcher wants them. Rows by token are not weighted: with
    weights [rows, top_k] there are also their sums; rows by expert are weighted with token_weights."""
    rows, tokens = aligned(rows), way.tokens
    y = rows.new_empty((tokens, d.hidden)) if out is None else out
    if out is not None:
        written(out)
    buffers = [y.data_ptr(), tokens * d._sum_bytes, rows.data_ptr(), rows.shape[0] * d._sum_bytes]
    sums, held = None, (y, rows, weights, token_weights, biases)  # type: Tensor | None, Any
    if weights is not None:
        sums = weights.new_empty((tokens, d.top_k))
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
    buffers += (0, 0, *place(token_weights))
    weighting = UNWEIGHTED if token_weights is None else OF_TOKENS
    d._combine(buffers, way if isinstance(way, Routing) else way._output, (0, weighting, async_op, False), held)
    result = y if sums is None else (y, sums)
    return Combining(way, result, held) if async_op else result
