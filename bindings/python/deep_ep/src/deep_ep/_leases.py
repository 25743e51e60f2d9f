"""Leases: results of low latency stay in the memory of their dispatcher until later calls take it."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from switchyard import errors
from switchyard._torch.moe_bare import delivery
from torch import Tensor

from ._results import Shape
from ._routings import LentRouting

# How many results of low latency are lent at a time. Two micro-batches of a server are between dispatch and combine at a time.
LENT = 2
# The most tokens that kernels for few take, and the most of a rank in rows by token: with more the others are faster.
FEW, FEW_BY_TOKEN = 1024, 256

T = TypeVar("T")


class Live:
    """A dispatch whose result is lent from now on, and by which combines of a routing go."""

    __slots__ = ("got", "made", "routing")

    def __init__(self, made: Made, got: Any, routing: LentRouting) -> None:
        self.made, self.got, self.routing = made, got, weakref.ref(routing)
        routing.made, routing.kept, routing.live = made, None, self
        made.ring.append(self)

    def keep(self) -> None:
        """Keep the routing for who has it yet: the output is about to be given back."""
        routing = self.routing()
        if routing is not None and routing.live is self and routing.kept is None and not self.got.between_halves:
            routing.kept = taken_up(self.got.keep)

    def end(self) -> None:
        """Forget the output, by which combines do not go any more."""
        routing, self.got = self.routing(), None
        if routing is not None and routing.live is self:
            routing.live = None

    def drop(self) -> None:
        """Give the output back: it goes with this reference, unless a handle or a hook has it."""
        still = weakref.ref(self.got)
        self.end()
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
            live.drop()
        self.dispatcher.close()

    def between_halves(self) -> bool:
        """Whether a lent result has had the first half of its dispatch only."""
        return any(live.got.between_halves for live in self.ring)

    def lend(self, call: Callable[..., T], *arguments: Any) -> T:
        """Make a call whose result is to be lent, behind giving the oldest back where there are as many as can be."""
        if len(self.ring) == LENT:
            self.ring[0].keep()
            self.ring.pop(0).drop()
        return taken_up(call, *arguments)

    def lend_usual(self, x: Tensor, idx: Tensor, first: bool) -> Any:
        """The same of a dispatch, by an operator if nothing about it is unusual. Else nothing has happened."""
        ring, output, operated = self.ring, None, self.dispatcher._operated
        if operated is None:
            return None
        if len(ring) == LENT:
            oldest = ring[0]
            output = oldest.got._output
            if oldest.routing() is not None:
                oldest.keep()
            oldest.got._parts.clear()  # which hold the output
        try:
            sent = operated.lease(x, idx, output, first)
        except BaseException as error:
            if output is not None:
                ring.pop(0).end()
            if not isinstance(error, errors.Error):
                raise
            earlier(error)
            return operated.lease(x, idx, None, first)
        if output is not None and sent is not None:
            ring.pop(0).end()
        return sent


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
