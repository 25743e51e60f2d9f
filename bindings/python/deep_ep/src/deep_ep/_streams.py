"""Where a call runs: on the current stream, or on a stream of the buffer's own while the current one goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from switchyard import errors
from switchyard._torch.compiler import leaving
from switchyard._torch.cuda import capturing, raw_stream, stream_now

from .utils.event import EventHandle, event_of

#: Makes a call of the kind outside of the graph that is compiled.
streaming = leaving("deep_ep: this call is on a stream of its own, or waits for an event")


def check(name: str, previous_event: Any, is_async: bool, on_comm_stream: bool) -> None:
    """Refuse arguments about streams that do not go together."""
    if on_comm_stream and (previous_event is None or not is_async):
        raise AssertionError(f"deep_ep: {name}: allocate_on_comm_stream needs a previous_event and an asynchronous call")


class Streams:
    """The side stream of a buffer on a device, made when it is first asked for."""

    def __init__(self) -> None:
        self._side: Any = None

    def side(self, device: Optional[torch.device] = None) -> Any:
        """The stream; None on the host."""
        if device is not None and device.type != "cuda":
            return None
        if self._side is None:
            self._side = torch.cuda.Stream(device)
        return self._side

    def run(
        self, device: torch.device, previous: Any, is_async: bool, inputs: tuple[Any, ...], call: Callable[[], Any]
    ) -> tuple[Any, Optional[EventHandle]]:
        """Make a call and return what it returns, with the event of its end where it is asynchronous.

        Without an event and without is_async the call stays on the current stream. Otherwise the side stream waits for the
        event alone, or for the current stream if no event is given.
        """
        event = event_of(previous)
        if event is None and not is_async:
            return call(), None
        if device.type != "cuda":
            made = call()
            return made, EventHandle() if is_async else None
        current, side = torch.cuda.current_stream(device), self.side(device)
        if event is None:
            side.wait_stream(current)
        with torch.cuda.stream(side):
            if event is not None:
                event.current_stream_wait()
            made = call()
            done = EventHandle()
        for x in _tensors(inputs):
            x.record_stream(side)
        for x in _tensors(made):
            x.record_stream(current)
        if is_async:
            return made, done
        done.current_stream_wait()
        return made, None


class Reads:
    """Until when lent outputs of a device have been read, for calls on other streams that may take them. On the host every call
    has ended when it returns."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._event: Any = None
        #: The stream of the last call, by torch's number and as an object.
        self.raw: Optional[int] = None
        self._stream: Any = None
        #: Whether calls have been on several streams. Then each ends with a mark; before, the first on another waits for all
        #: that the one has.
        self.several = False

    def capturing(self) -> bool:
        """Whether the current stream is captured."""
        return self._cuda and capturing()  # type: ignore[no-any-return]

    def refuse_capture(self, what: str) -> None:
        if self.capturing():
            raise errors.Unsupported(f"deep_ep: {what} cannot be made while a CUDA graph is captured: make one like it before")

    def current(self) -> Any:
        """The current stream of the device."""
        return stream_now(self._device.index)

    def mark(self) -> None:
        """Remember that outputs have been read so far, which the current stream has waited for."""
        if capturing():
            return
        raw = raw_stream(self._device.index)
        if raw != self.raw:
            self.raw, self._stream, self.several = raw, self.current(), True
        self._event.record(self._stream)

    def follow(self) -> None:
        """Have this call's stream wait until outputs that it may take have been read."""
        if not self._cuda:
            return
        raw = raw_stream(self._device.index)
        if raw == self.raw or capturing():
            return
        stream = self.current()
        if self.raw is None:
            self._event = torch.cuda.Event()
            # torch's own streams have odd numbers, but for the default one, and are never destroyed.
            number = torch.cuda.current_stream(self._device).stream_id
            self.several = number != 0 and number % 2 == 0
        else:
            if not self.several:
                self._event.record(self._stream)
                self.several = True
            stream.wait_event(self._event)
        self.raw, self._stream = raw, stream


def _tensors(values: Any) -> list[Any]:
    """The CUDA tensors in a value of tuples, lists and objects that name their tensors."""
    if isinstance(values, torch.Tensor):
        return [values] if values.is_cuda else []
    if isinstance(values, (tuple, list)):
        return [x for value in values for x in _tensors(value)]
    named = getattr(values, "tensors", None)
    return [] if named is None else _tensors(named())


def device_of(name: str, x: Any) -> torch.device:
    """The device of a tensor that a call is about."""
    if not isinstance(x, torch.Tensor):
        raise errors.InvalidType(f"deep_ep: {name} is {type(x).__name__}, want a tensor")
    if x.device.type not in ("cpu", "cuda"):
        raise errors.InvalidArgument(f"deep_ep: {name} is on {x.device}, want the host or a CUDA device")
    return x.device
