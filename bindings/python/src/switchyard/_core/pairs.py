"""Messages and transfers between two ranks, of memory that is known by its address."""

from __future__ import annotations

from array import array
from typing import Any, Protocol

from .. import errors
from .abi import ANY, GET, PUT, SIGNAL, WAIT, Memory, message_call, transfer_call
from .arguments import integer
from .comm import Communicator


class Ranks(Protocol):
    """A group that may not have met."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


KINDS = {"put": PUT, "get": GET, "signal": SIGNAL, "wait": WAIT}
#: How many semaphores each rank has for each other.
SEMAPHORES = 8


def message(comm: Ranks, receive: bool, peer: Any, tag: Any, at: Memory) -> array[int]:
    """A MessageCall of a group with a rank and a size. The peer is one of its ranks, or None for a receive from any."""
    rank = ANY if receive and peer is None else rank_of(comm.rank, comm.size, receive, peer)
    return message_call(receive, rank, integer("tag", tag, 0), at)


def rank_of(rank: int, size: int, receive: bool, peer: Any) -> int:
    """The peer of a message."""
    name = "src" if receive else "dst"
    number = integer(name, peer)
    if not 0 <= number < size or number == rank:
        raise errors.InvalidArgument(f"switchyard: {name} is {number}, want another of the {size} ranks than {rank}")
    return number


def transfer(comm: Communicator, kind: str, peer: Any, mine: Memory, at: Memory) -> array[int]:
    """A TransferCall of a put or a get."""
    if mine[1] != at[1]:
        raise errors.InvalidArgument(f"switchyard: {kind}: tensor has {mine[1]} bytes, at {at[1]}")
    return transfer_call(KINDS[kind], rank_of(comm.rank, comm.size, kind == "get", peer), mine, at)


def same_elements(kind: str, mine: str, at: str) -> None:
    """Refuse a put or a get whose two sides have elements of different types. Bytes are like any, and so are unknown ones."""
    if mine != at and "uint8" not in (mine, at) and mine and at:
        raise errors.InvalidType(f"switchyard: {kind}: tensor is {mine}, at {at}")


def semaphore_call(comm: Communicator, kind: str, peer: Any, semaphore: Any) -> array[int]:
    """A TransferCall of a signal or a wait."""
    number = integer("semaphore", semaphore, 0)
    if number >= SEMAPHORES:
        raise errors.InvalidArgument(f"switchyard: semaphore is {number}, want 0 to {SEMAPHORES - 1}")
    return transfer_call(KINDS[kind], rank_of(comm.rank, comm.size, kind == "wait", peer), semaphore=number)


def flag(comm: Communicator, kind: str, peer: Any, semaphore: Any) -> None:
    """Signal, or wait, on the host."""
    comm._transfer(semaphore_call(comm, kind, peer, semaphore))
