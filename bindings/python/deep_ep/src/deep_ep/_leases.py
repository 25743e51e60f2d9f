"""Leases: results of low latency stay in the memory of their dispatcher until later calls take it."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from switchyard import errors
from switchyard._torch.moe_bare import delivery

from ._results import Shape
from ._routings import Routing

# How many results of low latency are lent at a time. Two micro-batches of a server are between dispatch and combine at a time.
LENT = 2
# The most tokens that kernels for few take.
FEW = 1024

T = TypeVar("T")


class Live:
    """A dispatch whose result is lent."""

    def __init__(self, made: Made, got: Any) -> None:
        self.made, self.got = made, got
        self._routing: Any = None

    def serves(self, routing: Routing) -> Live:
        """Have combines of a routing go by this dispatch."""
        routing.made, routing.kept, routing.live = self.made, None, self
        self._routing = weakref.ref(routing)
        return self

    def retire(self) -> None:
        """Give the output back, and keep the routing for who has it yet."""
        routing = None if self._routing is None else self._routing()
        if routing is not None and routing.live is self:
            routing.live = None
            if routing.kept is None and not self.got.between_halves:
                routing.kept = taken_up(self.got.keep)
        self.drop()

    def drop(self) -> None:
        """Give the output back: it goes with this reference, unless a handle or a hook has it."""
        still = weakref.ref(self.got)
        self.got = None
        got = still()
        if got is not None:
            got.release()


class Made:
    """A dispatcher of the pool, and the results that it lends."""

    #: The most tokens of a rank, and when a call used it last, by the pool's count of calls.
    tokens: int
    used = 0
    #: Whether a graph has captured a call; whether the memory was given back; whether the pool has it yet.
    captured = closed = False
    pooled = True

    def __init__(self, shape: Shape, dispatcher: Any) -> None:
        self.shape, self.tokens, self.dispatcher = shape, shape.tokens, dispatcher
        #: Makes a dispatch with its result in torch's memory.
        self.deliver = delivery(dispatcher)
        self.ring: list[Live] = []

    def close(self) -> None:
        """Give the memory back, together with all ranks."""
        self.closed = True
        ring, self.ring = self.ring, []
        for live in ring:
            live.drop()  # a routing of a closed dispatcher says nothing
        self.dispatcher.close()

    def between_halves(self) -> bool:
        """Whether a lent result has had the first half of its dispatch only."""
        return any(live.got.between_halves for live in self.ring)

    def lend(self, call: Callable[..., Any], *arguments: Any) -> Live:
        """Make a call whose result is lent, for the longest of which others wait no more."""
        ring = self.ring
        if len(ring) == LENT:
            ring.pop(0).retire()
        try:
            got = call(*arguments)
        except errors.Error as error:
            earlier(error)
            got = call(*arguments)
        live = Live(self, got)
        ring.append(live)
        return live


def taken_up(call: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Make a call, also one that tells of an earlier one."""
    try:
        return call(*arguments, **options)
    except errors.Error as error:
        earlier(error)
    return call(*arguments, **options)


def earlier(error: errors.Error) -> None:
    """Raise an error, or turn it into a warning where it is of an earlier call. On a GPU a call tells of one that the host did
    not wait for, and has not been made then: it is to be made, as other ranks may have done that did not know yet."""
    if not error.earlier:
        raise error
    text = f"deep_ep: a call that the host did not wait for brought no rows: {error}"
    level, frame = 1, sys._getframe()
    while frame.f_globals.get("__package__") == __package__ and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RuntimeWarning, stacklevel=level)
