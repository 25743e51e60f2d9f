"""Memory that one rank has offered to another, and memory that the other has opened."""

from __future__ import annotations

import contextlib
import time
from ctypes import byref, c_int64, c_uint64
from typing import TYPE_CHECKING, Any

from .. import errors
from .arguments import Bound, microseconds
from .native import AGAIN, SLICE

if TYPE_CHECKING:
    from .places import Place


class Shared(Bound):
    """A tensor that one other rank may open, see :func:`switchyard.share`. It is kept until :meth:`close` has returned, or its
    group is closed. Leaving a ``with`` block closes it; after an exception that waits for nobody, and the tensor stays shared
    where the other rank has it open."""

    def __init__(self, place: Place, peer: int, memory: tuple[int, int], file: tuple[int, int], tensor: Any) -> None:
        lent = c_uint64()
        lib = place._lib
        lib.check(lib.lend(place._handle, peer, memory[0], memory[1], file[0], file[1], byref(lent)))
        self._lib, self._handle, self._comm = lib, lent.value, place._comm
        #: The memory.
        self.tensor = tensor
        place._comm._shared.add(self)

    def close(self, timeout: float | None = None) -> None:
        """Take the tensor back: wait until the other rank has opened and closed it, or is gone, by default for the timeout of
        the group. A tensor that it has not opened by then is withdrawn: its ``open_shared`` raises
        :class:`switchyard.errors.Freed`. A timeout of a microsecond does that at once. A
        :class:`switchyard.errors.TimedOut` names a rank that has the tensor open. Then this can be called again. It may be
        called twice."""
        if not self._handle:
            return
        limit, began = microseconds("timeout", timeout), time.monotonic()
        code = AGAIN
        while code == AGAIN:
            code = self._lib.take_back(self._handle, limit, int((time.monotonic() - began) * 1e6), SLICE)
        self._lib.check(code)
        self._handle, self.tensor = 0, None
        self._comm._shared.discard(self)

    def __enter__(self) -> Shared:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # the other rank may never come
            with contextlib.suppress(errors.TimedOut):
                self.close(timeout=1e-6)


class Opened(Bound):
    """A tensor of another rank, see :func:`switchyard.open_shared`. Leaving a ``with`` block closes it."""

    def __init__(self, place: Place, peer: int, timeout: float | None) -> None:
        borrowed, address, size = c_uint64(), c_uint64(), c_int64()
        lib, limit, began = place._lib, microseconds("timeout", timeout), time.monotonic()
        code = AGAIN
        while code == AGAIN:
            waited = int((time.monotonic() - began) * 1e6)
            code = lib.borrow(place._handle, peer, limit, waited, SLICE, byref(borrowed), byref(address), byref(size))
        lib.check(code)
        self._lib, self._handle = lib, borrowed.value
        self.address, self.size = address.value, size.value
        #: The memory as bytes.
        self.tensor: Any = None

    def close(self) -> None:
        """Give the memory back to its rank. Memory of a GPU goes back once the GPU has run what it has been given. It may be
        called twice."""
        handle, self._handle, self.tensor = self._handle, 0, None
        if handle:
            self._lib.check(self._lib.give_back(handle))

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
