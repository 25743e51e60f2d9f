"""Dispatchers, and the results of low latency that they lend."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from switchyard import errors

from ._results import Routing, Shape

# How many results of low latency are lent at a time. Two micro-batches of a server are between dispatch and combine at a time.
LENT = 2
# The most tokens that kernels for few take.
FEW = 1024

T = TypeVar("T")


class Live:
    """A dispatch whose result is lent."""

    def __init__(self, made: Made, got: Any, routing: Routing) -> None:
        self.made, self.got, self._routing = made, got, weakref.ref(routing)
        routing.live = self

    def retire(self) -> None:
        """Give the output back, and keep the routing for who has it yet."""
        routing = self._routing()
        if routing is not None and routing.live is self:
            routing.live = None
            if routing.kept is None and not self.got.between_halves:
                routing.kept = taken_up(self.got.keep)
        self.drop()

    def drop(self) -> None:
        """Give the output back."""
        got, self.got = self.got, None
        got.release()


class Made:
    """A dispatcher and the results that it lends."""

    def __init__(self, shape: Shape, dispatcher: Any) -> None:
        self.shape, self.dispatcher = shape, dispatcher
        self.ring: list[Live] = []
        self.captured = self.closed = False

    def close(self) -> None:
        for live in self.ring:
            live.drop()  # a routing of a closed dispatcher says nothing
        self.ring.clear()
        self.dispatcher.close()
        self.closed = True

    def lend(self, routing: Routing, call: Callable[..., Any], *arguments: Any, **options: Any) -> Live:
        """Make a call whose result is lent, for the longest of which others wait no more."""
        if len(self.ring) == LENT:
            self.ring.pop(0).retire()
        live = Live(self, taken_up(call, *arguments, **options), routing)
        self.ring.append(live)
        return live


def taken_up(call: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Make a call. On a GPU the error of a call that the host did not wait for is told by a later one, which has not been made
    then: it is made, as other ranks may have done that did not know yet, and the error is a warning."""
    try:
        return call(*arguments, **options)
    except errors.Error as error:
        if not error.earlier:
            raise
        warnings.warn(f"deep_ep: a call that the host did not wait for brought no rows: {error}", RuntimeWarning, stacklevel=4)
        return call(*arguments, **options)
