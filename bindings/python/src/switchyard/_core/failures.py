"""Errors of the shared library as exceptions: its codes, and its text in Python's words."""

from __future__ import annotations

import re

from .. import errors
from . import options

_OF_CODE: dict[int, type[errors.Error]] = {
    2: errors.InvalidArgument,
    3: errors.Unsupported,
    4: errors.Closed,
    5: errors.PeerLost,
    6: errors.TimedOut,
    7: errors.Aborted,
    8: errors.Mismatch,
    9: errors.OutOfMemory,
    10: errors.Diverged,
    11: errors.Freed,
    12: errors.Overflow,
    13: errors.NoHandle,
    16: errors.OutOfStep,
    17: errors.Masked,
}


def code_of(error: errors.Error) -> int:
    """The library's name of errors of this kind."""
    return 3 if isinstance(error, errors.Unsupported) else 2


# The library says where an error comes from, and names its options and arguments, in the words of its own language.
_FLOORS = re.compile(r"(?<!\w )\b(?:agree|alltoallv|allreduce|comm|core|dispatch|kernels|memory|shm|switchyard): ")
_NAMES = {
    **{f"Options.{option.go}": option.name for option in options.TABLE},
    "Options.NoSMs": "no_sms",
    "Options.CopySMs": "copy_sms",
    "Limits.NoSMs": "no_sms",
    "Limits.MaxSMs": "max_sms",
    "Limits.CopySMs": "copy_sms",
    "CopySMs": "copy_sms",
    "NoSMs": "no_sms",
    "Options.Validate": "validate",
    "Options.Plans": "plans",
    "Options.SegmentBytes": "heap",
    "Options.Timeout": "timeout",
    "Splits.PeerDispls": "peer_displs",
    "CombineOptions.Weighting": "weighted",
    "CombineOptions.Release": "release",
    "SumWeights": "sum_weights",
    "Release one": "let go of one",
    "MaxRows": "max_rows",
    "AgreeMaxTokens": "agree_max_tokens",
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


def of(code: int, text: str, rank: int = -1) -> errors.Error:
    """The exception for an error code of the shared library."""
    text = _NAME.sub(lambda found: _NAMES[found[0]], _FLOORS.sub("", text))
    for found, name in _CALLS:
        text = found.sub(name, text)
    kind = _OF_CODE.get(code, errors.Error)
    if kind is errors.TimedOut and not _TORCHS_TIMEOUTS.search(text):  # which is what those look for who know torch's errors
        text = text.replace("timed out", "Timed out", 1) if "timed out" in text else f"Timed out: {text}"
    error = kind(f"switchyard: {text}")
    error.rank = rank if rank >= 0 else None
    return error
