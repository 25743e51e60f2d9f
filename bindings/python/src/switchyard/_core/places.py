"""Where a communicator works: the host or a GPU, and memory there."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable
from ctypes import byref, c_int64, c_uint64
from typing import TYPE_CHECKING, Any, TypeVar

from .. import errors
from . import failures
from .abi import CALL
from .arguments import Bound, integer
from .native import Library, usable
from .splits import Shapes

if TYPE_CHECKING:
    from .comm import Communicator

Made = TypeVar("Made")

#: The calls of a reducer that can be explained, by the number of their collective in the library.
COLLECTIVES = {"all_reduce": 3, "reduce_scatter_tensor": 1, "all_gather_into_tensor": 2, "all_to_all_by_plan": 8}


def drop(lib: Library, handle: int) -> None:
    """Give a handle back, unless the process ends or has forked."""
    if usable():
        lib.drop(handle)


class Block(Bound):
    """Symmetric memory of the host or a GPU: the same offset in every rank's segment. Views of it hold it; :meth:`free` gives
    it back."""

    def __init__(self, comm: Communicator, handle: int, size: int) -> None:
        address, offset = c_uint64(), c_int64()
        comm._lib.check(comm._lib.block(handle, byref(address), byref(offset)))
        self.comm, self.handle, self.size = comm, handle, size
        self.address, self.offset, self.freed = address.value, offset.value, False

    def memory(self) -> memoryview:
        """The bytes, as an object with the buffer protocol."""
        return memory(self.address, self.size, self)

    def free(self, stream: int = 0) -> None:
        """Give the memory back, memory of a GPU once the CUstream has run what it has been given."""
        if self.freed:
            raise errors.Freed("switchyard: this memory was given back before")
        self.freed = True
        ticket = c_uint64()
        comm = self.comm
        comm._blocks.pop(self.address, None)
        comm._control(comm._lib.free(comm._handle, self.handle, stream, byref(ticket)), ticket)


class Place(Bound):
    """Where operations of a communicator work: on the host, which is the communicator itself, or on one of its GPUs. Memory and
    CUstreams are integers here."""

    _comm: Communicator
    _lib: Library
    _handle: int
    #: The parts that exchanges of the same shape have in common.
    _shapes: Shapes

    def _alloc(self, size: int, stream: int = 0) -> Block:
        """Take symmetric memory for work on a stream. Every rank makes the same calls of alloc and free, in the same order."""
        comm, ticket = self._comm, c_uint64()
        size = integer("size", size, 0)
        block = Block(
            comm, comm._control(self._lib.alloc(comm._handle, self._handle, stream, size, byref(ticket)), ticket), size
        )
        if size:
            comm._blocks[block.address] = block
        return block

    def verify(self) -> None:
        """Compare what the ranks have allocated and freed so far; every rank calls it and gets the same answer."""
        comm, ticket = self._comm, c_uint64()
        comm._control(self._lib.verify(comm._handle, self._handle, byref(ticket)), ticket)

    def check(self) -> None:
        """Raise what exchanges that have run by now have come to and that no ticket tells. It waits for nothing."""
        self._lib.check(self._lib.fault(self._handle))

    def _prepare(self, make: Callable[..., Made], *arguments: Any) -> Made:
        """The result of make for a call's arguments. Ranks that compare their calls hear of a refusal."""
        try:
            return make(*arguments)
        except errors.Error as err:
            self._refuse(err)
            raise

    def _refuse(self, err: errors.Error) -> None:
        """Tell ranks that compare their calls why this one does not make the next one. They get an error with it."""
        if self._comm.validate:
            text = str(err).removeprefix("switchyard: ")
            # The answer is this error, or that it is under way.
            self._lib.refuse(self._handle, failures.code_of(err), text.encode(), byref(c_uint64()))

    def _explain(self, dst: int, shape: int) -> str:
        """How an exchange into dst would be carried, in words."""
        text = ctypes.create_string_buffer(4096)
        self._lib.check(self._lib.explain(self._handle, dst, shape, text, len(text)))
        return text.value.decode(errors="replace")


    def _explain_reduction(self, call: str, size: int, dtype: int) -> str:
        """How a call of COLLECTIVES would be carried, in words. size is the bytes of its larger buffer."""
        text = ctypes.create_string_buffer(1 << 16)  # a line for each plan
        self._lib.check(self._lib.explain_reduction(self._handle, COLLECTIVES[call], size, dtype, text, len(text)))
        return text.value.decode(errors="replace")


