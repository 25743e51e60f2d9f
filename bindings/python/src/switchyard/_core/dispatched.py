"""Outputs and handles of dispatches, on the host and on GPUs."""

from __future__ import annotations

import weakref
from array import array
from ctypes import byref, c_int64
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .. import errors
from .arguments import Bound
from .comm import Communicator
from .native import AGAIN, SLICE
from .places import memory

if TYPE_CHECKING:
    from .taking import Lists

#: The parts of an output, in the order in which the library tells them.
PARTS = ("rows", "scales", "counts", "offsets", "rank_counts", "indices", "row_weights", "sources", "landed")
#: Those that the host knows as lists.
COUNTS = frozenset(("counts", "offsets", "rank_counts"))
#: Those with an entry for each row.
BESIDE_ROWS = frozenset(("rows", "scales", "indices", "row_weights", "sources"))

#: Where routings begin: a multiple of this.
ROUTING_ALIGN = 128

# The weights that combine multiplies rows by.
DISPATCHED, GIVEN, UNWEIGHTED, OF_TOKENS = range(4)


#: Parts of an output that become arrays or tensors: names, the bytes of each row, and the extents behind the rows.
Parts = list[tuple[str, int, tuple[int, ...]]]


class Counted(Protocol):
    """A dispatcher, for who wants to know how many rows came."""

    comm: Communicator
    _groups: int
    _local_experts: list[int]

    def _capturing(self) -> bool:
        """Whether calls go into a graph and do not run."""


class Maker(Counted, Protocol):
    """The questions that outputs ask of the dispatcher that made them."""

    by_token: bool
    _slots: dict[int, Slot]
    _moves: bool

    @property
    def local_experts(self) -> list[int]: ...

    def _part(self, side: Side, output: Output, name: str) -> Any:
        """A part of an output: a list on the host, or what side makes of it."""

    def _receive(self, output: Output, combine: bool, keep: object) -> None:
        """The second half of a call."""

    def _keep(self, dispatched: Dispatched) -> Routing:
        """The routing of a dispatch."""

    def _take(self, dispatched: Dispatched, length: int | None) -> Result:
        """All that a dispatch has left, in fresh memory."""


class Side(Protocol):
    """The maker of arrays or tensors of outputs."""

    def part(self, output: Output, name: str) -> Any:
        """A part of an output."""

    def rows(self, output: Output) -> Any:
        """The rows of an output, of their type."""

    def capturing(self) -> bool:
        """Whether calls go into a graph and do not run."""

    def beside(self, parts: Parts, length: int) -> tuple[list[Any], list[int]]:
        """Arrays or tensors for parts of an output with this many rows, ``None`` for one that it has not, and their addresses
        and bytes."""

    def room(self, size: int) -> tuple[Any, int]:
        """Bytes of fresh memory on the dispatcher's device, and where among them a routing begins."""

    def within(self, memory: Any, at: int, size: int, name: str) -> Any:
        """A part of an output that lies in such memory, from an address on."""


#: Dispatchers by the names that compiled graphs know them by.
named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


class HostCounts(NamedTuple):
    """How many rows a dispatch brought, for the host."""

    #: The length of the output with its padding.
    rows: int
    #: How many choices each of this rank's experts got.
    counts: list[int]
    #: The first row of each of this rank's experts, or with rows by token of those from each rank; and one number more, where
    #: the last end.
    offsets: list[int]
    #: How many rows came from each rank.
    rank_counts: list[int]


class Slot:
    """Where the outputs of dispatches lie whose rows begin at one place."""

    def __init__(self, dispatcher: Counted, handle: int) -> None:
        lib, words = dispatcher.comm._lib, array("q", bytes(8 * 2 * len(PARTS)))
        lib.check(lib.output(handle, words.buffer_info()[0]))
        self.parts = dict(zip(PARTS, zip(words[::2], words[1::2])))
        #: For torch, by name: what the library reads to describe a tensor.
        self.described: dict[str, array[int]] = {}


