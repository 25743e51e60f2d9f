"""Tokens to their experts and back: :class:`Dispatcher`, for torch tensors with gradients and for numpy arrays."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import weakref
from collections.abc import Sequence
from ctypes import byref, c_int64, c_uint64
from typing import Any

from . import errors
from ._arguments import integer
from ._comm import DTYPES, SLICE, Communicator, memory

__all__ = ["Dispatched", "Dispatcher"]

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _dtype_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name.startswith("<class "):  # numpy.float32 and the like
        name = dtype.__name__
    if name not in _BYTES:
        raise errors.InvalidType(f"switchyard: dtype is {dtype}, want float32, bfloat16 or float16")
    return name


def _placement(placement: Any) -> list[list[int]]:
    try:
        lists = [list(ranks) for ranks in placement]
    except TypeError:
        raise errors.InvalidType(f"switchyard: placement is {placement!r}, want a list of ranks for every expert") from None
    return [[integer("placement", rank) for rank in ranks] for ranks in lists]


class Dispatched:
    """A dispatch: the rows that this rank's experts got, and the way back.

    ``rows`` lie expert by expert: expert ``experts[i]`` has ``counts[i]`` rows from row ``offsets[i]`` on, ordered by the
    rank they come from and then by token. The output they lie in is given back to the dispatcher when neither this object
    nor a tensor on it nor a gradient that needs it is left.
    """

    rows: Any
    counts: list[int]
    offsets: list[int]
    experts: list[int]
    tokens: int

    def __init__(self, dispatcher: Dispatcher, output: _Output, tokens: int, weights: Any) -> None:
        self._dispatcher, self._output, self.tokens, self._weights = dispatcher, output, tokens, weights
        self.counts, self.offsets, self.experts = output.counts, output.offsets, output.experts

    @property
    def num_rows(self) -> int:
        """Rows of the output, padding included."""
        return self._output.num_rows

    def expert_rows(self) -> list[Any]:
        """The rows of each local expert, as views of ``rows``."""
        return [self.rows[first : first + n] for first, n in zip(self.offsets, self.counts)]


class _Output:
    """The output of a dispatch, given back with its last reference."""

    def __init__(self, dispatcher: Dispatcher, handle: int) -> None:
        lib, local = dispatcher.comm._lib, dispatcher._most_experts
        address, nbytes, rows, experts = c_uint64(), c_int64(), c_int64(), c_int64()
        counts, first, which = ((c_int64 * local)() for _ in range(3))
        lib.check(lib.rows(handle, byref(address), byref(nbytes), byref(rows), byref(experts), counts, first, which, local))
        self.handle, self.address, self.nbytes, self.num_rows = handle, address.value, nbytes.value, rows.value
        n = experts.value
        self.counts, self.offsets, self.experts = counts[:n], first[:n], which[:n]
        weakref.finalize(self, _release, lib, handle).atexit = False
        dispatcher._outputs.add(self)

    def memory(self) -> memoryview:
        return memory(self.address, self.nbytes, self)


def _release(lib: Any, handle: int) -> None:
    from ._native import usable

    if usable():
        lib.release(handle)


class Dispatcher:
    """Carries tokens to their experts and back, for one group of ranks.

    Making one is collective, and all ranks pass the same arguments:

    - ``experts`` in all, of which a token can have ``top_k``; ``hidden`` elements a row, of ``dtype`` (float32, bfloat16
      or float16, of torch or numpy or as a name);
    - ``max_tokens``: the most tokens that one rank has in a call;
    - ``layout``: "flat" puts each expert's rows after those of the one before, at multiples of ``align`` rows, in at most
      ``max_rows`` in all; "padded" gives each expert ``capacity`` rows. Rows that belong to no token are zero.
    - ``placement``: which ranks have each expert, a list of ranks for every expert; by default the first experts are on
      rank 0, the next on rank 1 and so on;
    - ``handles``: how many dispatches can be alive at a time. Training needs one for every MoE layer.
    """

    def __init__(
        self,
        experts: int,
        top_k: int,
        hidden: int,
        *,
        max_tokens: int = 4096,
        dtype: Any = "float32",
        layout: str = "flat",
        align: int = 1,
        capacity: int = 0,
        max_rows: int = 0,
        placement: Sequence[Sequence[int]] | None = None,
        handles: int = 4,
        group: Any = None,
    ) -> None:
        from ._array_calls import communicator

        if layout not in ("flat", "padded"):
            raise errors.InvalidArgument(f'switchyard: layout {layout!r}, want "flat" or "padded"')
        self.dtype = _dtype_name(dtype)
        self.experts, self.top_k = integer("experts", experts), integer("top_k", top_k)
        self.hidden, self.max_tokens = integer("hidden", hidden), integer("max_tokens", max_tokens)
        options: dict[str, Any] = {
            "Experts": self.experts,
            "TopK": self.top_k,
            "Hidden": self.hidden,
            "MaxTokens": self.max_tokens,
            "DType": DTYPES[self.dtype],
            "Padded": layout == "padded",
            "Align": integer("align", align) if layout == "flat" else 0,
            "Capacity": integer("capacity", capacity),
            "MaxRows": integer("max_rows", max_rows),
            "Handles": integer("handles", handles),
        }
        if placement is not None:
            options["Placement"] = _placement(placement)
        self.comm: Communicator = communicator(group)
        lib, ticket = self.comm._lib, c_uint64()
        self._outputs: weakref.WeakSet[_Output] = weakref.WeakSet()
        self._most_experts = max(self.experts, 1)
        code = lib.dispatcher(self.comm._handle, json.dumps(options).encode(), ticket)
        self._handle = self.comm._control(code, ticket)
        self._closed = False
        self.comm._dispatchers.add(self)

    # What lies below: memory

    def _call(self, function: Any, keep: object, *arguments: Any) -> int:
        ticket = c_uint64()
        comm = self.comm
        code = function(comm._handle, 0, self._handle, *arguments, SLICE, ticket)
        if code == 1:
            comm._hold(ticket.value, keep)  # an interrupted wait leaves it under way
        return comm._control(code, ticket)

    def _dispatch(self, x: int, nbytes: int, idx: int, weights: int, n: int, keep: object) -> _Output:
        try:
            handle = self._call(self.comm._lib.dispatch, keep, x, nbytes, idx, weights, n)
        except errors.NoHandle:
            gc.collect()  # outputs may hang in cycles
            handle = self._call(self.comm._lib.dispatch, keep, x, nbytes, idx, weights, n)
        return _Output(self, handle)

    def _combine(self, y: int, y_bytes: int, rows: int, rows_bytes: int, output: _Output, backward: bool, keep: object) -> None:
        self._call(self.comm._lib.combine, keep, y, y_bytes, rows, rows_bytes, output.handle, int(backward))

    def _check_rows(self, name: str, shape: Sequence[int]) -> None:
        """Refuse what is not rows of the dispatcher's."""
        if len(shape) != 2 or shape[1] != self.hidden:
            raise errors.InvalidArgument(f"switchyard: {name} has shape {tuple(shape)}, want rows of {self.hidden}")

    def _check_choices(self, tokens: int, idx: Sequence[int], weights: Sequence[int]) -> None:
        want = (tokens, self.top_k)
        if tuple(idx) != want or tuple(weights) != want:
            raise errors.InvalidArgument(
                f"switchyard: idx is {tuple(idx)} and weights {tuple(weights)}, want {want} for both"
            )

    def _dispatched(self, output: _Output, tokens: int, weights: Any) -> Dispatched:
        return Dispatched(self, output, tokens, weights)

    # The calls

    def dispatch(self, x: Any, idx: Any, weights: Any) -> Dispatched:
        """Send each token's row of ``x`` to its experts.

        ``x`` is [tokens, hidden]; ``idx`` [tokens, top_k] are the experts of each token, -1 for none;
        ``weights``, of that shape too, are what :meth:`combine` multiplies their rows by. Tokens may be none and differ
        from rank to rank. The gradient of ``x`` is the sum of those of its rows; that of ``weights`` comes with
        :meth:`combine`.
        """
        if _is_tensor(x):
            from . import _torch_moe

            return _torch_moe.dispatch(self, x, idx, weights)
        import numpy as np

        x = _rows(self, "x", x)
        idx = np.asarray(idx)
        if idx.dtype.kind not in "iu" and idx.size:
            raise errors.InvalidType(f"switchyard: idx is {idx.dtype}, want integers")
        idx, weights = np.ascontiguousarray(idx, np.int32), np.ascontiguousarray(weights, np.float32)
        self._check_choices(x.shape[0], idx.shape, weights.shape)
        output = self._dispatch(x.ctypes.data, x.nbytes, idx.ctypes.data, weights.ctypes.data, idx.size, (x, idx, weights))
        d = self._dispatched(output, x.shape[0], weights)
        empty = np.empty((0, self.hidden), x.dtype)
        d.rows = np.frombuffer(output.memory(), x.dtype).reshape(-1, self.hidden) if output.nbytes else empty
        return d

    def combine(self, rows: Any, dispatched: Dispatched) -> Any:
        """Bring rows back: the result is [tokens, hidden], for each token the sum of weight times row over its experts.

        ``rows`` is laid out like ``dispatched.rows``, which it may be. Sums are made in float32.
        """
        if not isinstance(dispatched, Dispatched):
            raise errors.InvalidType(f"switchyard: dispatched is a {type(dispatched).__name__}, want what dispatch returned")
        if dispatched._dispatcher is not self:
            raise errors.InvalidArgument("switchyard: dispatched is of another dispatcher")
        if _is_tensor(rows):
            from . import _torch_moe

            return _torch_moe.combine(self, rows, dispatched)
        import numpy as np

        rows = _rows(self, "rows", rows)
        y = np.empty((dispatched.tokens, self.hidden), rows.dtype)
        self._combine(y.ctypes.data, y.nbytes, rows.ctypes.data, rows.nbytes, dispatched._output, False, (y, rows))
        return y

    @property
    def max_rows(self) -> int:
        """The most rows that this rank can get in one dispatch."""
        rows = c_int64()
        self.comm._lib.check(self.comm._lib.dispatcher_info(self._handle, byref(rows), None, 0))
        return rows.value

    def traffic(self) -> list[int]:
        """Bytes of rows sent to each rank so far."""
        rows, sent = c_int64(), (c_int64 * self.comm.size)()
        self.comm._lib.check(self.comm._lib.dispatcher_info(self._handle, byref(rows), ctypes.addressof(sent), self.comm.size))
        return list(sent)

    def close(self) -> None:
        """Give the memory back, together with all ranks. No output may be in use."""
        if self._closed:
            return
        if self._outputs:
            raise errors.InvalidArgument(f"switchyard: close: {len(self._outputs)} dispatches of this dispatcher are alive")
        self._closed = True
        ticket = c_uint64()
        comm = self.comm
        comm._control(comm._lib.dispatcher_close(comm._handle, self._handle, ticket), ticket)


def _is_tensor(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _rows(d: Dispatcher, name: str, x: Any) -> Any:
    import numpy as np

    x = np.ascontiguousarray(x)
    if str(x.dtype) != d.dtype:
        raise errors.InvalidType(f"switchyard: {name} is {x.dtype}, the dispatcher was made for {d.dtype}")
    d._check_rows(name, x.shape)
    return x
