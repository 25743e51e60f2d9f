"""Dispatchers on raw memory: the library's calls, and what is asked of shapes. Memory and CUstreams are integers here."""

from __future__ import annotations

import gc
import json
from array import array
from collections.abc import Callable, Sequence
from ctypes import byref, c_int64, c_uint64
from typing import Any, NamedTuple

from .. import errors
from . import abi, options
from .arguments import integer, seconds, type_of
from .comm import Communicator
from .dispatched import (
    COUNTS,
    DISPATCHED,
    GIVEN,
    OF_TOKENS,
    UNWEIGHTED,
    Dispatched,
    Output,
    Routing,
    Side,
    Slot,
)
from .native import AGAIN, SLICE
from .places import Place
from .taking import Taking


class Counters(NamedTuple):
    """Counters of a rank's calls so far."""

    #: How many choices of this rank's tokens each expert got.
    choices: list[int]
    #: Bytes of rows and scales sent to each rank.
    bytes: list[int]
    #: Nanoseconds in which this rank had nothing to do but wait for each rank.
    waited: list[int]


class Calls(Taking):
    """A dispatcher of a place. Its attributes are its options, which moe.Dispatcher lists."""

    #: By which compiled graphs know it.
    name: str
    #: The maker of tensors, once the first is used, and then the calls that are operators.
    _torch: Any = None
    _operated: Any = None

    def __init__(self, place: Place, values: dict[str, Any], stream: Callable[[int], int] | None) -> None:
        """Make it, together with all ranks. values are checked options, and stream says which CUstream is current on a GPU."""
        self.layout, self.dtype, self.combine_dtype = values["layout"], values["dtype"], values["combine_dtype"]
        self.index_dtype, self.experts, self.top_k = values["index_dtype"], values["experts"], values["top_k"]
        self.hidden, self._align = values["hidden"], values["align"]
        self.by_token = options.LAYOUTS.index(self.layout) >= options.LAYOUTS.index("token_major")
        #: The type of the rows that arrive.
        self.row_dtype = "float8_e4m3fn" if values["quantize"] else self.dtype
        self._float8 = options.BYTES[self.row_dtype] == 1
        self._exponents, self._columns = values["scale_format"] == "ue8m0", values["scale_columns"]
        #: Each expert's scales are in columns of their own, and results have all rows that there is room for.
        self._whole = self._float8 and self._columns and self.layout in ("padded", "slab")
        self._scale_per_token, self._capacity = values["scale_per_token"], values["capacity"]
        blocks = 1 if self._scale_per_token else -(-self.hidden // 128)
        #: How many words the scales of a row take.
        self._scale_words = -(-blocks // 4) if self._exponents else blocks
        self._tells_sources, self._tells_landed = values["sources"], values["landed"]
        #: Rows lie elsewhere when the memory has grown.
        self._moves = values["share_memory"]
        self._weighs_rows = self.by_token or values["row_weights"]
        self.comm: Communicator = place._comm
        lib, ticket = self.comm._lib, c_uint64()
        text = json.dumps(options.encoded(values)).encode()
        self._handle = self.comm._control(lib.dispatcher(self.comm._handle, place._handle, text, ticket), ticket)
        self._closed = False
        self._slots: dict[int, Slot] = {}
        #: The GPU's ordinal, -1 for the host.
        self._index: int = getattr(place, "device", -1)
        self._stream: Any = stream
        lib.bind(self)
        self._token_bytes = self.hidden * options.BYTES[self.dtype]
        self._sum_bytes = self.hidden * options.BYTES[self.combine_dtype]
        self._choice_bytes = self.top_k * options.INDEX_BYTES[self.index_dtype]
        self._counted = values["host_counts"] or self._index < 0
        self.max_tokens, self.max_rows, _, self.routing_bytes, self._local_experts = self._info()
        self._ranks = self.comm.size
        self._groups = self._ranks if self.by_token else len(self._local_experts)
        self.comm._dispatchers.add(self)

    @property
    def local_experts(self) -> list[int]:
        """The experts of this rank, in the order of their rows."""
        return self._local_experts

    # The library's calls

    def _bind(self) -> None:
        """Take the library's functions."""
        lib, prefix = self.comm._lib, "enqueue_" if self._index >= 0 else ""
        names = ("dispatch", "combine", "combine_backward", "receive", "route")
        self._calls = [getattr(lib, prefix + name) for name in names]
        self._results = getattr(lib, prefix + "results")
        self._delivers = getattr(lib, prefix + "deliver"), lib.deliver
        self._expands, self._folds = getattr(lib, prefix + "expand"), getattr(lib, prefix + "fold")

    def _info(self) -> tuple[int, int, int, int, list[int]]:
        """The most tokens and rows of a dispatch, how many are alive, the bytes of a routing, and this rank's experts."""
        (tokens, rows, alive, routing, n), lib = (c_int64() for _ in range(5)), self.comm._lib
        local = array("q", bytes(8 * max(self.experts, 1)))
        out = (byref(tokens), byref(rows), byref(alive), byref(routing), byref(n), local.buffer_info()[0], len(local))
        lib.check(lib.dispatcher_info(self._handle, *out))
        return tokens.value, rows.value, alive.value, routing.value, local[: n.value].tolist()

    def _capturing(self) -> bool:
        """Whether calls go into a graph and do not run."""
        return self._torch is not None and self._torch.capturing()

    def _alive(self) -> int:
        return 0 if self._closed else self._info()[2]

    def _run(self, which: int, keep: object, *arguments: Any) -> int:
        """Make a call: on a GPU on the current stream, on the host wait for it and return its value."""
        if self._index >= 0:
            code = self._calls[which](self._handle, self._stream(self._index), *arguments, 0, None)
            if code:
                raise self.comm._lib.error(code)
            return 0
        ticket, comm = c_uint64(), self.comm
        code = self._calls[which](self._handle, 0, *arguments, SLICE, ticket)
        return comm._control(code, ticket) if code != AGAIN else comm._finish(code, ticket, keep)

    def _dispatch(
        self, x: int, scales: tuple[int, int], idx: int, weights: int, tokens: int, first: bool, keep: object,
        numbers: abi.Memory = (0, 0),
    ) -> Output:  # fmt: skip
        """Make a dispatch of tokens at addresses; numbers are memory of the caller for its counts, see dispatch.Tokens."""
        weighed = 4 * tokens * self.top_k if weights else 0
        call = abi.dispatch_call(
            (x, tokens * self._token_bytes), scales, (idx, tokens * self._choice_bytes), (weights, weighed), 0, first, numbers
        )
        if self._index >= 0 or first:
            made = self._occupy(0, keep, call)
            return Output(self, made, 0) if made else Output(self, call[abi.MADE], call[abi.ROWS])
        counts = self._make(call, None, True, keep)  # of the host's calls, which have ended
        output = Output(self, call[abi.MADE], call[abi.ROWS])
        output.counts = counts
        return output

    def _occupy(self, which: int, keep: object, call: array[int]) -> int:
        """Make a call that takes an output."""
        address = call.buffer_info()[0]
        try:
            return self._run(which, keep, address)
        except errors.NoHandle:
            gc.collect()  # outputs may hang in cycles
            return self._run(which, keep, address)

    def _route(self, routing: Routing) -> Output:
        """Take an output whose calls go by a routing."""
        call = abi.route_call(routing._name)
        made = self._occupy(4, routing, call)
        return Output(self, made or call[abi.ROUTE_MADE], call[abi.ROUTE_ROWS], routing)

    def _redispatch(self, x: int, scales: tuple[int, int], output: Output, tokens: int, first: bool, keep: object) -> None:
        x_at = (x, tokens * self._token_bytes)
        call = abi.dispatch_call(x_at, scales, (0, 0), (0, 0), output.alive(), first)
        self._run(0, keep, call.buffer_info()[0])

    def _combine(
        self, buffers: Sequence[int], way: Output | Routing, how: tuple[int, int, bool, bool], keep: object
    ) -> None:
        """Make a combine by an output or a routing. buffers are addresses and bytes of y, rows, weights, summed weights, two
        biases, words that say what is ready and weights of tokens; how is whether it is the gradient of a dispatch, what rows
        are weighted with, whether it is the first half, and whether the output is given back."""
        if isinstance(way, Routing):
            self._combine_by(buffers, 0, way._name, how, keep)
            return
        self._combine_by(buffers, way.alive(), 0, how, keep)
        way.released = way.released or how[3]

    def _combine_by(
        self, buffers: Sequence[int], handle: int, routing: int, how: tuple[int, int, bool, bool], keep: object
    ) -> None:
        call = abi.combine_call(buffers, handle, routing, *how)
        self._run(1, keep, call.buffer_info()[0])

    def _combine_backward(self, buffers: Sequence[int], handle: int, weighting: int, keep: object) -> None:
        call = abi.backward_call(buffers, handle, weighting)
        self._run(2, keep, call.buffer_info()[0])

    def _receive(self, output: Output, combine: bool, keep: object) -> None:
        self._run(3, keep, output.alive(), combine)

    def _expand(self, buffers: Sequence[int], align: int, length: int) -> None:
        """Make of rows one for each token rows one for each choice. buffers are addresses and bytes of abi.EXPANSION."""
        self._alone(self._expands, abi.expand_call(buffers, align, length))

    def _fold(self, buffers: Sequence[int], dtype: int) -> None:
        """Sum such rows for each token. buffers are addresses and bytes of abi.FOLDING."""
        self._alone(self._folds, abi.fold_call(buffers, dtype))

    def _part(self, side: Side, output: Output, name: str) -> Any:
        """A part of an output: a list of the host's, or what a side makes of it."""
        if not output.slot.parts[name][1]:
            raise errors.InvalidArgument(f"switchyard: this dispatcher has no {name}")
        if self._index < 0 and name in COUNTS:
            output.counts = output.counts or output.host()
            return getattr(output.counts, name)
        return side.part(output, name)

    # Shapes

    def _shape(self, name: str, size: int) -> tuple[str, tuple[int, ...]]:
        """The type and the shape of a part that has this number of bytes in all."""
        if name == "rows":
            return self.row_dtype, (self.max_rows, self.hidden)
        if name == "scales":
            return ("float32", "int32")[self._exponents], (size // 4,)
        if name == "indices":
            return "int64", (self.max_rows, self.top_k)
        if name == "choices":
            return self.index_dtype, (size // self._choice_bytes, self.top_k)
        if name == "row_weights":
            return "float32", (self.max_rows, self.top_k) if self.by_token else (self.max_rows,)
        return "int32", (self.max_rows, 2) if name == "sources" else (size // 4,)

    def _scales(self, words: Any, rows: int, room: int) -> Any:
        """The first of scales for room rows as [rows, words], in a layout by padded experts as [experts, capacity, words]."""
        n = self._scale_words
        if not self._columns:
            return words.reshape(room, n)[:rows]
        if self.layout in ("padded", "slab"):
            return words.reshape(-1, n, self._row_capacity()).swapaxes(1, 2)
        return words.reshape(n, room).swapaxes(0, 1)[:rows]

    def _row_capacity(self) -> int:
        """How many rows each expert has in a padded layout."""
        rows = self.comm.size * self.max_tokens
        if self.layout == "padded":
            return self._capacity or rows
        align = self._align or (64 if self._float8 else 1)
        return -(-rows // align) * align

    def _check_rows(self, name: str, shape: Sequence[int]) -> None:
        """Refuse what is not rows of the dispatcher's."""
        if len(shape) != 2 or shape[1] != self.hidden:
            raise errors.InvalidArgument(f"switchyard: {name} has shape {tuple(shape)}, want rows of {self.hidden}")

    def _check_choices(self, tokens: int, idx: Sequence[int], weights: Sequence[int] | None) -> None:
        want = (tokens, self.top_k)
        if tuple(idx) != want or (weights is not None and tuple(weights) != want):
            beside, both = ("", "") if weights is None else (f" and weights {tuple(weights)}", " for both")
            raise errors.InvalidArgument(f"switchyard: experts is {tuple(idx)}{beside}, want {want}{both}")

    def _check_way(self, way: Any) -> None:
        if isinstance(way, Routing):
            self._check_routing(way)
        else:
            self._check_dispatched(way)

    def _check_dispatched(self, dispatched: Any) -> None:
        if not isinstance(dispatched, Dispatched):
            raise errors.InvalidType(f"switchyard: dispatched is {type_of(dispatched)}, want what dispatch returned")
        if dispatched._dispatcher is not self:
            raise errors.InvalidArgument("switchyard: dispatched is of another dispatcher")

    def _check_routing(self, routing: Any) -> None:
        if not isinstance(routing, Routing):
            raise errors.InvalidType(f"switchyard: routing is {type_of(routing)}, want what keep returned")
        if routing._dispatcher is not self:
            raise errors.InvalidArgument("switchyard: routing is of another dispatcher")

    def _check_out(self, shape: Sequence[int], tokens: int) -> None:
        if tuple(shape) != (tokens, self.hidden):
            raise errors.InvalidArgument(f"switchyard: combine: out is {tuple(shape)}, want {(tokens, self.hidden)}")

    def _check_token_weights(self, shape: Sequence[int], tokens: int) -> None:
        want = (tokens, self.top_k)
        if tuple(shape) != want:
            raise errors.InvalidArgument(f"switchyard: combine: token_weights are {tuple(shape)}, want {want}")

    def _check_by_routing(self, release: bool, async_op: bool, gradients: bool) -> None:
        """Refuse what a combine by a routing cannot do."""
        if release or async_op:
            raise errors.InvalidArgument("switchyard: combine: release or async_op by a routing: it has no output, route first")
        if gradients:
            raise errors.Unsupported("switchyard: combine: gradients by a routing: route first, or detach the rows")

    def _check_length(self, name: str, rows: int, output: Output | Routing) -> None:
        """Refuse rows that are not those of a dispatch: all that there is room for, or as many as came. By a routing of whose
        rows the host knows nothing it is as many as its caller says that came."""
        if rows == self.max_rows or (rows < self.max_rows and isinstance(output, Routing) and output.counts is None):
            return
        if not self._counted:
            raise errors.InvalidArgument(f"switchyard: {name} has {rows} rows, the dispatcher {self.max_rows}")
        came = (output.counts or output.host()).rows
        if rows != came:
            raise errors.InvalidArgument(f"switchyard: {name} has {rows} rows, the dispatch had {came}")

    def _check_combine(
        self, rows: int, tokens: int, weights: Sequence[int] | None, sum_weights: bool, biases: Sequence[Sequence[int]]
    ) -> None:
        """Refuse an array whose shape does not go with this number of rows."""
        want = (rows, self.top_k) if self.by_token else (rows,)
        if weights is None and sum_weights:
            raise errors.InvalidArgument("switchyard: combine: sum_weights without weights")
        if weights is not None and tuple(weights) != want:
            raise errors.InvalidArgument(f"switchyard: combine: weights are {tuple(weights)}, want {want}")
        for n, _ in biases:
            if n != tokens:
                raise errors.InvalidArgument(f"switchyard: bias has {n} rows, the dispatch had {tokens} tokens")

    def _weighting(self, weights: Any, weighted: bool, token_weights: Any) -> int:
        if token_weights is not None:
            if weights is not None or not weighted or self.by_token:
                why = "rows by token" if self.by_token else "weights, or weighted=False"
                raise errors.InvalidArgument(f"switchyard: combine: token_weights and {why}")
            return OF_TOKENS
        if weights is not None and not weighted:
            raise errors.InvalidArgument("switchyard: combine: weights, and weighted=False")
        if self.by_token or not weighted:
            return UNWEIGHTED
        return DISPATCHED if weights is None else GIVEN

    # The whole

    def counters(self) -> Counters:
        """Counters of this rank's calls so far. It waits for no stream: on a GPU what has run is counted."""
        n, ranks, lib = self.experts, self.comm.size, self.comm._lib
        choices, sent, waited = (array("q", bytes(8 * k)) for k in (n, ranks, ranks))
        places = (choices.buffer_info()[0], n, sent.buffer_info()[0], waited.buffer_info()[0], ranks)
        lib.check(lib.dispatcher_counters(self._handle, *places))
        return Counters(choices.tolist(), sent.tolist(), waited.tolist())

    def traffic(self) -> list[int]:
        """Bytes of rows sent to each rank so far."""
        return self.counters().bytes

    def mask(self, rank: int) -> None:
        """Have the calls of all ranks go on without a rank, also those under way, as they do without one that dies: with
        ``masks=True``. Any rank calls it, at any time, also another thread of the rank itself. Calls of that rank raise
        :class:`switchyard.errors.Masked` until it comes back by :meth:`unmask`."""
        lib = self.comm._lib
        lib.check(lib.dispatcher_mask(self._handle, integer("rank", rank)))

    def masked(self) -> list[int]:
        """The ranks that calls go on without, in ascending order, as this rank knows."""
        bits, lib = c_uint64(), self.comm._lib
        lib.check(lib.dispatcher_masked(self._handle, byref(bits)))
        return [rank for rank in range(self.comm.size) if bits.value >> rank & 1]

    def unmask(self, timeout: float | None = None) -> int:
        """Have the others take this rank in again, which they do during one of their combines, and return how many calls of
        this dispatcher they have made by then: the next call is this rank's, too. Earlier dispatches can only be released, on
        all ranks. After ``timeout`` seconds, by default the group's, it is a :class:`switchyard.errors.TimedOut`, and the rank
        is masked as before."""
        within = 0 if timeout is None else max(int(seconds("timeout", timeout) * 1e6), 1)
        ticket, comm = c_uint64(), self.comm
        return comm._control(comm._lib.dispatcher_unmask(comm._handle, self._handle, within, byref(ticket)), ticket)

    def close(self) -> None:
        """Give the memory back, together with all ranks. No output may be in use."""
        if self._closed:
            return
        alive = self._alive()
        if alive:
            raise errors.InvalidArgument(
                f"switchyard: close: dispatches of this dispatcher are alive: {alive}. A result keeps its dispatch, and so do "
                "views on it (rows, expert_rows) and a gradient to come: `del` of all, or `release()`, ends it"
            )
        self._closed = True
        ticket = c_uint64()
        comm = self.comm
        comm._control(comm._lib.dispatcher_close(comm._handle, self._handle, ticket), ticket)
