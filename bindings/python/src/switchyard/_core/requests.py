"""Operations between two ranks that go on behind their caller's back."""

from __future__ import annotations

import threading
from array import array
from collections import deque

from .arguments import Bound
from .native import AGAIN, Library, usable
from .work import in_slices


class Request(Bound):
    """Messages, or a wait for a signal: a :class:`Completion`. ``sources`` are the ranks that messages were received from."""

    def __init__(self, lib: Library, handle: int, sources: array[int], keep: object) -> None:
        """A handle of 0 is a request that is over."""
        self.error: BaseException | None = None
        self.sources, self._lib, self._handle, self._keep, self._over = sources, lib, handle, keep, handle == 0

    def __del__(self) -> None:
        if self._handle and usable():
            self._lib.drop(self._handle)

    def poll(self) -> bool:
        if not self._over:
            self._ask(0)
        return self._over

    def wait(self, timeout: float | None = None) -> bool:
        if not self._over and not in_slices(self._ask, timeout):
            return False
        if self.error is not None:
            raise self.error
        return True

    def _ask(self, us: int) -> bool:
        code = self._lib.request(self._handle, us, self.sources.buffer_info()[0] if self.sources else None)
        if code != AGAIN and not self._over:
            if code:
                self.error = self._lib.error(code)
            self._over, self._keep = True, None
        return self._over


class Requests:
    """The requests of a communicator that may be under way: their memory stays until they are over, whatever becomes of
    their Work."""

    def __init__(self) -> None:
        self._held: deque[Request] = deque()
        self._lock = threading.Lock()

    def add(self, request: Request) -> None:
        """Hold one more, and let go of those that are over: of two for each that comes, so that few stay."""
        with self._lock:
            for _ in range(min(2, len(self._held))):
                first = self._held.popleft()
                if not first.poll():
                    self._held.append(first)
            self._held.append(request)

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
