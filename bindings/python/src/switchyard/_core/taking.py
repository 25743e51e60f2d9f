"""Calls that copy what a dispatch leaves into memory of the caller."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable
from ctypes import c_uint64
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import errors
from . import abi
from .arguments import Bound
from .dispatched import ROUTING_ALIGN, HostCounts, Parts, Result, Routing, Side, Slot, counts_of
from .native import AGAIN, SLICE

if TYPE_CHECKING:
    from .comm import Communicator
    from .dispatched import Dispatched

    #: A call that copies results, their tensors or arrays, and the lists that lie behind the routing.
    Room = tuple[array[int], list[Any], "Lists"]


class Leaves(NamedTuple):
    """Sizes and places of the parts that a dispatch leaves, in the order of abi.RESULTS."""

    #: Parts that become tensors of their own: the bytes of each row, and the extents behind the rows.
    beside: Parts
    #: The lists of Lists, which lie behind a routing: where each begins there, its bytes, and those for each row.
    places: dict[str, tuple[int, int, int]]
    #: Where sources begin, which are the last, and their bytes for each row.
    sources: tuple[int, int]
    #: Where the others begin, and their bytes.
    fixed: tuple[int, ...]


NO_MEMORY = (0, 0)


class Lists:
    """Sources and counts of a result. They lie in the memory of the routing, behind that, and each becomes a tensor or an array
    when it is first asked for."""

    __slots__ = ("_at", "_choices", "_made", "_places", "_side", "memory", "rows")

    def __init__(
        self, side: Side, memory: Any, at: int, rows: int, places: dict[str, tuple[int, int, int]], choices: tuple[int, int]
    ) -> None:
        """places are the bytes of each part by its name: the first, from an address in the memory on, their number, and how
        many more for each row. choices are those of the tokens' choices."""
        self._side, self.memory, self._at, self.rows, self._places = side, memory, at, rows, places
        self._choices = choices
        self._made: dict[str, Any] = {}

    def choices(self) -> Any:
        """The choices that the tokens had, one after the other, of a call that was to copy them."""
        begin, size = self._choices
        return self._side.within(self.memory, self._at + begin, size, "choices")

    def part(self, name: str) -> Any:
        """A part, ``None`` if the dispatcher has not that."""
        found = self._made.get(name)
        if found is None and name in self._places:
            begin, size, each = self._places[name]
            found = self._made[name] = self._side.within(self.memory, self._at + begin, size + self.rows * each, name)
        return found


