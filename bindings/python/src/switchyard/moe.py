"""Tokens to their experts and back: :class:`Dispatcher`, for torch tensors with gradients and for numpy arrays."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import warnings
from array import array
from collections.abc import Sequence
from ctypes import byref, c_int64, c_uint64
from typing import Any, NamedTuple

from . import errors
from ._arguments import flag, integer, type_of
from ._comm import DTYPES, Communicator, Place
from ._dispatched import (
    BESIDE_ROWS,
    COUNTS,
    DISPATCHED,
    GIVEN,
    UNWEIGHTED,
    Combining,
    Dispatched,
    HostCounts,
    Output,
    Slot,
    biases_of,
    named,
)
from ._native import AGAIN, SLICE

__all__ = ["Combining", "Counters", "Dispatched", "Dispatcher", "HostCounts"]

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_INDEX_BYTES = {"int32": 4, "int64": 8}
_LAYOUTS = ("flat", "padded", "slab", "token_major", "rank_padded")
_SCALE_FORMATS = ("float32", "ue8m0")


def _dtype_name(argument: str, dtype: Any, names: Sequence[str]) -> str:
    name = str(dtype).removeprefix("torch.")
    if name.startswith("<class "):  # numpy.float32 and the like
        name = dtype.__name__
    if name not in names:
        raise errors.InvalidType(f"switchyard: {argument} is {dtype}, want {', '.join(names[:-1])} or {names[-1]}")
    return name


def _one_of(name: str, value: Any, values: Sequence[str]) -> int:
    if value not in values:
        *most, last = (f'"{v}"' for v in values)
        raise errors.InvalidArgument(f"switchyard: {name} {value!r}, want {', '.join(most)} or {last}")
    return values.index(value)


def _placement(placement: Any) -> list[list[int]]:
    try:
        lists = [list(ranks) for ranks in placement]
    except TypeError:
        raise errors.InvalidType(f"switchyard: placement is {placement!r}, want a list of ranks for every expert") from None
    return [[integer("placement", rank) for rank in ranks] for ranks in lists]


class Counters(NamedTuple):
    """What a rank has done so far."""

    #: How many choices of this rank's tokens each expert got.
    choices: list[int]
    #: Bytes of rows and scales sent to each rank.
    bytes: list[int]
    #: Nanoseconds in which this rank had nothing to do but wait for each rank.
    waited: list[int]


class Dispatcher:
    """Carries tokens to their experts and back, for one group of ranks.

    Making one is collective, and all ranks pass the same arguments:

    - ``experts`` in all, of which a token can have ``top_k``; ``hidden`` elements a row, of ``dtype`` (float32, bfloat16,
      float16 or float8_e4m3fn, of torch or numpy or as a name);
    - ``max_tokens``: the most tokens that one rank has in a call;
    - ``layout``: "flat" puts each expert's rows after those of the one before, at multiples of ``align`` rows, in at most
      ``max_rows`` in all; "padded" gives each expert ``capacity`` rows. Padding is zero. "slab" gives each expert room for all
      tokens of all ranks, with undefined padding; tokens that have an expert twice need more, and can be an
      :class:`switchyard.errors.Overflow`. "token_major" has one row for a token and rank, at most ``max_rows``, those
      from each rank after those from the rank before; "rank_padded" likewise with ``max_tokens`` rows for each rank. There the
      caller applies the experts of ``indices`` with ``row_weights``, and hands back one row a token;
    - ``placement``: which ranks have each expert, a list of ranks for every expert; by default the first experts are on
      rank 0, the next on rank 1 and so on;
    - ``handles``: how many dispatches can be alive at a time. Training needs one for every MoE layer;
    - ``device``: the host, or a CUDA device whose tensors are carried; ``None`` is torch's default device;
    - ``index_dtype``: of expert indices, int64 or int32. Others are converted;
    - ``combine_dtype``: of what is combined, and of gradients; by default ``dtype``, or bfloat16 where that is float8;
    - ``quantize``: rows arrive as float8_e4m3fn with ``scales``, one for 128 elements, or for a row with ``scale_per_token``.
      They are float32 or, with ``scale_format="ue8m0"``, exponents of powers of two, four in an int32; with ``scale_columns``
      in column-major order. Tokens of float8 come with such scales, row-major;
    - ``float8_combine``: sums cross as float8 with scales; on GPUs that has run in an emulation only;
    - ``low_latency``: kernels for few tokens on GPUs: ``max_tokens`` to 256, any layout but "token_major";
    - ``row_weights``, ``sources`` and ``landed``: what :class:`Dispatched` has of that name;
    - ``host_counts``: a GPU tells the host how many rows came, see :meth:`Dispatched.host_counts`;
    - ``max_sms``: how many multiprocessors of a GPU a call takes at most; on the host it says nothing.

    What it was made with is in ``experts``, ``top_k``, ``hidden``, ``max_tokens``, ``layout``, and by name in ``dtype``,
    ``index_dtype`` and ``combine_dtype``. Beside these there are:

    - ``local_experts``: this rank's experts;
    - ``max_rows``: the most rows of a dispatch, and ``row_dtype``, their data type by name;
    - ``by_token``: whether a row is for a token and not for one of its experts;
    - ``comm``: the communicator; ``name``: what compiled graphs know the dispatcher by.
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
        device: Any = None,
        index_dtype: Any = "int64",
        combine_dtype: Any = None,
        quantize: bool = False,
        scale_per_token: bool = False,
        scale_format: str = "float32",
        scale_columns: bool = False,
        float8_combine: bool = False,
        low_latency: bool = False,
        row_weights: bool = False,
        sources: bool = False,
        landed: bool = False,
        host_counts: bool = False,
        max_sms: int = 0,
    ) -> None:
        kind = _one_of("layout", layout, _LAYOUTS)
        self.layout, self.by_token = layout, kind >= _LAYOUTS.index("token_major")
        self.dtype = _dtype_name("dtype", dtype, tuple(_BYTES))
        wide = tuple(_BYTES)[:3]
        if combine_dtype is None:
            combine_dtype = self.dtype if self.dtype in wide else "bfloat16"
        self.combine_dtype = _dtype_name("combine_dtype", combine_dtype, wide)
        self.index_dtype = _dtype_name("index_dtype", index_dtype, tuple(_INDEX_BYTES))
        self.experts, self.top_k = integer("experts", experts), integer("top_k", top_k)
        self.hidden, self.max_tokens = integer("hidden", hidden), integer("max_tokens", max_tokens)
        self._format = _one_of("scale_format", scale_format, _SCALE_FORMATS)
        self._columns = flag("scale_columns", scale_columns)
        self._scale_per_token, self._capacity = flag("scale_per_token", scale_per_token), integer("capacity", capacity)
        self._tells_sources, self._tells_landed = flag("sources", sources), flag("landed", landed)
        self._quantizes = flag("quantize", quantize)
        self._weighs_rows = self.by_token or flag("row_weights", row_weights)
        #: The type of the rows that arrive.
        self.row_dtype = "float8_e4m3fn" if quantize else self.dtype
        self._float8 = _BYTES[self.row_dtype] == 1
        options: dict[str, Any] = {
            "Experts": self.experts,
            "TopK": self.top_k,
            "Hidden": self.hidden,
            "MaxTokens": self.max_tokens,
            "DType": DTYPES[self.dtype],
            "IndexType": DTYPES[self.index_dtype],
            "CombineDType": DTYPES[self.combine_dtype],
            "Quantize": quantize,
            "ScalePerToken": self._scale_per_token,
            "ScaleFormat": self._format,
            "ScaleColumns": scale_columns,
            "Float8Combine": flag("float8_combine", float8_combine),
            "Layout": kind,
            "Align": integer("align", align) if layout == "flat" else 0,
            "Capacity": self._capacity,
            "MaxRows": integer("max_rows", max_rows),
            "Handles": integer("handles", handles),
            "LowLatency": flag("low_latency", low_latency),
            "RowWeights": row_weights,
            "Sources": sources,
            "Landed": landed,
            "HostCounts": flag("host_counts", host_counts),
            "MaxSMs": integer("max_sms", max_sms),
        }
        if placement is not None:
            options["Placement"] = {"Ranks": _placement(placement)}
        place = _place_of(group, device)
        self.comm: Communicator = place._comm
        lib, ticket = self.comm._lib, c_uint64()
        code = lib.dispatcher(self.comm._handle, place._handle, json.dumps(options).encode(), ticket)
        self._handle = self.comm._control(code, ticket)
        self._closed = False
        self._slots: dict[int, Slot] = {}
        #: The GPU's ordinal, -1 for the host.
        self._index: int = getattr(place, "device", -1)
        lib.bind(self)
        self._token_bytes = self.hidden * _BYTES[self.dtype]
        self._sum_bytes = self.hidden * _BYTES[self.combine_dtype]
        self._choice_bytes = self.top_k * _INDEX_BYTES[self.index_dtype]
        self._counted = bool(host_counts) or self._index < 0
        self.max_rows, _, self._local_experts = self._info()
        self._groups = self.comm.size if self.by_token else len(self.local_experts)
        self._torch: Any = None
        self._stream: Any = None
        if self._index >= 0:
            self._load_torch()
        self.name = f"switchyard:dispatcher:{next(_numbers)}"
        named[self.name] = self
        self.comm._dispatchers.add(self)
        if not self.local_experts:
            rank, size = self.comm.rank, self.comm.size
            text = f"switchyard: rank {rank} of {size} has no expert of {self.experts}: it sends tokens and gets none"
            warnings.warn(text, stacklevel=2)

    @property
    def local_experts(self) -> list[int]:
        """The experts of this rank, in the order of their rows."""
        return self._local_experts

    def __repr__(self) -> str:
        return (
            f"<switchyard.Dispatcher rank {self.comm.rank} of {self.comm.size}: {self.experts} experts, top_k {self.top_k}, "
            f'hidden {self.hidden}, {self.dtype}, layout "{self.layout}">'
        )

    # What lies below: memory

    def _bind(self) -> None:
        """Take the library's functions."""
        lib, prefix = self.comm._lib, "enqueue_" if self._index >= 0 else ""
        self._calls = [getattr(lib, prefix + name) for name in ("dispatch", "combine", "combine_backward", "receive")]

    def _load_torch(self) -> Any:
        from . import _torch_moe

        self._torch, self._stream = _torch_moe.Kinds(self), _torch_moe.raw_stream
        return self._torch

    def _info(self) -> tuple[int, int, list[int]]:
        """The most rows of a dispatch, how many dispatches are alive, and this rank's experts."""
        rows, alive, n, lib = c_int64(), c_int64(), c_int64(), self.comm._lib
        local = array("q", bytes(8 * max(self.experts, 1)))
        lib.check(lib.dispatcher_info(self._handle, byref(rows), byref(alive), byref(n), local.buffer_info()[0], len(local)))
        return rows.value, alive.value, local[: n.value].tolist()

    def _alive(self) -> int:
        return 0 if self._closed else self._info()[1]

    def _run(self, which: int, keep: object, *arguments: Any) -> int:
        """Make a call: on a GPU on the current stream, on the host wait for it and return its value."""
        if self._index >= 0:
            code = self._calls[which](self._handle, self._stream(self._index), *arguments, 0, None)
            if code:
                raise self.comm._lib.error(code)
            return 0
        ticket, comm = c_uint64(), self.comm
        code = self._calls[which](self._handle, 0, *arguments, SLICE, ticket)
        if code != AGAIN:
            return comm._control(code, ticket)
        comm._hold(ticket.value, keep)  # an interrupted wait leaves it under way
        value = comm._control(code, ticket)
        comm._let_go()
        return value

    def _dispatch(
        self, x: int, scales: tuple[int, int], idx: int, weights: int, tokens: int, first: bool, keep: object
    ) -> Output:
        """Make a dispatch of tokens at addresses."""
        weighed = 4 * tokens * self.top_k if weights else 0
        call = array(
            "q",
            (
                x, tokens * self._token_bytes, *scales, idx, tokens * self._choice_bytes, weights, weighed, 0, first, 0, 0,
            ),
        )  # fmt: skip
        address = call.buffer_info()[0]
        try:
            made = self._run(0, keep, address)
        except errors.NoHandle:
            gc.collect()  # outputs may hang in cycles
            made = self._run(0, keep, address)
        return Output(self, made, 0) if made else Output(self, call[10], call[11])

    def _redispatch(self, x: int, scales: tuple[int, int], output: Output, tokens: int, first: bool, keep: object) -> None:
        call = array("q", (x, tokens * self._token_bytes, *scales, 0, 0, 0, 0, output.alive(), first, 0, 0))
        self._run(0, keep, call.buffer_info()[0])

    def _combine(self, buffers: Sequence[int], handle: int, how: tuple[int, int, bool, bool], keep: object) -> None:
        """Make a combine. buffers are addresses and bytes of y, rows, weights, summed weights, two biases and words that say
        what is ready; how is whether it is the gradient of a dispatch, what rows are weighted with, whether it is the first
        half, and whether the handle is given back."""
        call = array("q", (*buffers, handle, *how))
        self._run(1, keep, call.buffer_info()[0])

    def _combine_backward(self, buffers: Sequence[int], handle: int, weighting: int, keep: object) -> None:
        call = array("q", (*buffers, handle, weighting))
        self._run(2, keep, call.buffer_info()[0])

    def _receive(self, output: Output, combine: bool, keep: object) -> None:
        self._run(3, keep, output.alive(), combine)

    def _part(self, output: Output, name: str) -> Any:
        """A part of an output, as a list, an array or a tensor."""
        if not output.slot.parts[name][1]:
            raise errors.InvalidArgument(f"switchyard: this dispatcher has no {name}")
        if self._index < 0 and name in COUNTS:
            output.counts = output.counts or output.host()
            return getattr(output.counts, name)
        return self._torch.part(output, name) if self._torch is not None else _array_of(self, output, name)

    def _shape(self, name: str, size: int) -> tuple[str, tuple[int, ...]]:
        """The type and the shape of a part that has so many bytes in all."""
        if name == "rows":
            return self.row_dtype, (self.max_rows, self.hidden)
        if name == "scales":
            return ("float32", "int32")[self._format], (size // 4,)
        if name == "indices":
            return "int64", (self.max_rows, self.top_k)
        if name == "row_weights":
            return "float32", (self.max_rows, self.top_k) if self.by_token else (self.max_rows,)
        return "int32", (self.max_rows, 2) if name == "sources" else (size // 4,)

    def _scales(self, words: Any, rows: int) -> Any:
        """The scales of an output as [rows, words], in a layout by padded experts as [experts, capacity, words]."""
        n = words.shape[0] // max(self.max_rows, 1)
        if not self._columns:
            return words.reshape(self.max_rows, n)[:rows]
        if self.layout in ("padded", "slab"):
            return words.reshape(-1, n, self._row_capacity()).swapaxes(1, 2)
        return words.reshape(n, self.max_rows).swapaxes(0, 1)[:rows]

    def _row_capacity(self) -> int:
        """How many rows each expert has in a padded layout."""
        return (self._capacity if self.layout == "padded" else 0) or self.comm.size * self.max_tokens

    def _check_rows(self, name: str, shape: Sequence[int]) -> None:
        """Refuse what is not rows of the dispatcher's."""
        if len(shape) != 2 or shape[1] != self.hidden:
            raise errors.InvalidArgument(f"switchyard: {name} has shape {tuple(shape)}, want rows of {self.hidden}")

    def _check_choices(self, tokens: int, idx: Sequence[int], weights: Sequence[int] | None) -> None:
        want = (tokens, self.top_k)
        if tuple(idx) != want or (weights is not None and tuple(weights) != want):
            beside, both = ("", "") if weights is None else (f" and weights {tuple(weights)}", " for both")
            raise errors.InvalidArgument(f"switchyard: idx is {tuple(idx)}{beside}, want {want}{both}")

    def _check_dispatched(self, dispatched: Any) -> None:
        if not isinstance(dispatched, Dispatched):
            raise errors.InvalidType(f"switchyard: dispatched is {type_of(dispatched)}, want what dispatch returned")
        if dispatched._dispatcher is not self:
            raise errors.InvalidArgument("switchyard: dispatched is of another dispatcher")

    def _check_length(self, name: str, rows: int, output: Output) -> None:
        """Refuse rows that are not those of a dispatch: all that there is room for, or as many as came."""
        if rows == self.max_rows:
            return
        if not self._counted:
            raise errors.InvalidArgument(f"switchyard: {name} has {rows} rows, the dispatcher {self.max_rows}")
        output.counts = output.counts or output.host()
        if rows != output.counts.rows:
            raise errors.InvalidArgument(f"switchyard: {name} has {rows} rows, the dispatch had {output.counts.rows}")

    def _check_combine(
        self, rows: int, tokens: int, weights: Sequence[int] | None, sum_weights: bool, biases: Sequence[Sequence[int]]
    ) -> None:
        """Refuse what comes beside so many rows, by its shape, where it does not go with them."""
        want = (rows, self.top_k) if self.by_token else (rows,)
        if weights is None and sum_weights:
            raise errors.InvalidArgument("switchyard: combine: sum_weights without weights")
        if weights is not None and tuple(weights) != want:
            raise errors.InvalidArgument(f"switchyard: combine: weights are {tuple(weights)}, want {want}")
        for n, _ in biases:
            if n != tokens:
                raise errors.InvalidArgument(f"switchyard: bias has {n} rows, the dispatch had {tokens} tokens")

    def _weighting(self, weights: Any, weighted: bool) -> int:
        if weights is not None and not weighted:
            raise errors.InvalidArgument("switchyard: combine: weights, and weighted=False")
        if self.by_token or not weighted:
            return UNWEIGHTED
        return DISPATCHED if weights is None else GIVEN

    # The calls

    def dispatch(self, x: Any, idx: Any, weights: Any = None, *, scales: Any = None, async_op: bool = False) -> Dispatched:
        """Send each token's row of ``x`` to its experts.

        ``x`` is [tokens, hidden]; ``idx`` [tokens, top_k] are the experts of each token, -1 for none; ``weights``, of that
        shape too, are what :meth:`combine` multiplies their rows by, ``None`` for 1. Tokens may be none and differ from rank to
        rank. ``scales`` lie beside tokens of float8. The gradient of ``x`` is the sum of those of its rows; that of ``weights``
        comes with :meth:`combine`, and where ``row_weights`` is used with that.

        CUDA tensors are sent on the current stream, and CUDA graphs can capture it. With ``async_op`` only the first half is
        made, and :meth:`Dispatched.wait` is the second: what is enqueued between them runs while rows are on their way. Other
        dispatches may be made between them too. On the host the first half waits until all ranks have begun it.
        """
        if _is_tensor(x):
            return _tensor_calls().dispatch(self, x, idx, weights, scales, async_op)
        self._host_only("x")
        import numpy as np

        x = _rows(self, "x", x, self.dtype)
        idx = np.asarray(idx)
        if idx.dtype.kind not in "iu" and idx.size:
            raise errors.InvalidType(f"switchyard: idx is {idx.dtype}, want integers")
        idx = np.ascontiguousarray(idx, self.index_dtype)
        weights = None if weights is None else np.ascontiguousarray(weights, np.float32)
        self._check_choices(x.shape[0], idx.shape, None if weights is None else weights.shape)
        scales = None if scales is None else np.ascontiguousarray(scales, ("float32", "int32")[self._format])
        at = 0 if weights is None else weights.ctypes.data
        beside = (0, 0) if scales is None else (scales.ctypes.data, scales.nbytes)
        output = self._dispatch(x.ctypes.data, beside, idx.ctypes.data, at, x.shape[0], async_op, (x, idx, weights, scales))
        d = Dispatched(self, output, x.shape[0], weights, {})
        d._half = async_op
        d.rows = self._part(output, "rows").view(x.dtype if self.row_dtype == self.dtype else np.uint8)
        return d

    def redispatch(self, x: Any, dispatched: Dispatched, *, scales: Any = None, async_op: bool = False) -> Dispatched:
        """Send other rows the ways of a dispatch: ``x``, and ``scales`` for float8, are for its tokens. They take the place of
        the rows that came with it, and all else in it stays. The result has the new ``rows``."""
        self._check_dispatched(dispatched)
        if _is_tensor(x):
            return _tensor_calls().redispatch(self, x, dispatched, scales, async_op)
        self._host_only("x")
        import numpy as np

        x = _rows(self, "x", x, self.dtype)
        if x.shape[0] != dispatched.tokens:
            raise errors.InvalidArgument(f"switchyard: x has {x.shape[0]} tokens, the dispatch had {dispatched.tokens}")
        scales = None if scales is None else np.ascontiguousarray(scales, ("float32", "int32")[self._format])
        beside = (0, 0) if scales is None else (scales.ctypes.data, scales.nbytes)
        self._redispatch(x.ctypes.data, beside, dispatched._output, x.shape[0], async_op, (x, scales))
        d = Dispatched(self, dispatched._output, dispatched.tokens, dispatched._weights, dispatched._parts)
        d.rows, d._half = dispatched.rows, async_op
        return d

    def combine(
        self,
        rows: Any,
        dispatched: Dispatched,
        *,
        weights: Any = None,
        weighted: bool = True,
        bias: Any = None,
        sum_weights: bool = False,
        ready: Any = None,
        release: bool = False,
        async_op: bool = False,
    ) -> Any:
        """Bring rows back: the result is [tokens, hidden], for each token the sum of weight times row over its experts.

        ``rows`` is laid out like ``dispatched.rows``, which it may be, and of ``combine_dtype``. Sums are made in float32. With
        rows by token a row is what its rank made of the token, and nothing is weighted.

        - ``weights``: float32 beside the rows, like ``row_weights``, instead of those of the dispatch; ``weighted=False``: none
          at all;
        - ``bias``: a tensor like the result, or two of them, added to the sums;
        - ``sum_weights``: return also the entries of ``weights`` for each token's choices, [tokens, top_k], 0 where there is
          none;
        - ``ready``: int32 words on the device, one for each of this rank's experts (with rows by token for each rank), zero at
          first. A kernel adds to one, with release semantics at system scope, when it has written so many of the rows. They are
          sent back as their word says so;
        - ``release``: give the output back with the call. Rows stay as they are until a later dispatch, and ranks wait for one
          another less;
        - ``async_op``: make the first half, and return a :class:`Combining`, whose ``wait`` is the second and returns the
          result.

        The gradient of ``rows`` is undefined where padding is, and behind the last row: mask it, or do not read it.
        ``sum_weights``, ``ready`` and ``release`` have none.
        """
        self._check_dispatched(dispatched)
        if _is_tensor(rows):
            return _tensor_calls().combine(
                self, rows, dispatched, weights, weighted, bias, sum_weights, ready, release, async_op
            )
        self._host_only("rows")
        import numpy as np

        rows = _rows(self, "rows", rows, self.combine_dtype)
        output = dispatched._output
        self._check_length("rows", rows.shape[0], output)
        if ready is not None:
            raise errors.Unsupported("switchyard: combine: ready of arrays")
        weighting = self._weighting(weights, weighted)
        given = None if weights is None else np.ascontiguousarray(weights, np.float32)
        biases = [_rows(self, "bias", b, self.combine_dtype) for b in biases_of(bias)]
        shape = None if given is None else given.shape
        self._check_combine(rows.shape[0], dispatched.tokens, shape, sum_weights, [b.shape for b in biases])
        y = np.empty((dispatched.tokens, self.hidden), rows.dtype)
        sums = np.zeros((dispatched.tokens, self.top_k), np.float32) if sum_weights else None
        held = [y, rows, given, sums, *biases, *(None,) * (3 - len(biases))]
        buffers = [n for a in held for n in ((0, 0) if a is None else (a.ctypes.data, a.nbytes))]
        self._combine(buffers, output.alive(), (0, weighting, async_op, release), held)
        output.released = output.released or release
        result = (y, sums) if sum_weights else y
        return Combining(dispatched, result, held) if async_op else result

    def dispatch_backward(self, d_rows: Any, dispatched: Dispatched) -> Any:
        """The gradient of the tokens of a dispatch from that of its rows, both tensors of ``combine_dtype``. Autograd does this
        by itself, but for tokens that become float8, which have no gradients in torch."""
        self._check_dispatched(dispatched)
        from . import _torch_moe

        return _torch_moe.tokens_gradient(self, d_rows, dispatched)

    def _host_only(self, name: str) -> None:
        if self._index >= 0:
            raise errors.InvalidType(f"switchyard: {name} is not a tensor, and the dispatcher is on cuda:{self._index}")

    def counters(self) -> Counters:
        """What this rank has done so far. It waits for no stream: on a GPU what has run is counted."""
        n, ranks, lib = self.experts, self.comm.size, self.comm._lib
        choices, sent, waited = (array("q", bytes(8 * k)) for k in (n, ranks, ranks))
        places = (choices.buffer_info()[0], n, sent.buffer_info()[0], waited.buffer_info()[0], ranks)
        lib.check(lib.dispatcher_counters(self._handle, *places))
        return Counters(choices.tolist(), sent.tolist(), waited.tolist())

    def traffic(self) -> list[int]:
        """Bytes of rows sent to each rank so far."""
        return self.counters().bytes

    def close(self) -> None:
        """Give the memory back, together with all ranks. No output may be in use."""
        if self._closed:
            return
        alive = self._alive()
        if alive:
            raise errors.InvalidArgument(f"switchyard: close: {alive} dispatches of this dispatcher are alive")
        self._closed = True
        ticket = c_uint64()
        comm = self.comm
        comm._control(comm._lib.dispatcher_close(comm._handle, self._handle, ticket), ticket)


_numbers = itertools.count()


def _place_of(group: Any, device: Any) -> Place:
    """Where a dispatcher is to be."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        device = torch.get_default_device() if device is None else device
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if where.type == "cuda":
            from . import _torch

            gpu: Place = _torch.gpu(group, where)
            return gpu
        if where.type != "cpu":
            raise errors.Unsupported(f"switchyard: there are no dispatchers on {where}")
    elif device not in (None, "cpu"):
        raise errors.InvalidArgument(f"switchyard: a dispatcher on {device} without torch")
    from ._array_calls import communicator

    return communicator(group)


def _is_tensor(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


_eager: Any = None


def _tensor_calls() -> Any:
    """The module of the calls on tensors."""
    global _eager
    if _compiling():
        from . import _torch_moe_ops

        return _torch_moe_ops
    if _eager is None:
        from . import _torch_moe

        _eager = _torch_moe
    return _eager


def _compiling() -> bool:
    compiling: bool = sys.modules["torch"].compiler.is_compiling()
    return compiling


def _rows(d: Dispatcher, name: str, x: Any, dtype: str) -> Any:
    import numpy as np

    x = np.ascontiguousarray(x)
    if str(x.dtype) != dtype:
        raise errors.InvalidType(f"switchyard: {name} is {x.dtype}, the dispatcher was made for {dtype}")
    d._check_rows(name, x.shape)
    return x


def _array_of(d: Dispatcher, output: Output, name: str) -> Any:
    """A part of an output as an array, as long as rows came."""
    import numpy as np

    _, size = output.slot.parts[name]
    kind, shape = d._shape(name, size)
    flat = np.frombuffer(output.memory(name), np.uint8)
    if name == "rows":
        items = flat.reshape(d.max_rows, -1)
    else:
        items = flat.view(kind).reshape(shape)
    if name not in BESIDE_ROWS:
        return items
    output.counts = output.counts or output.host()
    rows = output.counts.rows
    return d._scales(items, rows) if name == "scales" else items[:rows]
