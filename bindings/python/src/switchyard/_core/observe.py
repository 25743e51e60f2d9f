"""The state of ranks, as the library tells it."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from ctypes import byref, c_int64

from .native import library

#: Whose ranks, and how: numbers of the ABI.
OWN, ALL, TABLE, CALLS, WHY, WHY_TABLE, TRACE, RECENT, RECENT_TABLE = range(9)


def observe(what: int, job: str = "") -> str:
    """The state of ranks as text, JSON or a table: of the job whose identity or program begins so, of all where it is empty."""
    return _answer(lambda *to: library().observe(what, job.encode(), *to))


def records(prefix: str, job: str) -> list[str]:
    """Write the last calls of each rank of the job whose identity or program begins so in the form of torch's flight recorder,
    which its analyzer reads: files that the prefix and the rank's number name."""
    return json.loads(_answer(lambda *to: library().records(os.fsencode(prefix), job.encode(), *to)))


def doctor(command: list[str]) -> list[dict[str, str]]:
    """Findings about this machine. The command, with "host" or "cuda" behind it, makes a trial."""
    opts = json.dumps({"Command": command}).encode()
    return json.loads(_answer(lambda *to: library().doctor(opts, *to)))


def trial(where: str) -> str:
    """Be one of the ranks that a doctor has exchange bytes."""
    opts = json.dumps({"Trial": where}).encode()
    return _answer(lambda *to: library().doctor(opts, *to))


def _answer(ask: Callable[..., int]) -> str:
    """The library's answer. It may grow while it is asked for."""
    lib, room, needed = library(), 1 << 16, c_int64()
    while True:
        text = ctypes.create_string_buffer(room)
        lib.check(ask(text, room, byref(needed)))
        if needed.value <= room:
            return text.value.decode()
        room = 2 * needed.value
