"""Exchanges and reductions of CUDA tensors, and symmetric tensors and pools on GPUs. Imported only where torch is.

A call is enqueued on torch's current stream by one call into the library, which waits for nothing, so that CUDA
graphs capture it. The parts that calls of the same shape have in common are worked out once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
from torch import Tensor

from .. import errors
from .._core.abi import COPY_SMS, LIVE, MAX_SMS, NO_SMS, PLACED
from .._core.arguments import integer, type_of
from .._core.comm import Communicator
from .._core.places import Gpu
from .._core.splits import integers
from .groups import Submission, warn_alone
from .profile import named
from .tensors import PLAIN, apart, as_bytes, contiguous, readable, real, same_dtype, written
from .work import Work

# Absent where torch has no CUDA, and then there are no CUDA tensors either.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


_streams: dict[tuple[int, int], Any] = {}


def stream_now(device: int) -> Any:
    """The current stream of a GPU as an object of torch's, which takes longer to make than a call takes to enqueue."""
    raw = raw_stream(device)
    found = _streams.get((device, raw))
    if found is None:
        if len(_streams) == 64:
            _streams.clear()
        found = torch.cuda.ExternalStream(raw, device) if raw else torch.cuda.default_stream(device)
        _streams[device, raw] = found
    return found


def ours(output: Tensor, input: Tensor) -> bool:
    """Whether both are on a GPU, with memory that is what it seems."""
    return (
        type(input) in PLAIN
        and type(output) in PLAIN
        and input.is_cuda
        and output.is_cuda
        and input.layout is torch.strided
        and output.layout is torch.strided
    )


def one_device(output: Tensor, input: Tensor) -> None:
    """Refuse tensors of two GPUs."""
    if output.get_device() != input.get_device():
        raise errors.InvalidArgument(f"switchyard: output is on {output.device}, input on {input.device}")


def gpu_of(comm: Communicator, pg: Any, device: int) -> Gpu | None:
    """The communicator's end on a GPU. The first call for a device is collective. None means that these GPUs cannot, and
    that the process group has to do the work."""
    gpu = comm._gpus.get(device)
    if gpu is not None:
        return gpu
    first = device not in comm._no_gpus
    try:
        return comm._gpu(device)
    except errors.Unsupported as err:
        if not has_backend(pg, torch.device("cuda")):
            raise
        if first and comm.rank == 0:
            warn_alone(f"switchyard: exchanges of CUDA tensors go to torch: {err}", 5)
        return None


def has_backend(pg: Any, device: torch.device, but: type | None = None) -> bool:
    """Whether a process group has a backend for a device that is not of one class."""
    if pg is None:
        return False
    try:
        backend = pg._get_backend(device)
    except RuntimeError:
        return False
    return but is None or not isinstance(backend, but)


@contextlib.contextmanager
def on_stream(stream: Any, *tensors: Tensor, device: int | None = None) -> Iterator[None]:
    """Have another stream than the current one be it, for a call that uses tensors: torch's, or a CUstream as an integer."""
    if stream is None:
        yield
        return
    for x in tensors:
        if not (isinstance(x, Tensor) and x.is_cuda):
            raise errors.InvalidArgument(f"switchyard: stream is {stream!r}: streams are for CUDA tensors")
    if device is None:
        device = tensors[0].get_device()
    if isinstance(stream, int) and not isinstance(stream, bool):
        stream = torch.cuda.ExternalStream(stream, device)
    elif not isinstance(stream, torch.cuda.Stream):
        raise errors.InvalidType(f"switchyard: stream is {type_of(stream)}, want a torch.cuda.Stream or a CUstream")
    if stream.device_index != device:
        raise errors.InvalidArgument(f"switchyard: stream is one of cuda:{stream.device_index}, the call on cuda:{device}")
    with torch.cuda.stream(stream):
        yield
    for x in tensors:
        x.record_stream(stream)


# Exchanges

# Options that only calls on GPUs have: peer_displs, max_sms, copy_sms and no_sms.
Extra = tuple[Any, Optional[int], Optional[int], Optional[bool]]

