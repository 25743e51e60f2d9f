"""Communicators: a group's operations on raw memory. What tensors and arrays are is others' business."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import byref, c_int32, c_int64, c_uint64
from typing import Any

from . import errors
from ._native import AGAIN, SLICE, Library, library, usable

# The data types of reductions, by number in the ABI.
DTYPES = {
    "uint8": 0,
    "int32": 1,
    "int64": 2,
    "float16": 3,
    "bfloat16": 4,
    "float32": 5,
    "float64": 6,
    "float8_e4m3fn": 7,
    "float8_e5m2": 8,
}
# Integers whose sums and products have the same bits as those of another type.
_SAME_BITS = {"int8": "uint8", "uint32": "int32", "uint64": "int64"}
OPS = {"sum": 0, "avg": 1, "min": 2, "max": 3, "prod": 4}


def reduction(dtype: str, op: str) -> tuple[int, int] | None:
    """Data type and operator as the library takes them, None for what it cannot do."""
    if dtype == "bool":
        # Sums of truth values are "or", products are "and".
        dtype, op = "uint8", {"sum": "max", "prod": "min", "max": "max", "min": "min"}.get(op, "")
    elif op in ("sum", "prod"):
        dtype = _SAME_BITS.get(dtype, dtype)
    elif op == "avg" and "float" not in dtype:
        return None
    if dtype not in DTYPES or op not in OPS:
        return None
    return DTYPES[dtype], OPS[op]


# How long operations that are under way get to become complete when the process ends, in milliseconds.
_DRAIN = 2000


class Ticket:
    """An operation that was submitted: what to wait for and what it keeps alive."""

    __slots__ = ("comm", "done", "error", "keep", "number")

    def __init__(self, comm: Communicator, number: int, keep: object, error: errors.Error | None = None) -> None:
        self.comm, self.number, self.keep, self.error = comm, number, keep, error
        self.done = error is not None

    def poll(self) -> bool:
        """Whether the operation has run."""
        if not self.done and self.comm._ran.value >= self.number:
            self._finish(self.comm._lib.wait(self.comm._handle, self.number, 0, byref(c_int64())))
        return self.done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the operation and raise its error. False means that timeout seconds have passed without it."""
        if not self.done:
            deadline = None if timeout is None else time.monotonic() + timeout
            comm, value, code = self.comm, c_int64(), AGAIN
            while code == AGAIN:
                us = SLICE
                if deadline is not None:
                    us = min(SLICE, int((deadline - time.monotonic()) * 1e6))
                    if us <= 0:
                        if not self.poll():
                            return False
                        break
                code = comm._lib.wait(comm._handle, self.number, us, byref(value))
            if not self.done:
                self._finish(code)
        if self.error is not None:
            raise self.error
        return True

    def _finish(self, code: int) -> None:
        if code == AGAIN:
            return
        if code:
            self.error = self.comm._lib.error(code)
        self.done, self.keep = True, None


class Work:
    """An operation that runs behind the caller's back; the counterpart of ``torch.distributed.Work``."""

    def __init__(self, ticket: Ticket, outputs: Sequence[Any] = ()) -> None:
        self._ticket, self._outputs = ticket, outputs

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the operation is complete and raise its error. It may be called again, from any thread."""
        if not self._ticket.wait(timeout):
            raise errors.TimedOut(f"switchyard: the operation was not complete after {timeout} s; it goes on")
        return True

    def is_completed(self) -> bool:
        """Whether the operation has run, well or not."""
        return self._ticket.poll()

    def exception(self) -> BaseException | None:
        """The operation's error once it has run."""
        return self._ticket.error if self._ticket.poll() else None

    def result(self) -> list[Any]:
        """The outputs."""
        return list(self._outputs)


class Block:
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


