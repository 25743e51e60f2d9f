"""The communicators of torch's process groups, and how they come to be."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_uint64
from datetime import timedelta
from typing import Any, Union

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from .. import errors
from .._core import comm as core
from .._core.arguments import seconds, type_of
from .._core.comm import Communicator
from .._core.joining import join
from .._core.meet import Meeting
from .._core.native import library
from .._core.splits import Shapes
from .._core.work import Completion
from . import fallback
from .profile import profiled, span
from .work import Theirs, Work


def warn_alone(text: str, stacklevel: int) -> None:
    """Warn on one rank of several. Where warnings are errors it would part from the others here, so there it says nothing."""
    with contextlib.suppress(UserWarning):
        warnings.warn(text, stacklevel=stacklevel + 1)


# The reasons for which groups of this process have gone to torch.
_told: set[str] = set()
_telling = threading.Lock()


def _new(why: str) -> bool:
    """Whether no group of this process has gone to torch for this reason before."""
    with _telling:
        new = why not in _told
        _told.add(why)
        return new


def check_timeout(call: str, timeout: Any) -> None:
    """Refuse what is no timeout, before anybody keeps it."""
    if not isinstance(timeout, timedelta):
        raise errors.InvalidType(f"switchyard: {call}: timeout is {type_of(timeout)}, want a timedelta")
    seconds(f"{call}: timeout", timeout.total_seconds())


_FORGOTTEN = b"forgotten"


class _Store:
    """A store of torch's, as ranks meet in it."""

    def __init__(self, store: Any) -> None:
        self._store, self.turn = store, threading.Lock()

    def put(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes | None:
        if not self._store.check([key]):
            return None
        value = bytes(self._store.get(key))
        return None if value == _FORGOTTEN else value

    def forget(self, key: str) -> None:
        # A key that is deleted between another rank's check and its get has that rank wait for as long as the store's timeout.
        self._store.set(key, _FORGOTTEN)


def _apart(store: Any) -> Any:
    """The store by a connection of its own. gloo waits in it for other ranks, and holds the connection for as long: ranks that
    make two groups at a time, each another one first, would wait for each other for ever."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError):  # of a class of the caller's
        return store


def _reach(store: Any) -> str | None:
    """A host that ranks of other hosts reach this one by: the one that torch's own store is on."""
    if "MASTER_ADDR" in os.environ:
        return os.environ["MASTER_ADDR"]
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None)


# Operations on host tensors, as they are submitted: the method of Communicator, its arguments without the last one, and what
# brings the results to where they belong.
Submission = tuple[Callable[..., Any], tuple[Any, ...], Union[Callable[[], None], None]]


