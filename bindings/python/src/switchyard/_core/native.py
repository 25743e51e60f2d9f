"""The shared library: loading it, its functions, its errors. Nothing is loaded before the first call that needs it."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from ctypes import c_char_p, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

from .. import errors
from . import abi, failures

AGAIN = 1

# How long one call into the library may wait, in microseconds. Signals end a wait early when they reach the waiting
# thread, so this only bounds the delay of one that did not.
SLICE = 100_000

# A call that only enqueues keeps the interpreter's lock, as torch's operators do: to let it go and wait for another thread to
# give it back can take milliseconds. These functions have a second name for that.
_QUICK = {
    f"enqueue_{name}": name
    for name in (
        "all_to_all", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all_by_plan", "transfer",
        "messages", "dispatch", "combine", "combine_backward", "receive", "results", "route", "deliver", "expand",
        "fold",
    )
}  # fmt: skip
_QUICK["quick_release"] = "release"


class Library:
    """The functions of the shared library as attributes. They return a code; :meth:`check` turns one into an error."""

    all_to_all: Callable[..., int]
    all_reduce: Callable[..., int]
    reduce_scatter: Callable[..., int]
    all_gather: Callable[..., int]
    messages: Callable[..., int]
    barrier: Callable[..., int]
    wait: Callable[..., int]

    def __init__(self, path: str) -> None:
        try:
            lib = ctypes.CDLL(path)
        except OSError as err:
            raise errors.BuildError(f"switchyard: cannot load {path}: {err}") from err
        lib.switchyard_abi_version.restype = c_int32
        version = lib.switchyard_abi_version()
        if version != abi.VERSION:
            raise errors.BuildError(f"switchyard: {path} has ABI version {version}, this package needs {abi.VERSION}")
        lib.switchyard_last_error.restype = c_char_p
        lib.switchyard_last_error_rank.restype = c_int32
        lib.switchyard_last_error_detail.restype = None
        lib.switchyard_live.restype = c_int64
        self._error, self._error_rank, self._error_detail, self.live = (
            lib.switchyard_last_error,
            lib.switchyard_last_error_rank,
            lib.switchyard_last_error_detail,
            lib.switchyard_live,
        )
        self.bound: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Whether this process was forked since.
        self.forked = False
        quick = ctypes.PyDLL(path)
        # These wait for nothing, and look after forks themselves.
        self.describe, self.hold, self.unhold = quick.switchyard_describe, quick.switchyard_hold, quick.switchyard_unhold
        self.describe.argtypes, self.describe.restype = [c_void_p, c_void_p], c_void_p
        self.hold.argtypes, self.hold.restype = [c_uint64], c_void_p
        self.unhold.argtypes, self.unhold.restype = [c_void_p], None
        self.operators = quick.switchyard_operators
        self.operators.argtypes, self.operators.restype = [], c_char_p
        for name, of in [*((name, name) for name in abi.PROTOTYPES), *_QUICK.items()]:
            function = getattr(lib if name == of else quick, "switchyard_" + of)
            function.argtypes, function.restype = abi.PROTOTYPES[of], c_int32
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AttributeError(name)

    def error(self, code: int) -> errors.Error:
        """The error of the call that returned code last, on this thread."""
        detail = abi.Detail()
        self._error_detail(ctypes.byref(detail))
        error = failures.of(code, self._error().decode(errors="replace"), self._error_rank())
        error.earlier = detail.Earlier != 0
        if detail.Rank >= 0:
            error.choice = errors.Choice(detail.Rank, detail.Token, detail.Choice, detail.Expert)
        return error

    def check(self, code: int) -> None:
        if code:
            raise self.error(code)

    def forbid(self) -> None:
        """Make every function raise: in a forked child the library's threads do not exist, and calls would hang."""
        self.forked = True
        for name in (*abi.PROTOTYPES, *_QUICK):
            setattr(self, name, _after_fork)
        for holder in list(self.bound):
            holder._bind()

    def bind(self, holder: Any) -> None:
        """Have an object's method _bind take the functions that it keeps, now and when they change."""
        self.bound.add(holder)
        holder._bind()


def _after_fork(*_: object) -> int:
    raise errors.Forked(
        "switchyard: this process was forked after Switchyard had been used, which leaves it without the library's "
        'threads; start processes with the "spawn" or "forkserver" method, or fork before the first call'
    )


_lock = threading.Lock()
_library: Library | None = None
_forked = False


def _in_child() -> None:
    global _forked, _lock
    _lock = threading.Lock()  # another thread may have held it
    if _library is not None:
        _forked = True
        _library.forbid()


def usable() -> bool:
    """Whether the library was loaded, in this process."""
    return _library is not None and not _forked


def path() -> str:
    """Where the shared library is."""
    return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "libswitchyard.so")


def library() -> Library:
    """The shared library, loaded at the first call."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                if not os.path.exists(path()):
                    raise errors.BuildError(
                        f"switchyard: {path()} is missing: install the package (pip install ./bindings/python), which builds it"
                    )
                loaded = Library(path())
                os.register_at_fork(after_in_child=_in_child)
                _library = loaded
    return _library
