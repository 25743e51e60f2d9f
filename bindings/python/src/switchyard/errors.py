"""What can go wrong. Every error of the library is an :class:`Error`, which is a ``RuntimeError`` as torch's are."""

from __future__ import annotations

__all__ = [
    "Aborted",
    "BuildError",
    "Closed",
    "Diverged",
    "Error",
    "Forked",
    "Freed",
    "InvalidArgument",
    "Mismatch",
    "NoHandle",
    "OutOfMemory",
    "Overflow",
    "PeerLost",
    "TimedOut",
    "Unsupported",
]


class Error(RuntimeError):
    """An error of Switchyard. ``rank`` is the rank it is about, ``None`` for none in particular."""

    rank: int | None = None


class BuildError(Error, ImportError):
    """The shared library is missing, or is not the one that this package was made with."""


class InvalidArgument(Error, ValueError):
    """An argument is wrong. Nothing has been sent. torch raises ``RuntimeError`` or ``ValueError``; this is both."""


class InvalidType(Error, TypeError):
    """An argument, or its data type, is of the wrong kind. Nothing has been sent."""


class Unsupported(Error, NotImplementedError):
    """The data type, the operator or the device cannot do that."""


class Closed(Error):
    """The communicator or the dispatcher was closed."""


class PeerLost(Error):
    """A rank of the group is gone; ``rank`` says which."""


class TimedOut(Error, TimeoutError):
    """A rank did not come in time; ``rank`` says which."""


class Aborted(Error):
    """A rank gave the group up; ``rank`` says which."""


class Mismatch(Error):
    """The ranks made different calls, or were configured differently."""


class OutOfMemory(Error, MemoryError):
    """The symmetric heap has no room."""


class Diverged(Error):
    """The ranks allocated differently. The message names the first call that differs."""


class Freed(Error):
    """Symmetric memory, or the output of a dispatch, was used after it had been given back."""


class Overflow(Error):
    """More rows came than a dispatcher has room for. Every rank gets this error and nothing has moved."""


class NoHandle(Error):
    """As many dispatches are alive as the dispatcher has outputs."""


class Forked(Error):
    """The process was forked after Switchyard had been used: its threads do not exist here."""


_OF_CODE: dict[int, type[Error]] = {
    2: InvalidArgument,
    3: Unsupported,
    4: Closed,
    5: PeerLost,
    6: TimedOut,
    7: Aborted,
    8: Mismatch,
    9: OutOfMemory,
    10: Diverged,
    11: Freed,
    12: Overflow,
    13: NoHandle,
}


def of(code: int, text: str, rank: int = -1) -> Error:
    """The exception for an error code of the shared library."""
    error = _OF_CODE.get(code, Error)(text)
    error.rank = rank if rank >= 0 else None
    return error