class Group:
    """The state of a process group: its communicator once its ranks have met."""

    def __init__(self, pg: Any, store: Any, rank: int, size: int, timeout: timedelta | None, name: str) -> None:
        self.rank, self.size, self.name = rank, size, name or "torch"
        #: None before the ranks have met, and where they cannot have symmetric memory.
        self.comm: Communicator | None = None
        #: Where it does not do all calls: a group of gloo's own, so that it is nobody else's business when who finds that out.
        self.elsewhere: Any = None
        self.shapes = Shapes(rank, size)
        self._store, self._cards, self.timeout = store, _Store(store), timeout
        self._lock = threading.Lock()
        self._meeting: Meeting[None] | None = None
        self.met = self._over = False
        self._asked = threading.Event()  # somebody needs the communicator
        self._again = 0  # how often the options have changed after the ranks had begun to meet
        self._options: dict[str, Any] = {}
        self._unmet = 0  # the library's handle of this rank for as long as there is no communicator that counts
        #: Whether the process group is ours, which counts calls that it leaves to torch itself.
        self.counts = False
        #: The options of torch's own backend, the same as long as it lives: to ask it for them takes longer than a call.
        self.options: Any = None

    def fell_back(self, operation: str, reason: str, pg: Any, tensors: Sequence[Tensor]) -> None:
        """Count a call that torch's backend makes. No call fails for that."""
        named = (operation.encode(), fallback.backend(pg, tensors).encode(), reason.encode())
        with contextlib.suppress(errors.Error, ValueError), self._lock:
            lib = library()
            if self.comm is None and not self._unmet and not self._over:
                self._unmet = self._stand_alone()
            lib.check(lib.fell_back(self._unmet if self.comm is None else self.comm._handle, *named))

    def _stand_alone(self) -> int:
        """A rank without a communicator that counts."""
        at = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}/{self.name}"
        local = int(os.environ.get("LOCAL_RANK", self.rank))
        about = {"Rank": self.rank, "Size": self.size, "LocalRank": local, "Name": self.name, "Job": at}
        about["Environ"] = core.environ()
        handle, lib = c_uint64(), library()
        lib.check(lib.unmet(json.dumps(about).encode(), byref(handle)))
        return handle.value

    def _counted(self, handle: int) -> None:
        """Have a communicator count from here on, with what was counted before; 0 is for none. The lock is held."""
        unmet, self._unmet = self._unmet, 0
        if unmet:
            with contextlib.suppress(errors.Error):  # in a forked child
                library().met(unmet, handle)

    def set_timeout(self, timeout: timedelta) -> None:
        """Bound the waits of this rank's calls from here on. Where the ranks have yet to meet, their group begins with it."""
        with self._lock:
            if timeout == self.timeout:
                return
            check_timeout("set_timeout", timeout)
            self.timeout, comm = timeout, self.comm
            if self.elsewhere is not None:
                self.elsewhere._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
        if comm is not None:
            comm._set_timeout(timeout.total_seconds())

    def meet_early(self) -> None:
        """Have the ranks meet now, behind the caller's back: a message between two of them asks nothing of the others."""
        with self._lock:
            if self._meeting is None and not self.met:
                self._meeting = self._meets()

    def _meets(self) -> Meeting[None]:
        again, asked = self._again, self._asked
        return Meeting(lambda stop: self._meet(stop, again, asked), self._done)

    def configure(self, options: dict[str, Any]) -> None:
        """Options of the communicator, before the ranks meet."""
        with self._lock:
            begun = self.met or self._meeting is not None
            if begun and self._asked.is_set():
                raise errors.InvalidArgument(
                    f"switchyard: group {self.name!r} is in use: its options were those of the first call"
                )
            self._options.update(options)
            if not begun:
                return
            meeting, comm = self._meeting, self.comm
            self.comm = self._meeting = self.elsewhere = None
            self.met, self._asked = False, threading.Event()
            self._again += 1
        if meeting is not None:
            meeting.end()
        if comm is not None:
            comm._abandon()

    def wait(self) -> Communicator | None:
        """The communicator, once the ranks have met. The first call is collective."""
        meeting = self._begin()
        if meeting is not None:
            meeting.wait()
        return self.comm

    def prepare(self, make: Callable[..., Submission], *arguments: Any) -> Submission:
        """The result of make for a call's arguments. Ranks that compare their calls hear of a refusal."""
        try:
            return make(*arguments)
        except errors.Error as err:
            error = err
            if self._options.get("Validate"):
                meeting = self._begin()

                def refuse(_: None = None) -> None:
                    if self.comm is not None:
                        self.comm._refuse(error)

                if meeting is None or meeting.defer(refuse) is None:
                    refuse()
            raise

    def submit(
        self,
        operation: str,
        call: Submission,
        torchs: Callable[[Any], Any],
        outputs: list[Tensor],
    ) -> Any:
        """Submit an operation without waiting for anybody, not even for the ranks to meet. torchs does it in a process
        group, and operation is its name there."""
        if profiled():
            with span(operation):
                return self._submit(operation, call, torchs, outputs)
        return self._submit(operation, call, torchs, outputs)

    def _submit(self, operation: str, call: Submission, torchs: Callable[[Any], Any], outputs: list[Tensor]) -> Any:
        function, arguments, back = call
        meeting = self._begin()

        def theirs() -> Any:
            self.fell_back(operation, fallback.GROUP, self.elsewhere, outputs)
            return torchs(self.elsewhere)

        def now(_: None = None) -> Completion:
            nonlocal back
            if self.comm is None:
                back = None  # which would bring what the library has not written
                return Theirs(theirs())
            return function(self.comm, *arguments, True)  # type: ignore[no-any-return]

        done = None if meeting is None else meeting.defer(now)
        if done is None:
            if meeting is not None:
                meeting.wait()  # it is over: with an error, that is ours too
            if self.comm is None:
                return theirs()
            done = now()  # type: ignore[assignment]
        bring = None if back is None else lambda: back() if back is not None else None
        return Work(done, outputs, bring)  # type: ignore[arg-type]

    def end(self) -> None:
        """End the communicator, without the other ranks."""
        with self._lock:
            self._over = True
            meeting, comm = self._meeting, self.comm
            self._counted(0)
        if meeting is not None:
            meeting.end()
        if comm is not None:
            comm._abandon()

    def _begin(self) -> Meeting[None] | None:
        self._asked.set()
        if self.met:
            return None
        with self._lock:
            if self.met:
                return None
            if self._meeting is None:
                self._meeting = self._meets()
            return self._meeting

    def _meet(self, stop: threading.Event, again: int, asked: threading.Event) -> None:
        options, timeout = dict(self._options), self.timeout
        if timeout is not None:
            limit = timeout.total_seconds()
            options = {"TimeoutSeconds": limit, "JoinSeconds": min(limit, 600.0), **options}

        def terms() -> dict[str, Any]:
            return {"again": again, "waits": asked.is_set()}

        comm, elsewhere, why = None, None, "do not reach each other"  # type: Any, Any, str
        try:
            comm = join(self.rank, self.size, self._cards, options, self.name, stop, terms, _reach(self._store))
        except errors.Unsupported as err:  # on all ranks
            why = f"are on several hosts, and cannot have symmetric memory ({err})"
        if comm is None:
            if self.rank == 0 and _new(why):
                warn_alone(f"switchyard: the ranks of group {self.name!r} {why}: its calls go to torch", 3)
            store = dist.PrefixStore(f"switchyard/gloo/{again or ''}", _apart(self._store))
            elsewhere = dist.ProcessGroup(store, self.rank, self.size)
            gloo = dist.ProcessGroupGloo(store, self.rank, self.size, timeout=timeout or c10d.default_pg_timeout)
            elsewhere._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            elsewhere._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        with self._lock:
            over = self._over or stop.is_set()
            if not over:
                self.comm, self.elsewhere = comm, elsewhere
                if comm is not None and self.timeout is not None and self.timeout != timeout:
                    comm._set_timeout(self.timeout.total_seconds())
        if over:
            if comm is not None:
                comm._abandon()
            raise errors.Closed("switchyard: the group was closed while its ranks met")

    def _done(self, meeting: Meeting[None]) -> None:
        with self._lock:
            if meeting is self._meeting:
                self.met = meeting.error is None
                self._meeting = None
                if self.comm is not None:
                    self._counted(self.comm._handle)


