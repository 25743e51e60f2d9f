"""Errors. Every error of the library is an :class:`Error`, which is a ``RuntimeError`` as torch's are."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "Aborted",
    "BuildError",
    "Choice",
    "Closed",
    "Diverged",
    "Error",
    "Forked",
    "Freed",
    "InvalidArgument",
    "InvalidType",
    "Masked",
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


class Choice(NamedTuple):
    """A choice of a token that is no expert: the token's rank, the token and which of its choices, and what it says."""

    rank: int
    token: int
    number: int
    expert: int


class Error(RuntimeError):
    """An error of Switchyard. ``rank`` is the rank it is about, ``None`` for none in particular; ``choice`` is a
    :class:`Choice` that is no expert, if the error is about one. ``earlier`` says that it is of an earlier call, for which
    nobody had waited, that this call was not made, and that it can be made now."""

    rank: int | None = None
    choice: Choice | None = None
    earlier: bool = False


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


class Masked(Error):
    """The other ranks go on without this one, ``rank``, in the calls of a dispatcher: ``unmask`` of that brings it back."""


class Overflow(Error):
    """More rows came than a dispatcher has room for. Every rank gets this error and nothing has moved."""


class NoHandle(Error):
    """As many dispatches are alive as the dispatcher has outputs."""


class Forked(Error):
    """The process was forked after Switchyard had been used: its threads do not exist here."""
