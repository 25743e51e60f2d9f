"""A dispatcher's calls on numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import errors
from .._core.arguments import type_of
from .._core.dispatched import BESIDE_ROWS, ROUTING_ALIGN, Combining, Dispatched, Output, Parts, Routing, biases_of
from .._core.dispatcher import Calls


class Arrays:
    """A dispatcher for arrays. It is made for a call, and lives with what that leaves."""

    def __init__(self, d: Calls) -> None:
        self._calls = d
        self._dtype: Any = None  # of the tokens

    def dispatch(self, x: Any, idx: Any, weights: Any, scales: Any, async_op: bool) -> Dispatched:
        d = self._calls
        x = self._rows("x", x, d.dtype)
        self._dtype = x.dtype
        idx = np.asarray(idx)
        if idx.dtype.kind not in "iu" and idx.size:
            raise errors.InvalidType(f"switchyard: experts is {idx.dtype}, want integers")
        kept = np.iinfo(d.index_dtype)
        if idx.size and (idx.max() > kept.max or idx.min() < kept.min):
            value = idx.max() if idx.max() > kept.max else idx.min()
            kind = d.index_dtype
            raise errors.InvalidArgument(f"switchyard: experts has {value}, and the dispatcher takes indices of {kind}")
        idx = np.ascontiguousarray(idx, d.index_dtype)
        weights = None if weights is None else np.ascontiguousarray(weights, np.float32)
        d._check_choices(x.shape[0], idx.shape, None if weights is None else weights.shape)
        scales = self._scales(scales)
        at = 0 if weights is None else weights.ctypes.data
        held = (x, idx, weights, scales)
        output = d._dispatch(x.ctypes.data, _place(scales), idx.ctypes.data, at, x.shape[0], async_op, held)
        got = Dispatched(d, self, output, x.shape[0], weights, {})
        got._half = async_op
        got.rows = self.rows(output)
        return got

    def redispatch(self, x: Any, dispatched: Dispatched, scales: Any, async_op: bool) -> Dispatched:
        d = self._calls
        x, output = self._rows("x", x, d.dtype), dispatched._output
        if x.shape[0] != dispatched.tokens:
            raise errors.InvalidArgument(f"switchyard: x has {x.shape[0]} tokens, the dispatch had {dispatched.tokens}")
        scales = self._scales(scales)
        d._redispatch(x.ctypes.data, _place(scales), output, x.shape[0], async_op, (x, scales))
        got = Dispatched(d, self, output, dispatched.tokens, dispatched._weights, dispatched._parts)
        got.rows, got._half = dispatched.rows, async_op
        return got

    def combine(
        self, rows: Any, dispatched: Dispatched | Routing, weights: Any, weighted: bool, token_weights: Any,
        bias: Any, sum_weights: bool, ready: Any, out: Any, release: bool, async_op: bool,
    ) -> Any:  # fmt: skip
        d = self._calls
        rows = self._rows("rows", rows, d.combine_dtype)
        way: Output | Routing = dispatched if isinstance(dispatched, Routing) else dispatched._output
        d._check_length("rows", rows.shape[0], way)
        if isinstance(way, Routing):
            d._check_by_routing(release, async_op, False)
        if ready is not None:
            raise errors.Unsupported("switchyard: combine: ready of arrays")
        weighting = d._weighting(weights, weighted, token_weights)
        late = None if token_weights is None else np.ascontiguousarray(token_weights, np.float32)
        if late is not None:
            d._check_token_weights(late.shape, dispatched.tokens)
        given = None if weights is None else np.ascontiguousarray(weights, np.float32)
        biases = [self._rows("bias", b, d.combine_dtype) for b in biases_of(bias)]
        shape = None if given is None else given.shape
        d._check_combine(rows.shape[0], dispatched.tokens, shape, sum_weights, [b.shape for b in biases])
        if out is not None:
            self._check_out(out, rows.dtype, dispatched.tokens)
        y = np.empty((dispatched.tokens, d.hidden), rows.dtype) if out is None else out
        sums = np.zeros((dispatched.tokens, d.top_k), np.float32) if sum_weights else None
        held = [y, rows, given, sums, *biases, *(None,) * (3 - len(biases)), late]
        buffers = [n for a in held for n in _place(a)]
        d._combine(buffers, way, (0, weighting, async_op, release), held)
        result = (y, sums) if sum_weights else y
        return Combining(dispatched, result, held) if async_op else result

    def rows(self, output: Output) -> Any:
        """The rows of an output, of the type of the tokens, or bytes where they became float8."""
        d = self._calls
        return self.part(output, "rows").view(self._dtype if d.row_dtype == d.dtype else np.uint8)

    def capturing(self) -> bool:
        """Nothing captures calls on arrays."""
        return False

    def beside(self, parts: Parts, length: int) -> tuple[list[Any], list[int]]:
        """Memory for parts of an output."""
        made: list[Any] = []
        places: list[int] = []
        d = self._calls
        for name, each, tail in parts:
            if not each:
                made.append(None)
                places += (0, 0)
                continue
            kind: Any = d._shape(name, 0)[0]
            if name == "rows":
                kind = self._dtype if d.row_dtype == d.dtype else np.uint8
            x = np.empty((length, *tail), kind)
            made.append(x)
            places += (x.ctypes.data, length * each)
        return made, places

    def room(self, size: int) -> tuple[Any, int]:
        """Memory for a routing."""
        memory = np.empty(size + ROUTING_ALIGN - 1, np.uint8)
        return memory, -(-memory.ctypes.data // ROUTING_ALIGN) * ROUTING_ALIGN

    def within(self, memory: Any, at: int, size: int, name: str) -> Any:
        """A part of an output that lies in memory for a routing."""
        begin = at - memory.ctypes.data
        part = memory[begin : begin + size].view(self._calls._shape(name, size)[0])
        return part.reshape(-1, 2) if name == "sources" else part

    def part(self, output: Output, name: str) -> Any:
        """A part of an output as an array, as long as rows came."""
        d = self._calls
        _, size = output.slot.parts[name]
        kind, shape = d._shape(name, size)
        flat = np.frombuffer(output.memory(name), np.uint8)
        items: Any = flat.reshape(d.max_rows, -1) if name == "rows" else flat.view(kind).reshape(shape)
        if name not in BESIDE_ROWS:
            return items
        output.counts = output.counts or output.host()
        rows = output.counts.rows
        return d._scales(items, rows, d.max_rows) if name == "scales" else items[:rows]

    def _rows(self, name: str, x: Any, dtype: str) -> Any:
        x = np.ascontiguousarray(x)
        if str(x.dtype) != dtype:
            raise errors.InvalidType(f"switchyard: {name} is {x.dtype}, the dispatcher was made for {dtype}")
        self._calls._check_rows(name, x.shape)
        return x

    def _check_out(self, out: Any, dtype: Any, tokens: int) -> None:
        """Refuse what a combine cannot write."""
        if not isinstance(out, np.ndarray) or out.dtype != dtype:
            kind = f"an array of {out.dtype}" if isinstance(out, np.ndarray) else type_of(out)
            raise errors.InvalidType(f"switchyard: combine: out is {kind}, want an array of {dtype}")
        self._calls._check_out(out.shape, tokens)
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise errors.InvalidArgument("switchyard: combine: out is not contiguous, or read-only")

    def _scales(self, scales: Any) -> Any:
        return None if scales is None else np.ascontiguousarray(scales, ("float32", "int32")[self._calls._exponents])


def _place(x: Any) -> tuple[int, int]:
    return (0, 0) if x is None else (x.ctypes.data, x.nbytes)
