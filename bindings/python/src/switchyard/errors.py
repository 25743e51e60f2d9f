"""What can go wrong. Every error of the library is an :class:`Error`, which is a ``RuntimeError`` as torch's are."""

from __future__ import annotations

import re

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
    16: OutOfStep,
}


def code_of(error: Error) -> int:
    """What the library calls errors of this kind."""
    return 3 if isinstance(error, Unsupported) else 2


# The library says where an error comes from, and names its options and arguments, in the words of its own language.
_FLOORS = re.compile(r"(?<!\w )\b(?:agree|alltoallv|allreduce|comm|core|dispatch|kernels|memory|shm|switchyard): ")
_NAMES = {
    "Options.NoSMs": "no_sms",
    "Options.MaxSMs": "max_sms",
    "Options.CopySMs": "copy_sms",
    "Limits.NoSMs": "no_sms",
    "Limits.MaxSMs": "max_sms",
    "Limits.CopySMs": "copy_sms",
    "CopySMs": "copy_sms",
    "NoSMs": "no_sms",
    "Options.Validate": "validate",
    "Options.Timeout": "timeout",
    "Splits.PeerDispls": "peer_displs",
    "Options.Experts": "experts",
    "Options.TopK": "top_k",
    "Options.Hidden": "hidden",
    "Options.MaxTokens": "max_tokens",
    "Options.MaxRows": "max_rows",
    "Options.DType": "dtype",
    "Options.Capacity": "capacity",
    "Options.Align": "align",
    "Options.Layout": "layout",
    "Options.Handles": "handles",
    "Options.Placement": "placement",
    "Options.HostCounts": "host_counts",
    "Options.Quantize": "quantize",
    "Options.ScaleFormat": "scale_format",
    "Options.IndexType": "index_dtype",
    "Options.CombineDType": "combine_dtype",
    "Options.Float8Combine": "float8_combine",
    "Options.Landed": "landed",
    "CombineOptions.Weighting": "weighted",
    "CombineOptions.Release": "release",
    "SumWeights": "sum_weights",
    "Release one": "let go of one",
    "MaxRows": "max_rows",
    "MaxSMs": "max_sms",
    "Align": "align",
    "Timeout": "timeout",
    "source and destination overlap": "output and input overlap",
    "source and destination of the all-gather overlap": "output_tensor and input_tensor overlap",
    "source and destination of the reduce-scatter overlap": "output and input overlap",
}
_NAME = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in sorted(_NAMES, key=len, reverse=True)))
_CALLS = ((re.compile(r"(?<![\w./-])alltoallv(?![\w/-]|\.\w)"), "all_to_all"), (re.compile(r"\bepoch (?=\d)"), "call "))
_TORCHS_TIMEOUTS = re.compile("Timed out|closed|timeout")


def of(code: int, text: str, rank: int = -1) -> Error:
    """The exception for an error code of the shared library."""
    text = _NAME.sub(lambda found: _NAMES[found[0]], _FLOORS.sub("", text))
    for found, name in _CALLS:
        text = found.sub(name, text)
    kind = _OF_CODE.get(code, Error)
    if kind is TimedOut and not _TORCHS_TIMEOUTS.search(text):  # which is what those look for who know torch's errors
        text = text.replace("timed out", "Timed out", 1) if "timed out" in text else f"Timed out: {text}"
    error = kind(f"switchyard: {text}")
    error.rank = rank if rank >= 0 else None
    return error
