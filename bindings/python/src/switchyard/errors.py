"""Errors. Every error of the library is an :class:`Error`, which is a ``RuntimeError`` as torch's are."""

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
    "InvalidType",
    "Mismatch",
    "NoHandle",
    "OutOfMemory",
    "OutOfStep",
    "Overflow",
    "PeerLost",
    "TimedOut",
    "Unsupported",
]


def __dir__() -> list[str]:
    return __all__


class Error(RuntimeError):
    """An error of Switchyard. ``rank`` is the rank it is about, ``None`` for none in particular."""

    rank: int | None = None


class BuildError(Error, ImportError):
    """The shared library is missing, or is not the one that this package was made with."""


class InvalidArgument(Error, ValueError):
    """An argument is wrong. Nothing has been sent. torch raises ``RuntimeError`` or ``ValueError``; this is both."""


class InvalidType(InvalidArgument, TypeError):
    """An argument, or its data type, is of the wrong kind: a ``TypeError``, and all that :class:`InvalidArgument` is."""


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
    """Calls of the ranks do not fit each other, or the ranks were configured differently. Later calls work."""


class OutOfStep(Error):
    """Ranks wait for each other in calls of different kinds, one in an exchange and one in a reduction for example; ``rank``
    says which rank is elsewhere. Later calls of that kind fail too: the group can only be closed."""


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
