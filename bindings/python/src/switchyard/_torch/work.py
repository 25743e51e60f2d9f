"""Work on torch tensors. Imported only where torch is."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist

from .._core.work import Work as PlainWork
from .profile import named

_base: Any = dist.Work if dist.is_available() else object


class Work(PlainWork, _base):
    """Work that is a ``torch.distributed.Work`` too."""

    _future: Any = None

    @named("wait")
    def wait(self, timeout: Any = None) -> bool:
        return super().wait(timeout)

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of the outputs. Waiting for that of work on a GPU makes the current stream wait."""
        with self._once:
            if self._future is None:
                if hasattr(self._done, "future"):
                    self._future = self._done.future(self._outputs)
                else:
                    self._future = torch.futures.Future()
                    _completer_of(self._done).add(self)
        return self._future


class Theirs:
    """An operation of torch's own, as ours are."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.error: BaseException | None = None

    def poll(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, timeout: float | None = None) -> bool:
        try:
            self._work.wait()
        except BaseException as err:
            self.error = err
            raise
        return True


class _Completer:
    """Completes the futures of one communicator's work in order, on a thread of its own."""

    def __init__(self) -> None:
        self._work: list[Work] = []
        self._more = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, work: Work) -> None:
        with self._more:
            self._work.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="switchyard-futures", daemon=True)
                self._thread.start()
            self._more.notify()

    def _run(self) -> None:
        while True:
            with self._more:
                if not self._work and not self._more.wait_for(lambda: self._work, timeout=10):
                    self._thread = None
                    return
                work = self._work.pop(0)
            try:
                work.wait()
            except Exception as err:
                work._future.set_exception(err)
            else:
                work._future.set_result(work._outputs)


_completers: weakref.WeakKeyDictionary[Any, _Completer] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _completer_of(done: Any) -> _Completer:
    comm = getattr(done, "comm", None)
    if comm is None:  # of several operations, or of one that waits for its group to meet
        return _Completer()
    with _making:
        found = _completers.get(comm)
        if found is None:
            found = _completers[comm] = _Completer()
        return found
