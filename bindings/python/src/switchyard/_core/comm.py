"""Communicators: a group's operations on raw memory. Other modules know tensors and arrays."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Iterable
from ctypes import byref, c_int32, c_int64, c_uint64
from typing import Any

from .. import errors
from .abi import CALL
from .algorithms import registered
from .arguments import address, integer, microseconds
from .meet import join_all, stop_all
from .native import AGAIN, SLICE, Library, library, usable
from .places import Block, Gpu, Place, drop
from .requests import Request, Requests
from .splits import Shapes
from .work import Ticket

# How long operations that are under way get to become complete when the process ends, in milliseconds.
_DRAIN = 2000


class Communicator(Place):
    """One rank's end of a group of ranks: its operations run in the order of the calls, which is the same on all ranks.

    :func:`switchyard.init` makes one, or torch's process groups have one each. The calls of this package take it as ``group=``.
    ``name`` is the group's, and ``validate`` says whether the ranks compare their calls. Leaving a ``with`` block closes it.
    """

    def __init__(self, lib: Library, handle: int, words: int, name: str, validate: bool = False) -> None:
        self._lib, self._handle, self.name, self.validate = lib, handle, name, validate
        self._ran = c_uint64.from_address(words)
        self._in_flight: deque[tuple[int, object]] = deque()
        self._requests = Requests()
        self._blocks: dict[int, Block] = {}
        self._shared: set[Any] = set()  # what peers may have open
        self._closed = False
        self._dispatchers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._gpus: dict[int, Gpu] = {}
        #: For torch, by the ordinal of a GPU or -1: exchanges that are operators.
        self._exchanges: dict[int, Any] = {}
        self._no_gpus: dict[int, errors.Unsupported] = {}
        self._opening = threading.Lock()
        self._pools = 0
        self._hosts = 1  # on how many hosts ranks are that have met in a store
        weakref.finalize(self, drop, lib, handle).atexit = False
        _alive.add(self)

    @property
    def rank(self) -> int:
        """This rank's number in the group, from 0 on."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return self._size

    @property
    def _comm(self) -> Communicator:  # type: ignore[override]
        """Itself, as a place."""
        return self

    # Making one

    @classmethod
    def _open(cls, options: dict[str, Any], name: str = "world") -> Communicator:
        """Join a group. Blocks until all ranks have come."""
        lib = library()
        handle, words = c_uint64(), c_uint64()
        options = {"Name": name, "Environ": environ(), **options}
        for option, values in registered().items():
            options[option] = [*options.get(option, []), *values]
        lib.check(lib.open(json.dumps(options).encode(), byref(handle), byref(words)))
        comm = cls(lib, handle.value, words.value, name, bool(options.get("Validate")))
        comm._join()
        return comm

    def _join(self) -> None:
        try:
            Ticket(self, 1, None).wait()
            rank, size = c_int32(), c_int32()
            self._lib.check(self._lib.rank(self._handle, byref(rank), byref(size)))
        except BaseException:
            self._abandon(drain=0)
            raise
        self._rank, self._size = rank.value, size.value
        self._shapes = Shapes(self._rank, self._size)

    # Running operations

    def _run(self, code: int, number: int, keep: object) -> None:
        """Wait for an operation that was submitted with this answer."""
        if code == AGAIN:
            ticket = Ticket(self, number, keep)
            try:
                ticket.wait()
            except BaseException:
                if not ticket.done:
                    self._hold(number, keep)  # interrupted: the operation goes on
                raise
        elif code:
            raise self._lib.error(code)

    def _ticket(self, code: int, number: int, keep: object) -> Ticket:
        """An operation that was submitted with this answer."""
        if code == AGAIN:
            self._hold(number, keep)
            return Ticket(self, number, keep)
        if code and number == 0:
            raise self._lib.error(code)  # it was not submitted
        ticket = Ticket(self, number, None, self._lib.error(code) if code else None)
        ticket.done = True
        return ticket

    def _hold(self, number: int, keep: object) -> None:
        """Keep the memory of an operation alive until it has run, whatever becomes of its Work."""
        self._let_go()
        self._in_flight.append((number, keep))

    def _let_go(self) -> None:
        """Drop what operations held that have run."""
        held, ran = self._in_flight, self._ran.value
        try:
            while held and held[0][0] <= ran:
                held.popleft()
        except IndexError:  # another thread was faster
            pass

    def _control(self, code: int, ticket: c_uint64) -> int:
        """Wait for an operation of the control plane and return its value."""
        value = c_int64()
        if code == 0:
            code = AGAIN  # done already: its value is still to be had
        elif code != AGAIN:
            raise self._lib.error(code)
        while code == AGAIN:
            code = self._lib.wait(self._handle, ticket, SLICE, byref(value))
        self._lib.check(code)
        return value.value

    def _finish(self, code: int, ticket: c_uint64, keep: object) -> int:
        """Wait for an operation that is under way, and return its value. An interrupted wait leaves it under way."""
        self._hold(ticket.value, keep)
        value = self._control(code, ticket)
        self._let_go()
        return value

    def _all_to_all(self, dst: int, src: int, shape: int, keep: object, async_op: bool) -> Ticket | None:
        """Exchange what a core.Shape at this address says."""
        ticket = c_uint64()
        code = self._lib.all_to_all(self._handle, 0, dst, src, shape, 0 if async_op else SLICE, ticket)
        if async_op:
            return self._ticket(code, ticket.value, keep)
        if code:
            self._run(code, ticket.value, keep)
        return None

    def _all_reduce(self, dst: int, src: int, size: int, dtype: int, op: int, keep: object, async_op: bool) -> Ticket | None:
        """Combine size bytes at src of all ranks into every rank's dst, which may be src."""
        ticket = c_uint64()
        code = self._lib.all_reduce(self._handle, 0, dst, src, size, dtype, op, 0 if async_op else SLICE, ticket)
        if async_op:
            return self._ticket(code, ticket.value, keep)
        if code:
            self._run(code, ticket.value, keep)
        return None

    def _reduce_scatter(
        self, dst: int, dst_bytes: int, src: int, src_bytes: int, dtype: int, op: int, keep: object, async_op: bool
    ) -> Ticket | None:
        """Combine src of all ranks and leave this rank's slice in dst."""
        ticket = c_uint64()
        code = self._lib.reduce_scatter(
            self._handle, 0, dst, dst_bytes, src, src_bytes, dtype, op, 0 if async_op else SLICE, ticket
        )
        if async_op:
            return self._ticket(code, ticket.value, keep)
        if code:
            self._run(code, ticket.value, keep)
        return None

    def _all_gather(self, dst: int, dst_bytes: int, src: int, src_bytes: int, keep: object, async_op: bool) -> Ticket | None:
        """Put src of rank k into slice k of every rank's dst."""
        ticket = c_uint64()
        code = self._lib.all_gather(self._handle, 0, dst, dst_bytes, src, src_bytes, 0 if async_op else SLICE, ticket)
        if async_op:
            return self._ticket(code, ticket.value, keep)
        if code:
            self._run(code, ticket.value, keep)
        return None

    def _broadcast(self, data: int, size: int, root: int, keep: object, async_op: bool) -> Ticket | None:
        """Copy size bytes of rank root to all ranks."""
        ticket = c_uint64()
        code = self._lib.broadcast(self._handle, 0, data, size, root, 0 if async_op else SLICE, ticket)
        if async_op:
            return self._ticket(code, ticket.value, keep)
        if code:
            self._run(code, ticket.value, keep)
        return None

    def _all_to_all_by_plan(self, dst: int, src: int, size: int, keep: object, async_op: bool) -> Ticket | None:
        """Send slice k of size bytes at src to rank k, by a plan."""
        ticket = c_uint64()
        code = self._lib.all_to_all_by_plan(self._handle, 0, dst, src, size, 0 if async_op else SLICE, ticket)
        if async_op:
            return self._ticket(code, ticket.value, keep)
        if code:
            self._run(code, ticket.value, keep)
        return None

    def _messages(self, calls: array[int], keep: object, async_op: bool) -> Request:
        """Send and receive what MessageCalls say, at the same time."""
        name, sources = c_uint64(), array("q", (-1,)) * (len(calls) // CALL)
        at, n = calls.buffer_info()[0], len(sources)
        code = self._lib.messages(self._handle, 0, at, n, 0 if async_op else SLICE, sources.buffer_info()[0], name)
        return self._request(code, name.value, sources, keep, async_op)

    def _transfer(self, call: array[int], keep: object = None, async_op: bool = False) -> Request:
        """Make a TransferCall on the host."""
        name = c_uint64()
        code = self._lib.transfer(self._handle, 0, call.buffer_info()[0], 0 if async_op else SLICE, name)
        return self._request(code, name.value, array("q"), keep, async_op)

    def _request(self, code: int, name: int, sources: array[int], keep: object, async_op: bool) -> Request:
        """The request that was submitted with this answer, over unless async_op."""
        if code not in (0, AGAIN):
            raise self._lib.error(code)
        request = Request(self._lib, name if code == AGAIN else 0, sources, keep)
        if async_op and code == AGAIN:
            self._requests.add(request)
        elif code == AGAIN:
            try:
                request.wait()
            except BaseException:
                if not request.poll():
                    self._requests.add(request)  # interrupted: it goes on
                raise
        return request

    def _barrier(self, async_op: bool = False) -> Ticket | None:
        """Wait until all ranks have called it."""
        ticket = c_uint64()
        code = self._lib.barrier(self._handle, 0, 0 if async_op else SLICE, ticket)
        if async_op:
            return self._ticket(code, ticket.value, None)
        if code:
            self._run(code, ticket.value, None)
        return None

    def verify(self) -> None:
        """Compare what the ranks have allocated and freed so far; every rank calls it and gets the same answer."""
        super().verify()
        for gpu in self._gpus.values():
            gpu.verify()

    # GPUs

    def _gpu(self, device: int, **options: Any) -> Gpu:
        """This rank's end on a GPU, by its ordinal. The first call for a GPU is collective and takes up to some seconds;
        ranks may share one. Unsupported says, on every rank, that they cannot exchange there. The options are those of the
        library, and only for a GPU that is not ready yet."""
        found = self._gpus.get(device)
        if found is None:
            with self._opening:
                found = self._gpus.get(device)
                if found is None:
                    found = self._gpus[device] = self._open_gpu(device, options)
                    return found
        if options:
            raise errors.InvalidArgument(f"switchyard: cuda:{device} is in use: its options were those of the first call")
        return found

    def _open_gpu(self, device: int, options: dict[str, Any]) -> Gpu:
        if device in self._no_gpus:
            raise self._no_gpus[device]
        ticket, options = c_uint64(), {"Device": device, "Environ": environ(), **options}
        try:
            code = self._lib.gpu_open(self._handle, json.dumps(options).encode(), byref(ticket))
            return Gpu(self, device, self._control(code, ticket))
        except errors.Unsupported as err:
            self._no_gpus[device] = err
            raise

    def check(self) -> None:
        """Raise what exchanges on GPUs that have run by now have come to. It waits for nothing."""
        super().check()
        for gpu in self._gpus.values():
            gpu.check()

    def split(self, color: int, key: int = 0) -> Communicator | None:
        """Make communicators of the ranks that pass the same color, ordered by key. A negative color joins none."""
        color, key = integer("color", color), integer("key", key)
        handle, words = self._derive(self._lib.split, color, key)
        return self._child(handle, words, str(color)) if handle else None

    def shrink(self, leave_out: Iterable[int] = (), timeout: float | None = None) -> Communicator:
        """Make a communicator of the ranks that are left after some were lost, as :func:`switchyard.shrink` describes."""
        if isinstance(leave_out, (str, bytes)) or not isinstance(leave_out, Iterable):
            raise errors.InvalidType(f"switchyard: leave_out is {leave_out!r}, want a list of ranks")
        out = array("q", [integer("leave_out", rank) for rank in leave_out])
        for rank in out:
            if rank == self.rank or not 0 <= rank < self.size:
                raise errors.InvalidArgument(
                    f"switchyard: leave_out has rank {rank}, want other ranks of {self.size} than {self.rank}"
                )
        within = microseconds("timeout", timeout)
        try:
            child = self._derive(self._lib.shrink, out.buffer_info()[0], len(out), within)
        except errors.TimedOut as err:
            if err.rank is None or err.rank == self.rank:
                raise
            err.args = (f"{err}: if it hangs, go on without it by leave_out=[{err.rank}]",)
            raise
        return self._child(*child, "survivors")

    def admit(self, addr: str, n: int = 1, timeout: float | None = None) -> Communicator:
        """Make a communicator of these ranks and ``n`` newcomers, as :func:`switchyard.admit` describes."""
        addr, n, within = address("addr", addr), integer("n", n, 1), microseconds("timeout", timeout)
        return self._child(*self._derive(self._lib.admit, n, addr.encode(), within), "admitted")

    def replace(self, rank: int, addr: str, timeout: float | None = None) -> None:
        """Let a process in the place of a lost rank, as :func:`switchyard.replace` describes."""
        addr, rank, within = address("addr", addr), integer("rank", rank, 0), microseconds("timeout", timeout)
        self._lib.check(self._lib.replace(self._handle, rank, addr.encode(), within))

    def _derive(self, make: Any, *arguments: Any) -> tuple[int, c_uint64]:
        """Have a function of the library make a communicator of this one: its handle, 0 for none, and its words."""
        ticket, words = c_uint64(), c_uint64()
        code = make(self._handle, *arguments, byref(words), byref(ticket))
        return self._control(code, ticket), words

    def _child(self, handle: int, words: c_uint64, name: str) -> Communicator:
        comm = Communicator(self._lib, handle, words.value, f"{self.name}/{name}", self.validate)
        comm._join()
        return comm

    def _set_timeout(self, seconds: float) -> None:
        """Bound the waits of operations that are submitted from here on."""
        ticket = c_uint64()
        self._ticket(self._lib.set_timeout(self._handle, microseconds("timeout", seconds), byref(ticket)), ticket.value, None)

    def abort(self, reason: str = "aborted") -> None:
        """Fail the group on all ranks at once: their operations end with an error that names this rank."""
        self._lib.check(self._lib.abort(self._handle, reason.encode()))

    def close(self) -> None:
        """Leave the group, together with all ranks. Symmetric tensors that are still referenced stay readable."""
        if self._closed:
            return
        self._closed = True
        keep, ticket = self._keep(), c_uint64()
        try:
            self._control(self._lib.close(self._handle, keep, byref(ticket)), ticket)
        except errors.Error:
            self._forget()
            raise
        except BaseException:  # interrupted
            self._leave(0, keep)
            raise
        self._forget()

    def _abandon(self, drain: int = _DRAIN, keep: bool = False) -> None:
        """Leave the group without waiting for anybody; what is under way gets drain milliseconds."""
        if self._closed or not usable():
            return
        self._closed = True
        self._leave(drain, 1 if keep else self._keep())

    def _leave(self, drain: int, keep: int) -> None:
        self._lib.check(self._lib.abandon(self._handle, drain, keep))
        self._forget()  # now, not before, the memory of operations may go

    def _keep(self) -> int:
        """Whether tensors lie in the symmetric memory, which then has to stay."""
        return 1 if self._blocks or self._pools or self._dispatchers_in_use() else 0

    def _dispatchers_in_use(self) -> bool:
        return any(d._alive() for d in self._dispatchers)

    def _forget(self) -> None:
        _alive.discard(self)
        self._in_flight.clear()
        self._requests.clear()
        self._shared.clear()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon(drain=0)

    def __repr__(self) -> str:
        return f"<switchyard.Communicator {self.name!r} rank {self.rank} of {self.size}>"


_alive: set[Communicator] = set()


def blocks() -> list[Block]:
    """All symmetric memory that is in use."""
    return [block for comm in list(_alive) for block in list(comm._blocks.values())]


@atexit.register
def _end() -> None:
    """Stop everything before the interpreter takes the memory away that operations work on."""
    stop_all()
    if usable():
        for comm in list(_alive):
            comm._abandon(keep=True)
    join_all()


def environ() -> dict[str, str]:
    """The environment as it is now: the library has the one with which the process began, and takes from this what it reads."""
    return dict(os.environ)


def new_id(host: str) -> str:
    """An address of a group to be, with a secret."""
    room = ctypes.create_string_buffer(1024)
    library().check(library().new_id(host.encode(), room, len(room)))
    return room.value.decode()


_default: Communicator | None = None
_default_lock = threading.Lock()


def default() -> Communicator:
    """The communicator of calls without a group: what init made, or the one that the launcher's variables describe."""
    global _default
    if _default is None or _default._closed:
        with _default_lock:
            if _default is None or _default._closed:
                _default = Communicator._open({"Env": True, "Launched": True})
    return _default


def set_default(comm: Communicator | None) -> None:
    global _default
    _default = comm