class Output(Bound):
    """The output of a dispatch, given back with the last reference to it and to what lies on it."""

    __slots__ = ("_hold", "_rows", "_slot", "_unhold", "counts", "dispatcher", "handle", "released", "routing")

    def __init__(
        self, dispatcher: Maker, handle: int, rows: int, routing: Routing | None = None, hold: int | None = None
    ) -> None:
        """rows is where they begin, 0 if the caller does not know. hold is one of the handle, of which this is a user then."""
        lib = dispatcher.comm._lib
        self._unhold = lib.unhold
        self._hold: Any = hold or lib.hold(handle)
        self.dispatcher, self.handle, self.released = dispatcher, handle, False
        #: Those that hold for good: of a call of the host, or of a routing. A graph brings others with every replay.
        self.counts: HostCounts | None = None if routing is None else routing.counts
        self.routing, self._rows = routing, rows
        self._slot: Slot | None = None

    def __del__(self) -> None:
        if self._hold is not None:  # else a call has ended it
            self._unhold(self._hold)

    @property
    def slot(self) -> Slot:
        """Where the parts lie. Most outputs that are taken are not asked."""
        if self._slot is None:
            slots = self.dispatcher._slots
            # Counts of one by a routing lie there, not where those of other outputs with these rows do.
            keeps = self.routing is None and not self.dispatcher._moves
            slot = slots.get(self._rows) if keeps else None
            if slot is None:
                slot = Slot(self.dispatcher, self.handle)
                if keeps:  # on the host, where rows is 0, it may be known by now
                    slot = slots.setdefault(slot.parts["rows"][0], slot)
            self._slot = slot
        return self._slot

    def alive(self) -> int:
        """The handle, for a call."""
        if self.released:
            raise errors.Freed("switchyard: this dispatch was given back before")
        return self.handle

    def host(self) -> HostCounts:
        """The counts, waited for. Those of a graph are others after every replay."""
        return counts_of(self.dispatcher, self.alive())

    def memory(self, name: str) -> memoryview:
        """Bytes of a part on the host, which hold the output."""
        return memory(*self.slot.parts[name], self)


def counts_of(d: Counted, handle: int) -> HostCounts:
    """The counts of a dispatch, waited for."""
    rows, lib, experts, groups, ranks = c_int64(), d.comm._lib, len(d._local_experts), d._groups, d.comm.size
    words = array("q", bytes(8 * (experts + groups + 1 + ranks)))
    at, code = words.buffer_info()[0], AGAIN
    of_groups, of_ranks = at + 8 * experts, at + 8 * (experts + groups + 1)
    while code == AGAIN:
        code = lib.counts(handle, SLICE, byref(rows), at, experts, of_groups, groups, of_ranks, ranks)
        if code == AGAIN and d._capturing():
            raise errors.Unsupported(
                "switchyard: a graph is being captured, and the host does not know how many rows this dispatch brought: ask "
                "before the capture, or after a replay"
            )
    lib.check(code)
    known = words.tolist()
    return HostCounts(rows.value, known[:experts], known[experts:-ranks], known[-ranks:])


class Routing(Bound):
    """Where the tokens of a dispatch went: :meth:`Dispatched.keep` and :meth:`Dispatched.take` make it,
    :meth:`Dispatcher.combine` and :meth:`Dispatcher.route` go by it. ``counts`` are those of the dispatch for the host, if it
    knows them.

    It needs no output, so any number may be alive, and each serves any number of calls. It is this rank's alone: a rank drops
    one by forgetting it, whenever it likes. ``memory`` is what it lies in, a tensor or an array of bytes that nobody else may
    write; calls on a stream other than the current one of :meth:`Dispatched.keep` are ordered behind that by their caller, who
    tells torch's allocator of them (``routing.memory.record_stream``).
    """

    __slots__ = ("__weakref__", "_dispatcher", "_name", "_side", "_tokens", "_weights", "counts", "memory")

    def __init__(
        self, dispatcher: Any, side: Side, name: int, memory: Any, tokens: int, counts: HostCounts | None, weights: Any
    ) -> None:
        self._dispatcher, self._side, self._name, self.memory = dispatcher, side, name, memory
        self._tokens, self.counts = tokens, counts
        self._weights = weights if getattr(weights, "requires_grad", False) else None

    @property
    def tokens(self) -> int:
        """How many tokens this rank has sent."""
        return self._tokens

    def host(self) -> HostCounts:
        """The counts, which this has not."""
        raise errors.InvalidArgument("switchyard: the host does not know how many rows this dispatch brought")

    def __repr__(self) -> str:
        return f"<switchyard.Routing of {self._tokens} tokens>"

    def __del__(self) -> None:
        lib = self._dispatcher.comm._lib
        if not lib.forked:
            lib.quick_release(self._name)