class Gpu(Place):
    """A communicator's end on one GPU: a symmetric heap there, and exchanges and reductions of device memory. These are
    enqueued by their caller; the rest runs in the queue of the communicator."""

    def __init__(self, comm: Communicator, device: int, handle: int) -> None:
        self._comm, self.device, self._handle, self._lib = comm, device, handle, comm._lib
        self._shapes = Shapes(comm.rank, comm.size)
        self.side: Any = None
        self.ways: dict[Any, Any] = {}  # as side, of messages
        self.reduces = False  # open_reducer has been called
        # A call that only enqueues keeps the interpreter's lock; ranks that compare their calls first wait for each other.
        self._prefix = "" if comm.validate else "enqueue_"
        self._lib.bind(self)
        weakref.finalize(self, drop, comm._lib, handle).atexit = False

    def _bind(self) -> None:
        """Take the library's functions."""
        names = ("all_to_all", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all_by_plan")
        self._exchange, self._reduce, self._scatter, self._gather, self._spread, self._swap = (
            getattr(self._lib, self._prefix + name) for name in names
        )
        self._move, self._talk = self._lib.enqueue_transfer, self._lib.enqueue_messages

    def _all_to_all(self, stream: int, dst: int, src: int, shape: int) -> None:
        """Enqueue an exchange on a CUstream."""
        code = self._exchange(self._handle, stream, dst, src, shape, 0, None)
        if code:
            raise self._lib.error(code)

    def open_reducer(self) -> None:
        """Make the GPU ready for reductions and gathers, before the first of them. It is collective, and blocks until all ranks
        have come."""
        comm = self._comm
        with comm._opening:
            if not self.reduces:
                ticket = c_uint64()
                comm._control(self._lib.gpu_reducer(comm._handle, self._handle, byref(ticket)), ticket)
                self.reduces = True

    def _all_reduce(self, stream: int, dst: int, src: int, size: int, dtype: int, op: int) -> None:
        """Enqueue an all-reduce of size bytes on a CUstream."""
        code = self._reduce(self._handle, stream, dst, src, size, dtype, op, 0, None)
        if code:
            raise self._lib.error(code)

    def _reduce_scatter(self, stream: int, dst: int, dst_bytes: int, src: int, src_bytes: int, dtype: int, op: int) -> None:
        """Enqueue a reduce-scatter on a CUstream."""
        code = self._scatter(self._handle, stream, dst, dst_bytes, src, src_bytes, dtype, op, 0, None)
        if code:
            raise self._lib.error(code)

    def _all_gather(self, stream: int, dst: int, dst_bytes: int, src: int, src_bytes: int) -> None:
        """Enqueue an all-gather on a CUstream."""
        code = self._gather(self._handle, stream, dst, dst_bytes, src, src_bytes, 0, None)
        if code:
            raise self._lib.error(code)

    def _broadcast(self, stream: int, data: int, size: int, root: int) -> None:
        """Enqueue a broadcast on a CUstream."""
        code = self._spread(self._handle, stream, data, size, root, 0, None)
        if code:
            raise self._lib.error(code)

    def _all_to_all_by_plan(self, stream: int, dst: int, src: int, size: int) -> None:
        """Enqueue an all-to-all by a plan on a CUstream."""
        code = self._swap(self._handle, stream, dst, src, size, 0, None)
        if code:
            raise self._lib.error(code)

    def _transfer(self, stream: int, call: array[int]) -> None:
        """Enqueue a TransferCall on a CUstream."""
        code = self._move(self._handle, stream, call.buffer_info()[0], 0, None)
        if code:
            raise self._lib.error(code)

    def _messages(self, stream: int, calls: array[int], senders: int | None) -> None:
        """Enqueue MessageCalls on a CUstream, to be carried at the same time. senders is the address on the GPU of an int64 for
        each, which gets the rank that it was received from."""
        code = self._talk(self._handle, stream, calls.buffer_info()[0], len(calls) // CALL, 0, senders, None)
        if code:
            raise self._lib.error(code)

    def pool(self, size: int, stream: int) -> int:
        """Take symmetric memory for an allocator of torch and return the number of its functions. It stays taken."""
        comm, ticket = self._comm, c_uint64()
        size = integer("size", size, 0)
        number = comm._control(self._lib.gpu_pool(comm._handle, self._handle, stream, size, byref(ticket)), ticket)
        comm._pools += 1
        return number


class _Memory(ctypes.c_char * (1 << 46)):  # type: ignore[misc]
    """All of memory from an address on. It holds its owner."""


def memory(address: int, size: int, owner: object) -> memoryview:
    """Bytes at an address as an object with the buffer protocol, which holds owner."""
    everything = _Memory.from_address(address)
    everything.owner = owner
    return memoryview(everything)[:size]