class Gpu:
    """A communicator's end on one GPU: a symmetric heap there, and exchanges of device memory. Memory and CUstreams are
    integers here. Exchanges are enqueued by their caller; the rest runs in the queue of the communicator."""

    def __init__(self, comm: Communicator, device: int, handle: int) -> None:
        self.comm, self.device, self.handle, self.lib = comm, device, handle, comm._lib
        #: What calls have in common, for those who make them.
        self.shapes: dict[Any, tuple[int, array[int]]] = {}
        self.side: Any = None
        weakref.finalize(self, _drop, comm._lib, handle).atexit = False

    def alloc(self, size: int, stream: int) -> Block:
        """Take symmetric memory for work on a stream. Every rank makes the same calls, in the same order."""
        comm, ticket = self.comm, c_uint64()
        handle = comm._control(self.lib.gpu_alloc(comm._handle, self.handle, stream, size, byref(ticket)), ticket)
        block = Block(comm, handle, size)
        if size:
            comm._blocks[block.address] = block
        return block

    def pool(self, size: int, stream: int) -> int:
        """Take symmetric memory for an allocator of torch and return the number of its functions. It stays taken."""
        comm, ticket = self.comm, c_uint64()
        number = comm._control(self.lib.gpu_pool(comm._handle, self.handle, stream, size, byref(ticket)), ticket)
        comm._pools += 1
        return number

    def verify(self) -> None:
        """Compare what the ranks have allocated and freed so far."""
        comm, ticket = self.comm, c_uint64()
        comm._control(self.lib.gpu_verify(comm._handle, self.handle, byref(ticket)), ticket)

    def check(self) -> None:
        """Raise what exchanges that have run by now have come to."""
        self.lib.check(self.lib.gpu_fault(self.handle))


class _Memory(ctypes.c_char * (1 << 46)):  # type: ignore[misc]
    """All of memory from an address on. It holds its owner."""


def memory(address: int, size: int, owner: object) -> memoryview:
    """Bytes at an address as an object with the buffer protocol, which holds owner."""
    everything = _Memory.from_address(address)
    everything.owner = owner
    return memoryview(everything)[:size]


