"""Calls of tensors that the library makes as operators of torch: torch's dispatcher hands it the tensors, and it asks them for
their memory, allocates results, calls itself and returns, without Python in between.

The library registers the operators by torch's stable C ABI, which torch 2.11 and newer have in full; on older ones there are
none. They make calls whose arguments are as usual. Of others they say so and do nothing, and Python makes or refuses them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from ctypes import c_uint64
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._core.dispatched import (
    DISPATCHED,
    OF_TOKENS,
    UNWEIGHTED,
    Combining,
    Dispatched,
    HostCounts,
    Output,
    Result,
    Routing,
    counts_of,
)
from .._core.native import AGAIN, SLICE, library
from .._core.taking import NO_MEMORY, Leaves, Lists
from . import cuda
from .compiler import uncompiled
from .profile import profiled
from .tensors import written
from .work import Work

if TYPE_CHECKING:
    from .._core.comm import Communicator
    from .._core.dispatcher import Calls

#: The answer of an operator that has done nothing.
UNUSUAL = 255
#: Types by the numbers that operators have for them.
_TYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "int64", "uint8")


def _operators() -> Any:
    """torch's operators of the library, None where this torch has none."""
    return None if library().operators() else torch.ops.switchyard


class Exchanges:
    """Exchanges, reductions and gathers of a communicator, on the host or on one of its GPUs."""

    def __init__(self, comm: Communicator, place: Any, device: int, found: Any) -> None:
        self._comm, self._place, self._on_gpu = comm, place, device >= 0
        self._call, self._reduce, self._scatter, self._gather = map(
            _call, (found.all_to_all, found.reduce, found.scatter, found.gather)
        )
        self._about = array("q", (place._handle, device, comm.size, comm.rank, SLICE, 0, 0, 0))
        self._address = self._about.buffer_info()[0]

    def aside(self, tensors: tuple[Tensor, ...], make: Callable[[int], bool]) -> Work | None:
        """Have make make a call on these tensors, the output first, behind what the current stream has and next to what it
        gets later, if nothing about it is unusual. make gets what to hand to a method that makes a call."""
        gpu = self._place
        if not self._on_gpu or torch.cuda.current_device() != gpu.device or torch.cuda.is_current_stream_capturing():
            return None
        side = cuda.side_of(gpu)
        event, stream = side.event(), side.stream
        about = self._about[:5]
        about.extend((stream.cuda_stream, event.cuda_event, cuda.BESIDE_SMS))
        if not make(about.buffer_info()[0]):
            side.events.append(event)
            return None
        event.record(stream)
        for x in tensors:
            x.record_stream(stream)
        return Work(cuda.Recorded(gpu, side, stream, event), tensors[:1])

    def make(self, output: Tensor, input: Tensor, received: Any, sent: Any, at: int = 0) -> bool:
        """Make one, if nothing about it is unusual. at is of a call of aside."""
        if received is None and sent is None:
            received = sent = ()
        elif type(received) not in (list, tuple) or type(sent) not in (list, tuple):
            return False
        if input.is_neg() or output.is_neg():  # torch would carry it out before
            return False
        return self._made(output, input, at, self._call, output, input, received, sent)

    def reduce(self, tensor: Tensor, kind: tuple[int, int], at: int = 0) -> bool:
        """all_reduce, if nothing about it is unusual."""
        return self._reduces(tensor, tensor) and self._made(tensor, None, at, self._reduce, tensor, *kind)

    def scatter(self, output: Tensor, input: Tensor, kind: tuple[int, int], at: int = 0) -> bool:
        """reduce_scatter_tensor, if nothing about it is unusual."""
        return self._reduces(output, input) and self._made(output, input, at, self._scatter, output, input, *kind)

    def gather(self, output: Tensor, input: Tensor, at: int = 0) -> bool:
        """all_gather_into_tensor, if nothing about it is unusual."""
        return self._reduces(output, input) and self._made(output, input, at, self._gather, output, input)

    def _reduces(self, output: Tensor, input: Tensor) -> bool:
        """Whether the place is ready for reductions, and torch carries nothing out before."""
        return (not self._on_gpu or self._place.reduces) and not (input.is_neg() or output.is_neg())

    def _made(self, output: Tensor, input: Tensor | None, at: int, call: Any, *arguments: Any) -> bool:
        """Make a call that writes output, if nothing about it is unusual."""
        try:
            code = call(*arguments, at or self._address)
        except (RuntimeError, TypeError):  # torch knows no operator for such tensors or splits
            return False
        if code == UNUSUAL:
            return False
        written(output)
        if code:
            self._comm._run(code & 0xFF, code >> 8, (output, input))
        return True