_groups: dict[int, tuple[weakref.ref[Any], Group]] = {}


def group_of(pg: Any) -> Group:
    """The state of a process group."""
    known = _groups.get(id(pg))
    if known is not None and known[0]() is pg:
        return known[1]
    if not isinstance(pg, dist.ProcessGroup):
        raise errors.InvalidType(
            f"switchyard: group is {type_of(pg)}, want a ProcessGroup or a switchyard.Communicator"
        )
    _, store = c10d._world.pg_map[pg]
    return remember(pg, Group(pg, store, pg.rank(), pg.size(), _timeout(pg), c10d._world.pg_names.get(pg, "")))


_remembering = threading.Lock()


def remember(pg: Any, group: Group) -> Group:
    """Tie a group to a process group, for as long as that lives. Where there is one already, it stays."""
    number = id(pg)

    def gone(_: object) -> None:
        group.end()
        if _groups.get(number, (None, None))[1] is group:
            del _groups[number]

    with _remembering:
        known = _groups.get(number)
        if known is not None and known[0]() is pg:
            return known[1]
        _groups[number] = (weakref.ref(pg, gone), group)
        return group


def forget(pg: Any) -> None:
    """End a process group's communicator before its time."""
    known = _groups.pop(id(pg), None)
    if known is not None:
        known[1].end()


def _timeout(pg: Any, known: Group | None = None) -> timedelta | None:
    """How long the group's operations may take. known keeps the options that say so, for the next time."""
    options = None if known is None else known.options
    if options is not None:
        return options._timeout  # type: ignore[no-any-return]
    for device in ("cpu", "cuda"):
        try:
            options = pg._get_backend(torch.device(device)).options
            timeout: timedelta | None = options._timeout
        except (RuntimeError, AttributeError):
            continue
        if known is not None:
            known.options = options
        return timeout
    return c10d.default_pg_timeout


def process_group(group: Any) -> Any:
    """torch's process group of a group, None where it is one of ours."""
    if group is None:
        return c10d.GroupMember.WORLD if dist.is_available() else None
    return None if isinstance(group, Communicator) else group


def configure(group: Any, options: dict[str, Any]) -> bool:
    """Options of the communicator of a process group, before its ranks meet; False where it is no process group."""
    pg = process_group(group)
    if pg is None:
        return False
    group_of(pg).configure(options)
    return True


def find(group: Any) -> tuple[Communicator | None, Group | None]:
    """The communicator of a group where there is one by now, and what is known of its process group where it has one."""
    if isinstance(group, Communicator):
        return group, None
    pg = process_group(group)
    if pg is None:
        return core.default(), None
    known = group_of(pg)
    if not known.counts:  # torch's own, which tells nobody that its timeout is set
        timeout = _timeout(pg, known) or c10d.default_pg_timeout
        if timeout != known.timeout:
            known.set_timeout(timeout)
    if known.met:
        return known.comm, known
    known._asked.set()
    return None, known


def communicator(group: Any) -> Communicator | None:
    """The communicator of a group, None where its ranks cannot have symmetric memory. The first call for a process group is
    collective: its ranks meet through its own store."""
    comm, known = find(group)
    return comm if known is None or comm is not None else known.wait()