class Taking(Bound):
    """The part of a dispatcher that copies what its dispatches leave."""

    comm: Communicator
    by_token: bool
    top_k: int
    max_rows: int
    routing_bytes: int
    _handle: int
    _index: int
    _stream: Any
    _counted: bool
    _columns: bool
    _whole: bool
    _groups: int
    _ranks: int
    _local_experts: list[int]
    _slots: dict[int, Slot]
    _moves: bool
    _token_bytes: int
    _choice_bytes: int
    #: The library's functions, by _bind.
    _results: Callable[..., int]
    _delivers: tuple[Callable[..., int], Callable[..., int]]
    _left: Leaves | None = None

    def _capturing(self) -> bool:
        raise NotImplementedError

    def _occupy(self, which: int, keep: object, call: array[int]) -> int:
        raise NotImplementedError

    def _shape(self, name: str, size: int) -> tuple[str, tuple[int, ...]]:
        raise NotImplementedError

    def _scales(self, words: Any, rows: int, room: int) -> Any:
        raise NotImplementedError

    def _keep(self, dispatched: Dispatched) -> Routing:
        """The routing of a dispatch."""
        output, side = dispatched._output, dispatched._side
        counts = output.counts
        if counts is None and output.routing is None and self._counted and not side.capturing():
            counts = output.host()  # by a routing they are those of the routing, or nobody's
        memory, at = side.room(self.routing_bytes)
        name = self._copy(abi.result_call([*(0,) * 16, at, self.routing_bytes, *(0,) * 4], output.alive(), 0, False))
        return Routing(self, side, name, memory, dispatched.tokens, counts, dispatched._weights)

    def _copy(self, call: array[int]) -> int:
        """Copy what a dispatch has left. The name of its routing is returned."""
        self._alone(self._results, call)
        return call[abi.RESULT_MADE]

    def _alone(self, function: Callable[..., int], call: array[int]) -> None:
        """Make a call of which no other rank hears: on a GPU on the current stream, on the host at once."""
        stream = self._stream(self._index) if self._index >= 0 else 0
        code = function(self._handle, stream, call.buffer_info()[0])
        if code:
            raise self.comm._lib.error(code)

    def _take(self, dispatched: Dispatched, length: int | None) -> Result:
        """All that a dispatch has left, in fresh memory. Its output is given back."""
        output, side = dispatched._output, dispatched._side
        host = output.counts
        if host is None and output.routing is None and self._tells(side, length):
            host = output.counts = output.host()
        room = self._copied(side, output.alive(), host, length, NO_MEMORY)
        output.released = True
        return self._result(side, room, host, dispatched.tokens, dispatched._weights)

    def _tells(self, side: Side, length: int | None) -> bool:
        """Whether the host waits for the counts of a dispatch whose result has a length."""
        return self._counted and (length is None or self._index < 0) and not side.capturing()

    def _deliver(
        self, side: Side, x: int, scales: abi.Memory, idx: int, weights: int, tokens: int, length: int | None, choices: bool,
        keep: object,
    ) -> Result:  # fmt: skip
        """Make a dispatch of tokens at addresses, and take what it leaves, with a copy of their choices if that is wanted. It
        is one call of the library where the length is known."""
        weighed, chosen = 4 * tokens * self.top_k if weights else 0, (idx, tokens * self._choice_bytes)
        call = abi.dispatch_call((x, tokens * self._token_bytes), scales, chosen, (weights, weighed), 0, 0)
        if not choices:
            chosen = NO_MEMORY
        tells = self._counted if self._index < 0 else self._tells(side, length)
        if length is None and not tells:
            length = self.max_rows
        try:
            if length is not None and self._left is not None:
                room = self._room(side, length, chosen, 0)
                host = self._make(call, room[0], tells, keep)
            else:
                host = self._make(call, None, tells, keep)
                room = self._copied(side, call[abi.MADE], host, length, chosen)
        except BaseException:
            if call[abi.MADE]:  # whoever keeps the error keeps nothing of the call
                self.comm._lib.release(call[abi.MADE])
            raise
        return self._result(side, room, host, tokens, None)

    def _make_room(self, code: int) -> None:
        """Have a call that has failed made once more, if it was for want of an output: those that nobody has are given back."""
        error = self.comm._lib.error(code)
        if not isinstance(error, errors.NoHandle):
            raise error
        gc.collect()  # outputs may hang in cycles

    def _late(self, side: Side, handle: int, length: int | None, choices: abi.Memory, tokens: int) -> Result:
        """All that a dispatch has left which was made, and for whose counts the host has to wait yet."""
        try:
            host = counts_of(self, handle)
            room = self._copied(side, handle, host, length, choices)
        except BaseException:
            self.comm._lib.release(handle)
            raise
        return self._result(side, room, host, tokens, None)

    def _copied(self, side: Side, handle: int, host: HostCounts | None, length: int | None, choices: abi.Memory) -> Room:
        """The results of a dispatch, copied to fresh memory. Without a length they are as long as rows came."""
        if length is None:
            # Scales in columns of each expert are copied whole.
            length = self.max_rows if host is None or self._whole else host.rows
        room = self._room(side, length, choices, handle)
        self._copy(room[0])
        return room

    def _make(self, call: array[int], results: array[int] | None, tells: bool, keep: object) -> HostCounts | None:
        """Make a dispatch. Where it tells its counts wait for them, and where there are results copy these."""
        comm, ticket = self.comm, c_uint64()
        experts, ranks = len(self._local_experts), self._ranks
        known = array("q", bytes(8 * (experts + self._groups + 2 + ranks) if tells else 0))
        stream = self._stream(self._index) if self._index >= 0 else 0
        into = 0 if results is None else results.buffer_info()[0]
        arguments = (self._handle, stream, call.buffer_info()[0], into, SLICE, ticket, known.buffer_info()[0], len(known))
        make = self._delivers[tells]
        code = make(*arguments)
        if code not in (0, AGAIN):
            self._make_room(code)
            code = make(*arguments)
        if code == AGAIN:
            if not call[abi.MADE]:
                call[abi.MADE] = comm._finish(code, ticket, keep)
            host = counts_of(self, call[abi.MADE])
            if results is not None:
                results[abi.RESULT_HANDLE] = call[abi.MADE]
                self._copy(results)
            return host
        comm._lib.check(code)
        if not tells:
            return None
        numbers = known.tolist()
        return HostCounts(numbers[0], numbers[1 : experts + 1], numbers[experts + 1 : -ranks], numbers[-ranks:])

    def _room(self, side: Side, length: int, choices: abi.Memory, handle: int) -> Room:
        """Fresh memory for all that a dispatch leaves, and for a copy of the choices of its tokens where there are some. The
        call fills it and gives the output back."""
        left = self._left or self._leaves(handle)
        made, buffers = side.beside(left.beside, length)
        begin, each = left.sources
        end = begin + length * each
        copy = -(-end // ROUTING_ALIGN) * ROUTING_ALIGN
        memory, at = side.room(copy + choices[1])
        counts, count_bytes, offsets, offset_bytes, ranks, rank_bytes = left.fixed
        buffers += (at + begin, length * each, at + counts, count_bytes, at + offsets, offset_bytes)
        buffers += (at + ranks, rank_bytes, at, self.routing_bytes, *choices, at + copy, choices[1])
        lists = Lists(side, memory, at, length, left.places, (copy, choices[1]))
        return abi.result_call(buffers, handle, length, True), made, lists

    def _result(self, side: Side, room: Room, host: HostCounts | None, tokens: int, weights: Any) -> Result:
        """The parts that a call has copied."""
        call, (rows, scales, indices, row_weights), lists = room
        routing = Routing(self, side, call[abi.RESULT_MADE], lists.memory, tokens, host, weights)
        if scales is not None:
            scales = self._by_columns(scales)
        return Result(rows, scales, indices, row_weights, lists, routing, host)

    def _by_columns(self, scales: Any) -> Any:
        """Scales [rows, words] of a result, in the order in which the dispatcher has them."""
        return self._scales(scales.reshape(-1), len(scales), len(scales)) if self._columns else scales

    def _leaves(self, handle: int) -> Leaves:
        """Those of the dispatches of this dispatcher."""
        rows = max(self.max_rows, 1)
        sizes = {name: part[1] for name, part in Slot(self, handle).parts.items()}
        beside: Parts = []
        for name in ("rows", "scales", "indices", "row_weights"):
            each = sizes[name] // rows
            beside.append((name, each, (each // 4,) if name == "scales" else self._shape(name, sizes[name])[1][1:]))
        end, places = self.routing_bytes, {}  # type: int, dict[str, tuple[int, int, int]]
        for name in ("counts", "offsets", "rank_counts"):
            begin = -(-end // ROUTING_ALIGN) * ROUTING_ALIGN
            places[name] = begin, sizes[name], 0
            end = begin + sizes[name]
        fixed = tuple(n for begin, size, _ in places.values() for n in (begin, size))
        begin, each = -(-end // ROUTING_ALIGN) * ROUTING_ALIGN, sizes["sources"] // rows
        places["sources"] = begin, 0, each
        places = {name: place for name, place in places.items() if any(place[1:])}
        self._left = Leaves(beside, places, (begin, each), fixed)
        return self._left
