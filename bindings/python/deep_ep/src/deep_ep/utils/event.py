"""Events on CUDA streams. On the host every call has ended when it returns, and an event says nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from switchyard._torch.compiler import uncompiled_methods


@uncompiled_methods
class EventHandle:
    """The current stream at this moment. It keeps tensors alive for as long as it lives."""

    def __init__(self, *tensors: Any) -> None:
        self._event: Any = None
        self._tensors = tensors
        if torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """Make the current stream wait for what was enqueued before this event."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


@uncompiled_methods
class EventOverlap:
    """An event, or none, with what is to happen once it was waited for."""

    hook_after_wait: Optional[Callable[[], Any]] = None
    _releases = False

    def __init__(self, event: Optional[EventHandle] = None, extra_tensors: Optional[tuple[Any, ...]] = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Make the current stream wait, and return what the registered function does, None without one. With release_handle the
        event is given up after it."""
        if self.event is None:
            raise AssertionError("deep_ep: EventOverlap.current_stream_wait: a call without async_finish has no event")
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        made = None if hook is None else hook()
        if release_handle:
            self.event = None
        return made

    def wait(self) -> Any:
        """Make the current stream wait, and return the results of a call with defer_epilogue."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Have a function called after the next wait. There can be one."""
        if self.hook_after_wait is not None:
            raise AssertionError("deep_ep: EventOverlap.register_hook_after_wait: there is a hook already")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        self._releases = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        if self.event is not None:
            self.current_stream_wait(release_handle=self._releases)
        self._releases = False


def event_of(event: Any) -> Optional[EventHandle]:
    """The event of an argument, which may be wrapped."""
    return event.event if isinstance(event, EventOverlap) else event