def exchanges(comm: Communicator, device: int) -> Exchanges | None:
    """The exchanges of a communicator on a GPU, or the host, which is -1. None where they are not made by operators."""
    place = comm if device < 0 else comm._gpus.get(device)
    if place is None:
        return None  # not yet
    if device not in comm._exchanges:
        found = None if comm.validate else _operators()
        comm._exchanges[device] = found and Exchanges(comm, place, device, found)
    made: Exchanges | None = comm._exchanges[device]
    return made


#: The words of a description of dispatches.
_ABOUT = 19

#: The tensors that a dispatch has besides its tokens and their choices, and whether it is a first half.
_WEIGHTS, _SCALES, _HALF = 1, 2, 4


def _about(d: Calls, numbers: int) -> tuple[int, ...]:
    """Dispatches and combines of a dispatcher as operators want them described."""
    scales = ("float32", "int32")[d._exponents]
    types = (_TYPES.index(name) for name in (d.dtype, d.row_dtype, d.combine_dtype, d.index_dtype, scales))
    sizes, local = (d._token_bytes, d._sum_bytes, d._choice_bytes, 4 * d._scale_words), len(d._local_experts)
    told = 2 + local + d._groups + 1 + d._ranks
    return (
        d._handle, d._index, d.hidden, d.top_k, d.max_tokens, d.max_rows, *types, *sizes, local, told, numbers, SLICE
    )  # fmt: skip


def _call(operator: Any) -> Any:
    """An operator as a function, for calls that torch's compiler does not see."""
    return getattr(operator.default, "_op", operator.default)  # which the object of torch.ops calls


class Counts:
    """The counts that the host is told of a dispatch."""

    def __init__(self, d: Calls) -> None:
        self._experts, self._ranks = len(d.local_experts), d.comm.size
        #: How many numbers they are.
        self.numbers = 2 + self._experts + d._groups + self._ranks

    def among(self, made: list[int], begin: int) -> HostCounts:
        """Those that a list has from an index on, to its end."""
        experts, ranks = begin + 1 + self._experts, self._ranks
        return HostCounts(made[begin], made[begin + 1 : experts], made[experts:-ranks], made[-ranks:])


