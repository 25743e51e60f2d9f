"""The state of ranks, as the library tells it."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int64

from .native import library

#: Whose ranks, and how: numbers of the ABI.
OWN, ALL, TABLE, CALLS = 0, 1, 2, 3


def observe(what: int) -> str:
    """The library's answer. It may grow while it is asked for."""
    lib, room, needed = library(), 1 << 16, c_int64()
    while True:
        text = ctypes.create_string_buffer(room)
        lib.check(lib.observe(what, text, room, byref(needed)))
        if needed.value <= room:
            return text.value.decode()
        room = 2 * needed.value
