"""The communicators of torch's process groups, and how they come to be."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Union

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from .. import errors
from .._core import comm as core
from .._core.arguments import type_of
from .._core.comm import Communicator
from .._core.meet import Meeting
from .._core.splits import Shapes
from .._core.work import Completion
from .work import Theirs, Work


def warn_alone(text: str, stacklevel: int) -> None:
    """Warn on one rank of several. Where warnings are errors it would part from the others here, so there it says nothing."""
    with contextlib.suppress(UserWarning):
        warnings.warn(text, stacklevel=stacklevel + 1)


class _Store:
    """A store of torch's, as ranks meet in it."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes | None:
        try:
            return bytes(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError:
            if not self._store.check([key]):  # forgotten in between
                return None
            raise

    def forget(self, key: str) -> None:
        try:
            self._store.delete_key(key)
        except (RuntimeError, NotImplementedError):  # some stores keep everything; it is out of date there, and no more
            pass


# Operations on host tensors, as they are submitted: the method of Communicator, its arguments without the last one, and what
# brings the results to where they belong.
Submission = tuple[Callable[..., Any], tuple[Any, ...], Union[Callable[[], None], None]]


class Group:
    """The state of a process group: its communicator once its ranks have met."""

    def __init__(self, pg: Any, store: Any, rank: int, size: int, timeout: timedelta | None, name: str) -> None:
        self.rank, self.size, self.name = rank, size, name or "torch"
        #: None before the ranks have met, and where they are not on one host.
        self.comm: Communicator | None = None
        #: Where they are not: a group of gloo's own, so that it is nobody else's business when who finds that out.
        self.elsewhere: Any = None
        self.shapes = Shapes(rank, size)
        self._store, self._timeout = store, timeout
        self._lock = threading.Lock()
        self._meeting: Meeting[None] | None = None
        self._met = self._over = False
        self._options: dict[str, Any] = {}

    def configure(self, options: dict[str, Any]) -> None:
        """Options of the communicator, before the ranks meet."""
        with self._lock:
            if self._met or self._meeting is not None:
                raise errors.InvalidArgument(
                    f"switchyard: group {self.name!r} is in use: its options were those of the first call"
                )
            self._options.update(options)

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

    def submit(self, call: Submission, torchs: Callable[[Any], Any], outputs: list[Tensor]) -> Any:
        """Submit an operation without waiting for anybody, not even for the ranks to meet. torchs does it in a process
        group."""
        function, arguments, back = call
        meeting = self._begin()

        def now(_: None = None) -> Completion:
            if self.comm is None:
                return Theirs(torchs(self.elsewhere))
            return function(self.comm, *arguments, True)  # type: ignore[no-any-return]

        done = None if meeting is None else meeting.defer(now)
        if done is None:
            if meeting is not None:
                meeting.wait()  # it is over: with an error, that is ours too
            if self.comm is None:
                return torchs(self.elsewhere)
            done = now()  # type: ignore[assignment]
        return Work(done, outputs, back)  # type: ignore[arg-type]

    def end(self) -> None:
        """End the communicator, without the other ranks."""
        with self._lock:
            self._over = True
            meeting, comm = self._meeting, self.comm
        if meeting is not None:
            meeting.end()
        if comm is not None:
            comm._abandon()

    def _begin(self) -> Meeting[None] | None:
        if self._met:
            return None
        with self._lock:
            if self._met:
                return None
            if self._meeting is None:
                self._meeting = Meeting(self._meet, self._done)
            return self._meeting

    def _meet(self, stop: threading.Event) -> None:
        options = dict(self._options)
        if self._timeout is not None:
            seconds = self._timeout.total_seconds()
            options = {"TimeoutSeconds": seconds, "JoinSeconds": min(seconds, 600.0), **options}
        comm = Communicator._meet(self.rank, self.size, _Store(self._store), options, self.name, stop)
        if comm is None:
            if self.rank == 0:
                warn_alone(f"switchyard: the ranks of group {self.name!r} are not on one host: its calls go to torch", 3)
            store = dist.PrefixStore("switchyard/gloo/", self._store)
            limit = self._timeout or c10d.default_pg_timeout
            self.elsewhere = dist.ProcessGroup(store, self.rank, self.size)
            gloo = dist.ProcessGroupGloo(store, self.rank, self.size, timeout=limit)
            self.elsewhere._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            self.elsewhere._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        with self._lock:
            self.comm = comm
            over = self._over
        if over and comm is not None:
            comm._abandon()

    def _done(self, meeting: Meeting[None]) -> None:
        with self._lock:
            self._met = meeting.error is None
            self._meeting = None


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


def _timeout(pg: Any) -> timedelta | None:
    """How long the group's operations may take."""
    for device in ("cpu", "cuda"):
        try:
            return pg._get_backend(torch.device(device)).options._timeout  # type: ignore[no-any-return]
        except (RuntimeError, AttributeError):
            continue
    return c10d.default_pg_timeout


def process_group(group: Any) -> Any:
    """torch's process group of a group, None where it is one of ours."""
    if group is None:
        return c10d.GroupMember.WORLD if dist.is_available() else None
    return None if isinstance(group, Communicator) else group


def configure(group: Any, options: dict[str, Any]) -> None:
    """Options of the communicator of a process group, before its ranks meet."""
    pg = process_group(group)
    if pg is None:
        raise errors.InvalidArgument("switchyard: validate is an option of switchyard.init for groups that it makes")
    group_of(pg).configure(options)


def find(group: Any) -> tuple[Communicator | None, Group | None]:
    """The communicator of a group where there is one by now, and what is known of its process group where it has one."""
    if isinstance(group, Communicator):
        return group, None
    pg = process_group(group)
    if pg is None:
        return core.default(), None
    known = group_of(pg)
    return known.comm if known._met else None, known


def communicator(group: Any) -> Communicator | None:
    """The communicator of a group, None where its ranks are not on one host. The first call for a process group is
    collective: its ranks meet through its own store."""
    comm, known = find(group)
    return comm if known is None or comm is not None else known.wait()