# The options of a call with async_op whose caller gives none: 8 multiprocessors send, and at most as many copy out of
# staging. The others are left to what the caller has to do meanwhile: 16 more cost products of 8192 x 8192 matrices 10 to 25%.
BESIDE_SMS = 8
BESIDE: Extra = (None, BESIDE_SMS, None, None)


@named("all_to_all_single")
def exchange(
    gpu: Gpu,
    output: Tensor,
    input: Tensor,
    output_splits: Any,
    input_splits: Any,
    extra: Extra | None = None,
    stream: int | None = None,
    shape: tuple[int, Any] | None = None,
) -> None:
    """Enqueue all_to_all_single of tensors that are ours, input on this GPU, on a CUstream or on the current one."""
    try:
        if output.dtype is not input.dtype:
            same_dtype(output, input)
        if input.is_complex() or input.is_neg() or output.is_neg():
            output, input = _plain(output, "output"), _plain(input, "input")
        if not (input.is_contiguous() and output.is_contiguous()):
            contiguous(input, "input")
            contiguous(output, "output")
        one_device(output, input)
        if shape is None:
            shape = shape_of(gpu, output, input, output_splits, input_splits, extra)
    except errors.Error as err:
        gpu._refuse(err)
        raise
    written(output)
    gpu._all_to_all(
        raw_stream(gpu.device) if stream is None else stream, output.data_ptr(), input.data_ptr(), shape[0]
    )


def _plain(x: Tensor, name: str) -> Tensor:
    """The numbers as they lie in memory."""
    if x.is_neg():
        raise errors.InvalidArgument(
            f"switchyard: {name} has a pending negation, and other numbers in memory: resolve_neg() it"
        )
    return real(x)


def shape_of(
    gpu: Gpu, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any, extra: Extra | None
) -> tuple[int, Any]:
    """Such a call as the library takes it: its address, and the object that holds it."""
    live = None
    if _on_gpu(output_splits) or _on_gpu(input_splits):
        shape, live = _live(gpu, output, input, output_splits, input_splits)
    else:
        shape = gpu._shapes.find(output.shape, input.shape, input.element_size(), output_splits, input_splits)
    if live is None and extra is None:
        return shape
    numbers = shape[1][:]
    if live is not None:
        numbers[LIVE] = live.data_ptr()
    if extra is not None:
        peer_displs, max_sms, copy_sms, no_sms = extra
        if peer_displs is not None:
            if live is not None:
                raise errors.InvalidArgument("switchyard: peer_displs with split sizes on the GPU, unread by copy engines")
            unit = _row(output) // numbers[0]
            numbers[PLACED] = 1
            numbers.extend([integer("peer_displs", d * unit) for d in integers(peer_displs, "peer_displs", gpu._shapes.ranks)])
        numbers[MAX_SMS], numbers[COPY_SMS], numbers[NO_SMS] = max_sms or 0, _none(copy_sms), bool(no_sms)
    return numbers.buffer_info()[0], (numbers, live)


def _none(copy_sms: int | None) -> int:
    """The library has 0 for its own choice."""
    return 0 if copy_sms is None else copy_sms or -1


def _row(x: Tensor) -> int:
    """The bytes of a row."""
    n = x.element_size()
    for d in x.shape[1:]:
        n *= d
    return n


def _on_gpu(sizes: Any) -> bool:
    return isinstance(sizes, Tensor) and sizes.is_cuda


_MOST = (1 << 63) - 1