class Dispatches:
    """Dispatches and combines of a dispatcher, whole and without gradients."""

    def __init__(self, d: Calls, found: Any) -> None:
        self._dispatcher = d
        self._plain, self._weighted = _call(found.dispatch_rows), _call(found.dispatch_weighted)
        self._scaled, self._lent = _call(found.dispatch_scaled), _call(found.dispatch_lent)
        self._combine, self._combine_weighted = _call(found.combine_rows), _call(found.combine_weighted)
        self._combine_into = _call(found.combine_into)
        self._counts = Counts(d)
        self._about = array("q", _about(d, 0 if d._index >= 0 else self._counts.numbers))
        self._address = self._about.buffer_info()[0]

    @uncompiled
    def dispatch(
        self, x: Tensor, idx: Tensor, weights: Tensor | None, scales: Tensor | None, first: bool
    ) -> Dispatched | None:
        """A dispatch, or on a GPU its first half, if nothing about it is unusual."""
        if profiled() or type(x) is not Tensor or type(idx) is not Tensor:
            return None
        if (weights is not None and type(weights) is not Tensor) or (scales is not None and type(scales) is not Tensor):
            return None
        if torch.is_grad_enabled() and (x.requires_grad or (weights is not None and weights.requires_grad)):
            return None
        how, call = _HALF if first else 0, (self._plain, x, idx)  # type: int, tuple[Any, ...]
        if weights is not None:
            how, call = how | _WEIGHTS, (self._weighted, x, idx, weights)
        if scales is not None:
            how, call = how | _SCALES, (self._scaled, x, idx, x if weights is None else weights, scales)
        call = (*call, how, self._address)
        sent = self._made(call, call)
        if sent is None:
            return None
        rows, output = sent
        got = Dispatched(self._dispatcher, self._dispatcher._torch, output, x.shape[0], weights, {})
        if rows is not None:
            got.rows = rows
        got._half = first
        return got

    @uncompiled
    def lease(self, x: Tensor, idx: Tensor, ends: Output | None, first: bool) -> tuple[Dispatched, Tensor] | None:
        """A dispatch of tensors without gradients, or on a GPU its first half, and the choices of each expert in memory of
        their own, if nothing about it is unusual. Another output may be given up before, also where the call fails."""
        if profiled() or type(x) is not Tensor or type(idx) is not Tensor:
            return None
        again, hold = (self._lent, x, idx, 0, first, self._address), 0
        if ends is not None:
            hold, ends._hold = ends._hold, None  # which the operator ends
        try:
            sent = self._made((self._lent, x, idx, hold, first, self._address), again)
        except BaseException:
            if ends is not None:
                ends.released = True
            raise
        if sent is None:
            if ends is not None:
                ends._hold = hold
            return None
        if ends is not None:
            ends.released = True
        counts, output = sent
        got = Dispatched(self._dispatcher, self._dispatcher._torch, output, x.shape[0], None, {})
        got._half = first
        return got, counts  # type: ignore[return-value]

    def _made(self, call: tuple[Any, ...], again: tuple[Any, ...]) -> tuple[Tensor | None, Output] | None:
        """The first result of an operator that makes a dispatch, and the output, if nothing about it is unusual. The call is
        made again where it has found no output to take."""
        operator, *arguments = call
        try:
            part, made = operator(*arguments)
        except (RuntimeError, TypeError):
            return None
        d, code = self._dispatcher, made[0]
        if code:
            if code == UNUSUAL:
                return None
            if code != AGAIN:
                d._make_room(code)
                part, made = operator(*again[1:])
                code = made[0]
                if code not in (0, AGAIN):
                    raise d.comm._lib.error(code)
        _, handle, hold, place, ticket = made[:5]
        if code == AGAIN:
            handle = handle or d.comm._finish(code, c_uint64(ticket), arguments)
        output = Output(d, handle, place, None, hold)
        if d._index < 0:
            output.counts = counts_of(d, handle) if code else self._counts.among(made, 5)
        return part, output

    @uncompiled
    def combine(
        self, rows: Tensor, way: Dispatched | Routing, weighted: bool, token_weights: Tensor | None, release: bool, first: bool
    ) -> Any:
        """A combine with the weights of the dispatch or of tokens, or on a GPU its first half, if nothing about it is
        unusual."""
        d = self._dispatcher
        if type(way) not in (Dispatched, Routing) or way._dispatcher is not d or type(rows) is not Tensor or rows.dim() != 2:
            return None
        weighting = UNWEIGHTED if d.by_token or not weighted else DISPATCHED
        if token_weights is not None:
            if weighting == UNWEIGHTED:
                return None
            weighting = OF_TOKENS
        elif weighting == DISPATCHED and way._weights is not None and way._weights.requires_grad and torch.is_grad_enabled():
            return None
        if isinstance(way, Routing):
            counts = way.counts
        else:
            counts = way._output and way._output.counts
        return self.bring(rows, way, -1 if counts is None else counts.rows, weighting, token_weights, release, None, first)

    @uncompiled
    def bring(
        self, rows: Tensor, way: Dispatched | Routing, came: int, weighting: int, token_weights: Tensor | None, release: bool,
        out: Tensor | None, first: bool,
    ) -> Any:  # fmt: skip
        """A combine of as many rows as came, or as there is room for, with any extents before the last, or on a GPU its first
        half, which is a Combining. With weights of tokens the sums may go to a tensor of the caller."""
        if profiled() or type(rows) is not Tensor or (token_weights is not None and type(token_weights) is not Tensor):
            return None
        if out is not None and (token_weights is None or type(out) is not Tensor or out.requires_grad):
            return None
        if torch.is_grad_enabled() and (rows.requires_grad or (token_weights is not None and token_weights.requires_grad)):
            return None
        output: Output | None = None
        if isinstance(way, Routing):
            if release or first:
                return None
            handle, routing = 0, way._name
        else:
            output = way._output
            if output is None or output.released:
                return None
            handle, routing = output.handle, 0
        about = (self._address, handle, routing, way._tokens, came, weighting, release, first)
        try:
            if token_weights is None:
                y, code = self._combine(rows, *about)
            elif out is None:
                y, code = self._combine_weighted(rows, token_weights, *about)
            else:
                y, code = out, self._combine_into(rows, token_weights, out, *about)
        except (RuntimeError, TypeError):
            return None
        if code:
            if code == UNUSUAL:
                return None
            comm = self._dispatcher.comm
            if code & 0xFF != AGAIN:
                raise comm._lib.error(code)
            comm._finish(AGAIN, c_uint64(code >> 8), (y, rows, token_weights))
        if out is not None:
            written(out)
        if output is not None and release:
            output.released = True
        return Combining(way, y, (y, rows, token_weights)) if first else y