class Result:
    """All that a dispatch has left on this rank, in memory of the caller, by the names of :class:`Dispatched`; ``None`` for a
    part that the dispatcher has not. All but ``routing``, ``host`` and ``lists`` are tensors or arrays.

    - ``routing``: the way back, for :meth:`Dispatcher.combine` and :meth:`Dispatcher.route`;
    - ``host``: the counts, if the host knows them;
    - ``lists``: what ``sources``, ``counts``, ``offsets`` and ``rank_counts`` lie in, for who drops the rows and keeps these.
    """

    __slots__ = ("host", "indices", "lists", "routing", "row_weights", "rows", "scales")

    def __init__(
        self, rows: Any, scales: Any, indices: Any, row_weights: Any, lists: Lists, routing: Routing, host: HostCounts | None
    ) -> None:
        self.rows, self.scales, self.indices, self.row_weights = rows, scales, indices, row_weights
        self.lists, self.routing, self.host = lists, routing, host

    @property
    def sources(self) -> Any:
        """Which token of which rank each row is."""
        return self.lists.part("sources")

    @property
    def counts(self) -> Any:
        """How many choices each of this rank's experts got."""
        return self.lists.part("counts")

    @property
    def offsets(self) -> Any:
        """The first row of each group, and where the last one ends."""
        return self.lists.part("offsets")

    @property
    def rank_counts(self) -> Any:
        """How many rows came from each rank."""
        return self.lists.part("rank_counts")