class Communicator:
    """One rank's end of a group of ranks: its operations run in the order of the calls, which is the same on all ranks.

    ``switchyard.init`` makes one, or torch's process groups have one each. Memory is passed as addresses here.
    """

    rank: int
    size: int

    def __init__(self, lib: Library, handle: int, words: int, name: str) -> None:
        self._lib, self._handle, self.name = lib, handle, name
        self._ran = c_uint64.from_address(words)
        self._in_flight: deque[tuple[int, object]] = deque()
        self._blocks: dict[int, Block] = {}
        self._closed = False
        self._dispatchers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._gpus: dict[int, Gpu] = {}
        self._no_gpus: dict[int, errors.Unsupported] = {}
        self._opening = threading.Lock()
        self._pools = 0
        weakref.finalize(self, _drop, lib, handle).atexit = False
        _alive.add(self)

    # Making one

    @classmethod
    def open(cls, options: dict[str, Any], name: str = "world") -> Communicator:
        """Join a group. Blocks until all ranks have come."""
        lib = library()
        handle, words = c_uint64(), c_uint64()
        options = {"Name": name, "Environ": _environ(), **options}
        lib.check(lib.open(json.dumps(options).encode(), byref(handle), byref(words)))
        comm = cls(lib, handle.value, words.value, name)
        comm._join()
        return comm

    def _join(self) -> None:
        try:
            Ticket(self, 1, None).wait()
            rank, size = c_int32(), c_int32()
            self._lib.check(self._lib.rank(self._handle, byref(rank), byref(size)))
        except BaseException:
            self.abandon(drain=0)
            raise
        self.rank, self.size = rank.value, size.value

    @classmethod
    def meet(
        cls,
        rank: int,
        size: int,
        put: Callable[[int, bytes], None],
        get: Callable[[int], bytes | None],
        options: dict[str, Any],
        name: str,
    ) -> Communicator | None:
        """Join ranks that have a store: put publishes a rank's card and get looks for one. None means that the ranks
        are not all in one place, which every rank finds out alike."""
        lib = library()
        options = {**options, "Rank": rank, "Size": size, "Name": name, "Environ": _environ()}
        listener, room = c_uint64(), ctypes.create_string_buffer(256)
        code = lib.listen(json.dumps(options).encode(), byref(listener), room, len(room))
        if code:
            error = lib.error(code)
            put(rank, json.dumps({"error": str(error)}).encode())
            raise error
        put(rank, json.dumps({"place": _place(), "addr": room.value.decode(), "abi": _version()}).encode())
        try:
            cards = _collect(size, get, options.get("JoinSeconds") or 120.0)
        except BaseException:
            lib.unlisten(listener)
            raise
        for other, card in enumerate(cards):
            if "error" in card or card["abi"] != _version():
                lib.unlisten(listener)
                if "error" in card:
                    raise errors.Mismatch(f"switchyard: rank {other} cannot join: {card['error']}")
                raise errors.Mismatch(f"switchyard: rank {rank} has version {_version()}, rank {other} has {card['abi']}")
        if any(card["place"] != cards[0]["place"] for card in cards):
            lib.unlisten(listener)
            return None
        return cls.open({**options, "Listener": listener.value, "Addrs": [card["addr"] for card in cards]}, name)

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
        held, ran = self._in_flight, self._ran.value
        try:
            while held and held[0][0] <= ran:
                held.popleft()
        except IndexError:  # another thread was faster
            pass
        held.append((number, keep))

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

    def all_to_all(
        self,
        dst: int,
        dst_bytes: int,
        src: int,
        src_bytes: int,
        send: array[int] | None,
        recv: array[int] | None,
        elem: int,
        keep: object,
        async_op: bool,
    ) -> Ticket | None:
        """send[k] rows of elem bytes go to rank k, recv[k] come from it; None divides a buffer equally."""
        ticket = c_uint64()
        code = self._lib.all_to_all(
            self._handle,
            0,
            dst,
            dst_bytes,
            src,
            src_bytes,
            send.buffer_info()[0] if send is not None else None,
            recv.buffer_info()[0] if recv is not None else None,
            self.size,
            elem,
            0 if async_op else SLICE,
            ticket,
        )
        if async_op:
            return self._ticket(code, ticket.value, keep)
        if code:
            self._run(code, ticket.value, keep)
        return None

    def all_reduce(self, dst: int, src: int, size: int, dtype: int, op: int, keep: object, async_op: bool) -> Ticket | None:
        """Combine size bytes at src of all ranks into every rank's dst, which may be src."""
        ticket = c_uint64()
        code = self._lib.all_reduce(self._handle, 0, dst, src, size, dtype, op, 0 if async_op else SLICE, ticket)
        if async_op:
            return self._ticket(code, ticket.value, keep)
        if code:
            self._run(code, ticket.value, keep)
        return None

    def reduce_scatter(
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

    def all_gather(self, dst: int, dst_bytes: int, src: int, src_bytes: int, keep: object, async_op: bool) -> Ticket | None:
        """Put src of rank k into slice k of every rank's dst."""
        ticket = c_uint64()
        code = self._lib.all_gather(self._handle, 0, dst, dst_bytes, src, src_bytes, 0 if async_op else SLICE, ticket)
        if async_op:
            return self._ticket(code, ticket.value, keep)
        if code:
            self._run(code, ticket.value, keep)
        return None

    def barrier(self, async_op: bool = False) -> Ticket | None:
        """Wait until all ranks have called it."""
        ticket = c_uint64()
        code = self._lib.barrier(self._handle, 0, 0 if async_op else SLICE, ticket)
        if async_op:
            return self._ticket(code, ticket.value, None)
        if code:
            self._run(code, ticket.value, None)
        return None

    # Symmetric memory

    def alloc(self, size: int) -> Block:
        """Take symmetric memory. Every rank makes the same calls of alloc and free, in the same order."""
        ticket = c_uint64()
        handle = self._control(self._lib.alloc(self._handle, size, byref(ticket)), ticket)
        block = Block(self, handle, size)
        if size:
            self._blocks[block.address] = block
        return block

    def verify(self) -> None:
        """Compare what the ranks have allocated and freed so far; every rank calls it and gets the same answer."""
        ticket = c_uint64()
        self._control(self._lib.verify(self._handle, byref(ticket)), ticket)
        for gpu in self._gpus.values():
            gpu.verify()

    # GPUs

    def gpu(self, device: int) -> Gpu:
        """This rank's end on a GPU, by its ordinal. The first call for a GPU is collective and takes up to some seconds;
        ranks may share one. Unsupported says, on every rank, that they cannot exchange there."""
        found = self._gpus.get(device)
        if found is None:
            with self._opening:
                found = self._gpus.get(device)
                if found is None:
                    found = self._gpus[device] = self._open_gpu(device)
        return found

    def _open_gpu(self, device: int) -> Gpu:
        if device in self._no_gpus:
            raise self._no_gpus[device]
        ticket, options = c_uint64(), {"Device": device, "Environ": _environ()}
        try:
            code = self._lib.gpu_open(self._handle, json.dumps(options).encode(), byref(ticket))
            return Gpu(self, device, self._control(code, ticket))
        except errors.Unsupported as err:
            self._no_gpus[device] = err
            raise

    def check(self) -> None:
        """Raise what exchanges on GPUs that have run by now have come to. It waits for nothing."""
        for gpu in self._gpus.values():
            gpu.check()

    # Subgroups and the end

    def split(self, color: int, key: int = 0) -> Communicator | None:
        """Make communicators of the ranks that pass the same color, ordered by key. A negative color joins none."""
        ticket, words = c_uint64(), c_uint64()
        code = self._lib.split(self._handle, color, key, byref(words), byref(ticket))
        handle = self._control(code, ticket)
        if handle == 0:
            return None
        comm = Communicator(self._lib, handle, words.value, f"{self.name}/{color}")
        comm._join()
        return comm

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

    def abandon(self, drain: int = _DRAIN, keep: bool = False) -> None:
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
        return any(d._outputs for d in self._dispatchers)

    def _forget(self) -> None:
        _alive.discard(self)
        self._in_flight.clear()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon(drain=0)

    def __repr__(self) -> str:
        return f"<switchyard.Communicator {self.name!r} rank {self.rank} of {self.size}>"


def _drop(lib: Library, handle: int) -> None:
    if usable():
        lib.drop(handle)


_alive: set[Communicator] = set()


def blocks() -> list[Block]:
    """All symmetric memory that is in use."""
    return [block for comm in list(_alive) for block in list(comm._blocks.values())]


@atexit.register
def _end() -> None:
    """Stop everything before the interpreter takes the memory away that operations work on."""
    if usable():
        for comm in list(_alive):
            comm.abandon(keep=True)


def _version() -> str:
    from . import __version__

    return __version__


def _environ() -> dict[str, str]:
    """What the library may want to know of the environment, which it cannot see itself."""
    known = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SWITCHYARD_", "NCCL_NVLS_", "TORCH_SYMM_", "NVSHMEM_")
    return {name: value for name, value in os.environ.items() if name.startswith(known)}


def _place() -> str:
    """Where this process is: ranks of one place reach each other's memory and sockets."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read().strip()
    except OSError:
        boot = os.uname().nodename
    try:
        net = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        net = 0
    return f"{boot}/{net}/{os.getuid()}"


def _collect(size: int, get: Callable[[int], bytes | None], seconds: float) -> list[dict[str, Any]]:
    """Everybody's card."""
    cards: list[dict[str, Any] | None] = [None] * size
    deadline, pause = time.monotonic() + seconds, 0.0005
    while True:
        for rank, card in enumerate(cards):
            if card is None and (text := get(rank)) is not None:
                cards[rank] = json.loads(text)
        missing = [rank for rank, card in enumerate(cards) if card is None]
        if not missing:
            return [card for card in cards if card is not None]
        if time.monotonic() > deadline:
            raise errors.TimedOut(f"switchyard: ranks {missing} have not come within {seconds:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


_default: Communicator | None = None
_default_lock = threading.Lock()


def default(create: bool = True) -> Communicator:
    """The communicator of calls without a group: what init made, or the one that torchrun's variables describe."""
    global _default
    if _default is None or _default._closed:
        with _default_lock:
            if _default is None or _default._closed:
                if not create or "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
                    raise errors.Error(
                        "switchyard: no group: call switchyard.init(), start the ranks with torchrun, or initialise "
                        "torch.distributed"
                    )
                _default = Communicator.open({"Env": True})
    return _default


def set_default(comm: Communicator | None) -> None:
    global _default
    _default = comm
