"""Operations that run behind their caller's back: what they are to the library, and to its users."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_int64
from typing import Any, Protocol

from .. import errors
from .native import AGAIN, SLICE


class Completion(Protocol):
    """How an operation becomes complete."""

    @property
    def error(self) -> BaseException | None:
        """Its error, known once poll has said that it has run."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the operation and raise its error. False means that timeout seconds have passed without it."""

    def poll(self) -> bool:
        """Whether the operation has run, well or not."""


def in_slices(ask: Callable[[int], bool], timeout: float | None) -> bool:
    """Ask for slices of time, in microseconds, until ask says that it is over. False: timeout seconds have passed."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        us = SLICE
        if deadline is not None:
            us = min(SLICE, int((deadline - time.monotonic()) * 1e6))
            if us <= 0:
                return ask(0)
        if ask(us):
            return True


class Ticket:
    """An operation in the queue of a communicator: what to wait for and what it keeps alive."""

    __slots__ = ("comm", "done", "error", "keep", "number")

    def __init__(self, comm: Any, number: int, keep: object, error: errors.Error | None = None) -> None:
        self.comm, self.number, self.keep = comm, number, keep
        self.error: BaseException | None = error
        self.done = error is not None

    def poll(self) -> bool:
        """Whether the operation has run."""
        if not self.done and self.comm._ran.value >= self.number:
            self._ask(0)
        return self.done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the operation and raise its error. False means that timeout seconds have passed without it."""
        if not self.done and not in_slices(self._ask, timeout):
            return False
        if self.error is not None:
            raise self.error
        return True

    def _ask(self, us: int) -> bool:
        code = self.comm._lib.wait(self.comm._handle, self.number, us, byref(c_int64()))
        if code != AGAIN and not self.done:
            if code:
                self.error = self.comm._lib.error(code)
            self.done, self.keep = True, None
        return self.done


class Deferred:
    """An operation that cannot be submitted yet. The one that can calls :meth:`become`."""

    def __init__(self) -> None:
        self._known = threading.Event()
        self._inner: Completion | None = None
        self._failed: BaseException | None = None

    def become(self, inner: Completion | None, failed: BaseException | None = None) -> None:
        """It was submitted and is this operation now, or has run, or has failed."""
        self._inner, self._failed = inner, failed
        self._known.set()

    @property
    def error(self) -> BaseException | None:
        return self._failed if self._inner is None else self._inner.error

    @property
    def sources(self) -> Sequence[int]:
        return getattr(self._inner, "sources", ())

    def poll(self) -> bool:
        return self._known.is_set() and (self._inner is None or self._inner.poll())

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._known.wait(timeout):
            return False
        if self._failed is not None:
            raise self._failed
        return self._inner is None or self._inner.wait(None if deadline is None else max(deadline - time.monotonic(), 0))


class Several:
    """Operations as one."""

    def __init__(self, parts: Sequence[Completion]) -> None:
        self._parts = parts

    @property
    def error(self) -> BaseException | None:
        return next((part.error for part in self._parts if part.error is not None), None)

    def poll(self) -> bool:
        return all(part.poll() for part in self._parts)

    def wait(self, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        return all(part.wait(None if deadline is None else max(deadline - time.monotonic(), 0)) for part in self._parts)


class Work:
    """An operation that runs behind the caller's back; the counterpart of ``torch.distributed.Work``, and one where torch is
    used.

    It may be waited for from several threads, any number of times. On a GPU :meth:`wait` makes the current stream wait, and
    the host goes on.
    """

    def __init__(self, done: Completion, outputs: Sequence[Any] = (), back: Callable[[], None] | None = None) -> None:
        """back brings the results to where they belong, at the first wait."""
        super().__init__()
        self._done, self._outputs = done, list(outputs)
        self._back, self._once = back, threading.Lock()

    def wait(self, timeout: Any = None) -> bool:
        """Block until the operation is complete and raise its error. timeout is in seconds or a ``timedelta``; none of it is
        forever. Operations on a GPU make the current stream wait instead, and the host too where there is a timeout."""
        seconds = timeout.total_seconds() if hasattr(timeout, "total_seconds") else timeout
        if seconds is not None and seconds <= 0:
            seconds = None
        if not self._done.wait(seconds):
            raise errors.TimedOut(f"switchyard: Operation timed out: not complete after {seconds} s; it goes on")
        if self._back is not None:
            with self._once:
                if self._back is not None:
                    self._back()
                    self._back = None
        return True

    def synchronize(self) -> None:
        """What :meth:`wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation has run, well or not."""
        return self._done.poll()

    def is_success(self) -> bool:
        """Whether the operation has run well."""
        return self._done.poll() and self._done.error is None

    def exception(self) -> BaseException | None:
        """The operation's error once it has run."""
        return self._done.error if self._done.poll() else None

    def result(self) -> list[Any]:
        """The outputs."""
        return self._outputs

    def source_rank(self) -> int:
        """The rank of the group that a message was received from. Collectives have none."""
        source = next(iter(getattr(self._done, "sources", ())), -1)
        if source < 0:
            raise errors.Unsupported("switchyard: sourceRank() may only be called on work objects of complete receives")
        return source

    _source_rank = source_rank