class Dispatched(Bound):
    """A dispatch: the rows that this rank's experts got, and the way back.

    ``rows`` is [rows, hidden], laid out as the dispatcher was made for. There are also, if the dispatcher has them:

    - ``experts``: this rank's experts; ``tokens``: how many tokens this rank has sent;
    - ``counts``: how many choices each of ``experts`` got;
    - ``offsets``: the first row of each expert, or with rows by token of those from each rank, and where the last ones end;
    - ``rank_counts``: how many rows came from each rank;
    - ``indices`` and ``row_weights``: [rows, top_k] with rows by token, the place in ``experts`` of each choice (-1: not here)
      and its weight; with rows by expert ``row_weights`` is [rows], with ``row_weights=True``;
    - ``scales`` of float8 rows; ``sources``, [rows, 2], the rank and the token that each row came from; ``landed``, how many
      rows of each expert have arrived.

    On the host ``counts``, ``offsets`` and ``rank_counts`` are lists, and ``rows`` has as many as came. On a GPU they are int32
    tensors there, and ``rows`` has as many as could come: what lies behind the last one is undefined. So is padding in layouts
    "slab" and "rank_padded", behind ``counts`` rows of each expert or ``rank_counts`` rows of each rank, in ``rows``,
    ``indices`` and ``row_weights``: mask it.

    The output is given back to the dispatcher when neither this object nor a tensor on it nor a gradient that needs it is left,
    or by :meth:`release`.
    """

    rows: Any

    def __init__(
        self, dispatcher: Maker, side: Any, output: Any, tokens: int, weights: Any, parts: dict[str, Any]
    ) -> None:
        self._dispatcher, self._side, self._output = dispatcher, side, output
        self._weights, self._parts = weights, parts
        self._tokens = tokens
        self._half = False

    def __getattr__(self, name: str) -> Any:
        if name != "rows" or self._output is None:
            raise AttributeError(name)
        self.rows = rows = self._side.rows(self._output)
        return rows

    def _given(self) -> Any:
        """The output, for a call."""
        return self._output

    def _part(self, name: str) -> Any:
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = self._dispatcher._part(self._side, self._output, name)
        return part

    def __repr__(self) -> str:
        given_back = self._output is not None and self._output.released
        rows = "given back" if given_back else f"rows of shape {tuple(self.rows.shape)}"
        return f"<switchyard.Dispatched of {self._tokens} tokens: {rows}>"

    @property
    def tokens(self) -> int:
        """How many tokens this rank has sent."""
        return self._tokens

    @property
    def experts(self) -> list[int]:
        """This rank's experts, in the order of their rows."""
        return self._dispatcher.local_experts

    @property
    def counts(self) -> Any:
        """How many choices each of this rank's experts got."""
        return self._part("counts")

    @property
    def offsets(self) -> Any:
        """The first row of each group, and where the last one ends."""
        return self._part("offsets")

    @property
    def rank_counts(self) -> Any:
        """How many rows came from each rank."""
        return self._part("rank_counts")

    @property
    def scales(self) -> Any:
        """The scales of float8 rows."""
        return self._part("scales")

    @property
    def indices(self) -> Any:
        """With rows by token, which of this rank's experts each row is for."""
        return self._part("indices")

    @property
    def row_weights(self) -> Any:
        """The weights of the dispatch, one for each row."""
        return self._part("row_weights")

    @property
    def sources(self) -> Any:
        """Which token of which rank each row is."""
        return self._part("sources")

    @property
    def landed(self) -> Any:
        """How many rows of each of this rank's experts have arrived."""
        return self._part("landed")

    def host_counts(self) -> HostCounts:
        """How many rows came, for the host. On a GPU it waits until the ranks have told each other, not for the rows, and needs
        a dispatcher with ``host_counts=True``; a dispatch in a graph has those of its latest replay, and none before."""
        output = self._given()
        return output.host() if output.counts is None else output.counts

    @property
    def num_rows(self) -> int:
        """Rows of the output, padding included: :meth:`host_counts` says."""
        return self.host_counts().rows

    def expert_rows(self) -> list[Any]:
        """The rows of each local expert, as views of ``rows``. On a GPU the host waits for :meth:`host_counts`."""
        if self._dispatcher.by_token:
            raise errors.InvalidArgument("switchyard: expert_rows: the rows lie by token")
        host = self.host_counts()
        return [self.rows[first : first + n] for first, n in zip(host.offsets, host.counts)]

    @property
    def between_halves(self) -> bool:
        """Whether this is a dispatch with ``async_op`` whose :meth:`wait` has not been called."""
        return self._half

    def keep(self) -> Routing:
        """Where the tokens went, in fresh memory of torch or numpy: :meth:`Dispatcher.route` goes by it when this output has
        been given back. No other rank takes part. On a GPU the copy is enqueued on the current stream, and a graph can
        capture it. ``host_counts`` of what goes by it are those of this call: where there are some the host waits for them,
        except while a graph is captured."""
        self._given()
        return self._dispatcher._keep(self)

    def take(self, length: int | None = None) -> Result:
        """Copy all that the dispatch has left, and where the tokens went, to fresh memory of torch or numpy, by one call. The
        output is given back. No other rank takes part. On a GPU the copy is enqueued on the current stream, and a graph can
        capture it.

        ``length`` is how many rows ``rows``, ``scales``, ``indices``, ``row_weights`` and ``sources`` have. If more came the
        first are there; if fewer, ``indices`` have -1 and ``row_weights`` 0 behind the last, and the others are undefined
        there. ``None``: as many as came where :meth:`host_counts` says, for which the host waits, else all that could come."""
        self._given()
        return self._dispatcher._take(self, length)

    def wait(self) -> Dispatched:
        """The second half of a dispatch with ``async_op``: ``rows`` may be used after it, on a GPU on the then current stream.
        It returns this object, and does nothing when there is no second half."""
        if self._half:
            self._half = False
            self._dispatcher._receive(self._output, False, self)
        return self

    def release(self) -> None:
        """Give the output back now. Nothing that lies on it may be used any more, nor a gradient be computed that needs it."""
        if self._output is not None and not self._output.released:
            self._output.released = True
            lib = self._dispatcher.comm._lib
            lib.check(lib.release(self._output.handle))


class Combining(Bound):
    """The first half of a combine. :meth:`wait` is the second."""

    def __init__(self, dispatched: Any, result: Any, keep: object) -> None:
        self._dispatched, self._result, self._keep = dispatched, result, keep

    def wait(self) -> Any:
        """Complete the combine, on a GPU on the current stream, and return its result."""
        if self._dispatched is not None:
            self._dispatched._dispatcher._receive(self._dispatched._output, True, self._keep)
            self._dispatched = self._keep = None
        return self._result


def biases_of(bias: Any) -> list[Any]:
    """One bias, two or none."""
    biases = [] if bias is None else list(bias) if isinstance(bias, (tuple, list)) else [bias]
    if len(biases) > 2:
        raise errors.InvalidArgument(f"switchyard: combine: {len(biases)} biases, want at most 2")
    return biases