def _live(
    gpu: Gpu, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any
) -> tuple[tuple[int, array[int]], Tensor]:
    """The shape of an exchange whose splits lie on the GPU, and what the kernel reads there when it runs. They need not add up
    to the rows of the tensors, which are the most that there is room for."""
    n = gpu._shapes.ranks
    for name, sizes in (("output_split_sizes", output_splits), ("input_split_sizes", input_splits)):
        if not _on_gpu(sizes):
            raise errors.InvalidType(f"switchyard: {name} is not on the GPU, and the other split sizes are: want both there")
        if sizes.dtype is not torch.int64 or sizes.shape != (n,) or sizes.get_device() != gpu.device:
            raise errors.InvalidArgument(
                f"switchyard: {name} is {sizes.dtype} of shape {tuple(sizes.shape)} on {sizes.device}, want torch.int64 of "
                f"shape ({n},) on cuda:{gpu.device}"
            )
    for name, x in (("output", output), ("input", input)):
        if not x.dim():
            raise errors.InvalidArgument(f"switchyard: {name} has no dimension to split")
    out_bytes, in_bytes = output.numel() * output.element_size(), input.numel() * input.element_size()
    # Sizes and displacements in bytes, of what is sent and of what is received.
    live = torch.empty(2, 2, n, dtype=torch.int64, device=output.device)
    for sizes, x, into in ((input_splits, input, live[0, 0]), (output_splits, output, live[1, 0])):
        row = max(_row(x), 1)  # bytes beyond 64 bits stay more than there is room for
        torch.clamp(sizes, -(_MOST // row), _MOST // row, out=into).mul_(_row(x))
    torch.cumsum(live[:, 0], 1, out=live[:, 1])
    live[:, 1] -= live[:, 0]
    guess = array("q", [min(out_bytes, in_bytes) // n]) * n  # by which the algorithm is chosen
    return gpu._shapes.of_bytes(1, out_bytes, in_bytes, guess, guess), live


def explain(gpu: Gpu, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any) -> str:
    """How such an exchange would be carried, in words."""
    output, input = _plain(output, "output"), _plain(input, "input")
    return gpu._explain(output.data_ptr(), shape_of(gpu, output, input, output_splits, input_splits, None)[0])


# Work


class _Side:
    """The stream of a communicator's exchanges that run together with what the caller enqueues next, and events to use again:
    to make and destroy one costs more than to record it. Its priority gets an exchange the first multiprocessors that a
    long kernel of the caller's leaves."""

    def __init__(self, device: int) -> None:
        self.stream, self.events = torch.cuda.Stream(device, priority=-1), []  # type: Any, list[Any]

    def event(self) -> Any:
        try:
            return self.events.pop()
        except IndexError:
            event = torch.cuda.Event()
            event.record(self.stream)  # one that was never recorded is none yet
            return event


_making = threading.Lock()


def side_of(gpu: Gpu) -> _Side:
    if gpu.side is None:
        with _making:
            gpu.side = gpu.side or _Side(gpu.device)
    side: _Side = gpu.side
    return side


def start(gpu: Gpu, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any, extra: Extra | None = None) -> Work:
    """Enqueue an exchange behind what the current stream has, and next to what it gets then."""
    if torch.cuda.current_device() != gpu.device:
        with torch.cuda.device(gpu.device):
            return start(gpu, output, input, output_splits, input_splits, extra)
    if extra is None:
        extra = BESIDE
    # Splits on the GPU are read in the order of the current stream.
    shape, tensors = None, [output, input]
    if _on_gpu(output_splits) or _on_gpu(input_splits):
        shape = gpu._prepare(shape_of, gpu, real(output), real(input), output_splits, input_splits, extra)
        tensors.append(shape[1][1])

    def enqueue(stream: int) -> None:
        exchange(gpu, output, input, output_splits, input_splits, extra, stream, shape)

    return _beside(gpu, enqueue, tensors, [output])


def _beside(
    gpu: Gpu,
    enqueue: Callable[[int], None],
    tensors: list[Tensor],
    outputs: list[Tensor],
    back: Callable[[], None] | None = None,
    side: _Side | None = None,
) -> Work:
    """Enqueue a call that uses tensors, and back after it: behind what the current stream has, next to what it gets later. It
    is behind what the side stream has, that of the communicator's collectives if none is given."""
    side, stream = side or side_of(gpu), stream_now(gpu.device)
    event = side.event()
    # In a graph, calls of one communicator are ordered only by the stream that they are on.
    if not torch.cuda.is_current_stream_capturing():
        event.record(stream)
        stream = side.stream
        event.wait(stream)
    enqueue(stream.cuda_stream)
    if back is not None:
        with torch.cuda.stream(stream):
            back()
    if stream is side.stream:
        for x in tensors:
            x.record_stream(stream)
    event.record(stream)
    return Work(Recorded(gpu, side, stream, event), outputs)


@named("all_to_all")
def exchange_lists(gpu: Gpu, outputs: list[Tensor], inputs: list[Tensor], async_op: bool) -> Work | None:
    """Enqueue all_to_all of tensors on this GPU, one for each rank: through two tensors of bytes."""
    if torch.cuda.current_device() != gpu.device:
        with torch.cuda.device(gpu.device):
            return exchange_lists(gpu, outputs, inputs, async_op)
    sent = [as_bytes(readable(x)) for x in inputs]
    sizes, in_sizes = [x.numel() * x.element_size() for x in outputs], [x.numel() for x in sent]
    source = torch.cat(sent)
    target = source.new_empty(sum(sizes))
    back = apart(outputs, target)

    def enqueue(stream: int) -> None:
        exchange(gpu, target, source, sizes, in_sizes, None, stream)

    if async_op:
        return _beside(gpu, enqueue, [source, target, *outputs], outputs, back)
    enqueue(raw_stream(gpu.device))
    back()
    return None


@named("reductions")
def reductions(gpu: Gpu, calls: list[Submission], outputs: list[Tensor], async_op: bool) -> Work | None:
    """Enqueue reductions and gathers that submissions to the host's communicator describe, with the tensors last."""
    if torch.cuda.current_device() != gpu.device:
        with torch.cuda.device(gpu.device):
            return reductions(gpu, calls, outputs, async_op)
    if not gpu.reduces:
        if torch.cuda.is_current_stream_capturing():
            raise errors.Error(
                "switchyard: the first reduction or gather of a group on a GPU makes the GPU ready for them, which cannot be "
                "captured: make one before the graph"
            )
        gpu.open_reducer()

    def enqueue(stream: int) -> None:
        for function, (*arguments, _), _ in calls:
            getattr(gpu, function.__name__)(stream, *arguments)

    backs = [back for _, _, back in calls if back is not None]

    def back() -> None:
        for each in backs:
            each()

    if async_op:
        tensors = list(outputs)
        for _, (*_, keep), _ in calls:
            tensors.extend(keep if isinstance(keep, tuple) else (keep,))
        return _beside(gpu, enqueue, tensors, outputs, back if backs else None)
    enqueue(raw_stream(gpu.device))
    back()
    return None


class Recorded:
    """An exchange of CUDA tensors, complete when an event is."""

    def __init__(self, gpu: Gpu, side: _Side, stream: Any, event: Any) -> None:
        self._gpu, self._side, self._stream, self._event = gpu, side, stream, event

    def __del__(self) -> None:
        # A call that waits for the event has been told which of its records it waits for. One of a graph stays the graph's.
        if self._stream is self._side.stream:
            self._side.events.append(self._event)

    @property
    def error(self) -> BaseException | None:
        """The state of the group's exchanges so far."""
        try:
            self._gpu.check()
        except errors.Error as err:
            return err
        return None

    def poll(self) -> bool:
        return bool(self._event.query())

    def wait(self, timeout: float | None = None) -> bool:
        """Make the current stream wait for the exchange; the host goes on. It may be called on several streams. With a timeout
        the host waits too, and gets the exchange's error."""
        if timeout is not None:
            deadline = time.monotonic() + timeout
            while not self._event.query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(1e-4)
            self._gpu.check()
        stream_now(self._gpu.device).wait_event(self._event)
        return True

    def future(self, outputs: list[Tensor]) -> Any:
        future: Any = torch.futures.Future(devices=[torch.device("cuda", self._gpu.device)])
        with torch.cuda.stream(self._stream):
            torch.cuda.current_stream().wait_event(self._event)
            future.set_result(outputs)
        return future


class Enqueued:
    """An exchange on the stream of its caller, who has nothing to wait for."""

    error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> bool:
        return True

    def poll(self) -> bool:
        return True

    def future(self, outputs: list[Tensor]) -> Any:
        future: Any = torch.futures.Future(devices=[x.device for x in outputs[:1]])
        future.set_result(outputs)
        return future


# Devices


def index_of(device: Any) -> int:
    """The ordinal of a CUDA device that may be given in any of torch's ways."""
    d = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if d.type != "cuda":
        raise errors.InvalidArgument(f"switchyard: device {device}, want a CUDA device")
    if not torch.cuda.is_available():
        raise errors.Unsupported("switchyard: torch has no CUDA here")
    return torch.cuda.current_device() if d.index is None else d.index
