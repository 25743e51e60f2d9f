"""How the ranks of a group that has a store meet at its first use, without holding anybody up who has other things to do."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from .. import errors
from .._version import __version__
from .work import Completion, Deferred

Found = TypeVar("Found")


class Store(Protocol):
    """Where ranks leave things for each other."""

    #: Held by the one meeting of this rank that has a card there.
    turn: threading.Lock

    def put(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes | None:
        """The value that was left there, None for nothing. It does not wait."""

    def forget(self, key: str) -> None: ...


def place() -> str:
    """Where this process is: ranks of one place reach each other's memory and sockets. The last part is the user, what
    is before that the host."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read().strip()
    except OSError:
        boot = os.uname().nodename
    try:
        net = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        net = 0
    return f"{os.environ.get('SWITCHYARD_HOSTID', '')}/{boot}/{net}/{os.getuid()}"


class Chapter:
    """A part of a store with names of its own."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name, self.turn = store, name, store.turn

    def put(self, key: str, value: bytes) -> None:
        self._store.put(f"{self._name}/{key}", value)

    def get(self, key: str) -> bytes | None:
        return self._store.get(f"{self._name}/{key}")

    def forget(self, key: str) -> None:
        self._store.forget(f"{self._name}/{key}")


def across(rank: int, places: list[str]) -> tuple[int, int] | None:
    """The local rank of a rank of several hosts, and how many ranks its host has. None where there is one host, or where ranks
    of a host do not reach each other."""
    hosts = [where.rsplit("/", 1)[0] for where in places]
    if len(set(hosts)) == 1 or len(set(hosts)) != len(set(places)):
        return None
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


# Errors that peers left in the store and that this process has raised: once is enough.
_heard: set[str] = set()


#: The terms of a rank's card: the number of changes to the group's options so far, and whether the rank waits for the meeting.
#: They can change.
Terms = Callable[[], dict[str, Any]]


def ready() -> dict[str, Any]:
    """The terms of a rank that meets others because a call of it needs that."""
    return {"again": 0, "waits": True}


def gather(
    rank: int,
    size: int,
    store: Store,
    about: dict[str, Any],
    seconds: float,
    stop: threading.Event | None = None,
    terms: Terms = ready,
) -> list[dict[str, Any]]:
    """Exchange what the ranks tell about themselves.

    A rank may have tried before and failed, and its peers another number of times. So everybody leaves a card with a name
    of its own, and next to it the names of the cards that it sees. The ranks have met when all of them see the same.

    Ranks of different numbers of options do not meet as long as one of them does not wait: it may be about to get others.
    """

    with store.turn:
        return _gather(rank, size, store, about, seconds, stop, terms)


def _gather(
    rank: int, size: int, store: Store, about: dict[str, Any], seconds: float, stop: threading.Event | None, terms: Terms
) -> list[dict[str, Any]]:
    def read(what: str) -> list[Any]:
        found = [store.get(f"switchyard/{what}/{r}") for r in range(size)]
        return [None if text is None else json.loads(text) for text in found]

    mine = {**about, **terms(), "name": uuid.uuid4().hex, "version": __version__}

    def fits(card: dict[str, Any]) -> bool:
        return card["again"] == mine["again"] or (card["waits"] and mine["waits"])

    if stop is not None and stop.is_set():
        raise errors.Closed("switchyard: the group was closed while its ranks met")
    store.put(f"switchyard/card/{rank}", json.dumps(mine).encode())
    if "error" in mine:
        return []
    deadline, pause, told = time.monotonic() + seconds, 0.0005, None
    met = False
    try:
        while True:
            if mine != (now := {**mine, **terms()}):
                mine = now
                store.put(f"switchyard/card/{rank}", json.dumps(mine).encode())
            cards = read("card")
            for r, card in enumerate(cards):
                if card is not None and "error" in card and card["name"] not in _heard:
                    _heard.add(card["name"])
                    raise errors.Mismatch(f"switchyard: rank {r} cannot join: {card['error']}")
            missing = [r for r, card in enumerate(cards) if card is None or "error" in card or not fits(card)]
            if not missing:
                names = [card["name"] for card in cards]
                if names != told:
                    store.put(f"switchyard/seen/{rank}", json.dumps(names).encode())
                    told = names
                missing = [r for r, seen in enumerate(read("seen")) if seen != names]
                if not missing:
                    break
            if time.monotonic() > deadline:
                raise errors.TimedOut(f"switchyard: Timed out: ranks {missing} have not come within {seconds:g} s")
            if stop is not None and stop.wait(pause):
                raise errors.Closed("switchyard: the group was closed while its ranks met")
            if stop is None:
                time.sleep(pause)
            pause = min(2 * pause, 0.05)
        for r, card in enumerate(cards):
            if card["version"] != __version__:
                raise errors.Mismatch(f"switchyard: rank {rank} has version {__version__}, rank {r} has {card['version']}")
        met = True
        return cards
    finally:
        if not met:  # nobody waits for this card any more
            store.forget(f"switchyard/seen/{rank}")
            store.forget(f"switchyard/card/{rank}")


class Meeting(Generic[Found]):
    """The meeting of one group's ranks, on a thread of its own. Operations that come meanwhile wait in line."""

    def __init__(self, meet: Callable[[threading.Event], Found], done: Callable[[Meeting[Found]], None]) -> None:
        """meet is called on the thread, and done when everybody in line has been served."""
        self.found: Found | None = None
        self.error: BaseException | None = None
        self._meet, self._done = meet, done
        self._lock, self._stop, self._over = threading.Lock(), threading.Event(), threading.Event()
        self._line: deque[tuple[Deferred, Callable[[Found], Completion | None]]] = deque()
        self._thread = threading.Thread(target=self._run, name="switchyard-meeting", daemon=True)
        _under_way.add(self)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.found = self._meet(self._stop)
        except BaseException as err:
            self.error = err
        while True:
            with self._lock:
                if not self._line:
                    self._done(self)
                    _under_way.discard(self)
                    self._over.set()
                    return
                operation, submit = self._line.popleft()
            try:
                if self.error is not None:
                    raise self.error
                operation.become(submit(self.found))  # type: ignore[arg-type]
            except BaseException as err:
                operation.become(None, err)

    def defer(self, submit: Callable[[Found], Completion | None]) -> Deferred | None:
        """Have submit called once the ranks have met, after those that came before. None says that they have."""
        with self._lock:
            if self._over.is_set():
                return None
            operation = Deferred()
            self._line.append((operation, submit))
            return operation

    def wait(self) -> Found:
        """The result of the ranks' meeting, once everybody in line has been served."""
        self._over.wait()
        if self.error is not None:
            raise self.error
        return self.found  # type: ignore[return-value]

    def end(self) -> None:
        """Give it up. It may go on for a moment."""
        self._stop.set()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)


_under_way: set[Meeting[Any]] = set()


def stop_all() -> None:
    """End the meetings that are under way, at the end of the process."""
    for meeting in list(_under_way):
        meeting.end()


def join_all() -> None:
    """Wait for their threads: what they are in the middle of does not outlive the interpreter."""
    for meeting in list(_under_way):
        meeting.join(5)