class Delivers:
    """Dispatches of a dispatcher, whole and without gradients, with what they leave in memory of torch."""

    def __init__(self, d: Calls, found: Any, python: Callable[..., Result]) -> None:
        """python makes those of which anything is unusual, and the first, after which the sizes of results are known."""
        self._dispatcher, self._call, self._python = d, _call(found.deliver_rows), python
        self._side, self._counts, self._address = d._torch, Counts(d), 0
        #: In place of scales and of weights that are not there.
        self._none = torch.empty(0, device=self._side.device)

    def _know(self, left: Leaves) -> None:
        d = self._dispatcher
        about = [*_about(d, self._counts.numbers if d._counted else 0)]
        for name, size, tail in left.beside:
            about += (_TYPES.index(d._shape(name, 0)[0]), *(tail or (-1,)), size)
        self._about = array("q", (*about, d.routing_bytes, *left.fixed, *left.sources, d._whole))
        self._address, self._places = self._about.buffer_info()[0], left.places

    @uncompiled
    def make(
        self, x: Tensor, idx: Tensor, weights: Tensor | None, scales: Tensor | None, length: int | None, copies: bool
    ) -> Result:
        """A dispatch of tensors that are as the dispatcher wants them, and all that it leaves; copies also copies idx, into the
        lists of the result."""
        d, side, none, tokens = self._dispatcher, self._side, self._none, x.shape[0]
        if not self._address or type(x) is not Tensor or type(idx) is not Tensor or profiled():
            made = self._python(x, idx, weights, scales, length, copies)
            if d._left is not None and not self._address:
                self._know(d._left)
            return made
        if length is None and d._index >= 0 and (not d._counted or side.capturing()):
            length = d.max_rows
        sent = (
            x, none if scales is None else scales, idx, none if weights is None else weights, -1 if length is None else length,
            copies, self._address,
        )  # fmt: skip
        try:
            rows, factors, indices, row_weights, memory, left = self._call(*sent)
        except (RuntimeError, TypeError):  # torch knows no operator for such tensors
            left = (UNUSUAL,)
        size = tokens * d._choice_bytes if copies else 0
        if left[0]:
            if left[0] not in (AGAIN, UNUSUAL):
                d._make_room(left[0])
                rows, factors, indices, row_weights, memory, left = self._call(*sent)
            if left[0] == UNUSUAL:
                return self._python(x, idx, weights, scales, length, copies)
            if left[0] == AGAIN:
                handle = left[1] or d.comm._finish(AGAIN, c_uint64(left[2]), sent)
                return d._late(side, handle, length, (idx.data_ptr(), size) if copies else NO_MEMORY, tokens)
            d.comm._lib.check(left[0])
        _, _, _, name, at, copy, came = left[:7]
        host = self._counts.among(left, 7) if len(left) > 7 else None
        if factors is not None:
            factors = d._by_columns(factors)
        lists = Lists(side, memory, at, came, self._places, (copy, size))
        way = Routing(d, side, name, memory, tokens, host, None)
        return Result(rows, factors, indices, row_weights, lists, way, host)


def delivers(d: Calls, python: Callable[..., Result]) -> Callable[..., Result]:
    """The function that makes a dispatcher's deliveries: Delivers.make, or python's where they are no operators."""
    found = _operators()
    return python if found is None else Delivers(d, found, python).make


def dispatches(d: Calls) -> Dispatches | None:
    """The dispatches of a dispatcher, None where they are not made by operators."""
    found = _operators()
    return None if found is None else Dispatches(d, found)
