"""Exchanges of CUDA tensors, and symmetric tensors and pools on GPUs. Imported only where torch is.

An exchange is enqueued on torch's current stream by one call into the library, which waits for nothing, so that CUDA
graphs capture it. What a call has in common with others of the same shape is worked out once.
"""

from __future__ import annotations

import ctypes
import threading
import time
import warnings
from array import array
from ctypes import c_char_p, c_void_p, py_object
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import _arrays, _native, errors
from ._comm import Block, Communicator, Gpu
from ._splits import common, splits
from ._tensors import PLAIN, contiguous, real, same_dtype

# Absent where torch has no CUDA, and then there are no CUDA tensors either.
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


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


def gpu_of(comm: Communicator, pg: Any, device: int) -> Gpu | None:
    """The communicator's end on a GPU. The first call for a device is collective. None means that these GPUs cannot, and
    that the process group has to do the work."""
    gpu = comm._gpus.get(device)
    if gpu is not None:
        return gpu
    first = device not in comm._no_gpus
    try:
        return comm.gpu(device)
    except errors.Unsupported as err:
        if pg is None or not _has_backend(pg):
            raise
        if first and comm.rank == 0:
            warnings.warn(f"switchyard: exchanges of CUDA tensors go to torch: {err}", stacklevel=5)
        return None


def _has_backend(pg: Any) -> bool:
    try:
        return pg._get_backend(torch.device("cuda")) is not None
    except RuntimeError:
        return False


# Exchanges

# How many shapes of calls a communicator remembers.
_MOST_SHAPES = 1024


def exchange(gpu: Gpu, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any, stream: int | None = None) -> None:
    """Enqueue all_to_all_single of tensors that are ours, input on this GPU, on a CUstream or on the current one."""
    if output.dtype is not input.dtype:
        same_dtype(output, input)
    if input.is_complex() or input.is_neg() or output.is_neg():
        output, input = real(output), real(input)
    if not (input.is_contiguous() and output.is_contiguous()):
        contiguous(input, "input")
        contiguous(output, "output")
    device = gpu.device
    if output.get_device() != device:
        raise errors.InvalidArgument(f"switchyard: output is on {output.device}, input on {input.device}")
    code = gpu.lib.gpu_all_to_all(
        gpu.handle,
        _raw_stream(device) if stream is None else stream,
        output.data_ptr(),
        input.data_ptr(),
        _shape(gpu, output, input, output_splits, input_splits)[0],
    )
    if code:
        raise gpu.lib.error(code)


def _shape(gpu: Gpu, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any) -> tuple[int, array[int]]:
    """The address of what the library wants to know of such a call, and what holds it."""
    try:
        key = output.shape, input.shape, input.dtype, _key(output_splits), _key(input_splits)
    except (TypeError, OverflowError):  # wrong or unusual; told apart below
        return _new_shape(gpu, output, input, output_splits, input_splits)
    known = gpu.shapes.get(key)
    if known is None:
        known = _new_shape(gpu, output, input, output_splits, input_splits)
        if len(gpu.shapes) >= _MOST_SHAPES:
            gpu.shapes.clear()
        gpu.shapes[key] = known
    return known


def _key(sizes: Any) -> bytes | None:
    if sizes is None:
        return None
    if type(sizes) is not list and type(sizes) is not tuple:
        raise TypeError
    return array("q", sizes).tobytes()


def _new_shape(gpu: Gpu, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any) -> tuple[int, array[int]]:
    out_shape, in_shape = output.shape, input.shape
    if not out_shape or not in_shape:
        raise errors.InvalidArgument("switchyard: a tensor without dimensions cannot be split")
    size, item = gpu.comm.size, input.element_size()
    out_bytes, in_bytes = output.numel() * item, input.numel() * item
    send = splits(input_splits, in_shape[0], size) or _equal(in_shape[0], size)
    recv = splits(output_splits, out_shape[0], size) or _equal(out_shape[0], size)
    send_row, recv_row = in_bytes // in_shape[0] if in_bytes else 0, out_bytes // out_shape[0] if out_bytes else 0
    sent, received, row = common(send, send_row, recv, recv_row)
    nothing = array("q", bytes(8 * size))
    numbers = array("q", (row, out_bytes, in_bytes)) + (sent or nothing) + (received or nothing)
    return numbers.buffer_info()[0], numbers


def _equal(rows: int, ranks: int) -> array[int]:
    return array("q", [rows // ranks]) * ranks


def explain(gpu: Gpu, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any) -> str:
    """How such an exchange would be carried, in words."""
    text = ctypes.create_string_buffer(4096)
    shape = _shape(gpu, real(output), real(input), output_splits, input_splits)
    gpu.lib.check(gpu.lib.gpu_explain(gpu.handle, output.data_ptr(), shape[0], text, len(text)))
    return text.value.decode(errors="replace")


# Work

class _Side:
    """The stream of a communicator's exchanges that run beside what the caller enqueues next, and events to use again:
    to make and destroy one costs more than to record it."""

    def __init__(self, device: int) -> None:
        self.stream, self.events = torch.cuda.Stream(device), []  # type: Any, list[Any]

    def event(self) -> Any:
        try:
            return self.events.pop()
        except IndexError:
            return torch.cuda.Event()


_making = threading.Lock()


def _side(gpu: Gpu) -> _Side:
    if gpu.side is None:
        with _making:
            gpu.side = gpu.side or _Side(gpu.device)
    side: _Side = gpu.side
    return side


def start(gpu: Gpu, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any) -> Work:
    """Enqueue an exchange behind what the current stream has, and beside what it gets next."""
    if torch.cuda.current_device() != gpu.device:
        with torch.cuda.device(gpu.device):
            return start(gpu, output, input, output_splits, input_splits)
    side, stream = _side(gpu), torch.cuda.current_stream()
    event = side.event()
    # In a graph, exchanges of one communicator are ordered only by the stream that they are on.
    if not torch.cuda.is_current_stream_capturing():
        event.record(stream)
        stream = side.stream
        event.wait(stream)
    exchange(gpu, output, input, output_splits, input_splits, stream.cuda_stream)
    if stream is side.stream:
        output.record_stream(stream)
        input.record_stream(stream)
    event.record(stream)
    return Work(gpu, side, stream, event, [output])


_base: Any = dist.Work if dist.is_available() else object


class Work(_base):
    """An exchange of CUDA tensors. It is a ``torch.distributed.Work``."""

    def __init__(self, gpu: Gpu, side: _Side, stream: Any, event: Any, outputs: list[Tensor]) -> None:
        super().__init__()
        self._gpu, self._side, self._stream, self._event, self._outputs = gpu, side, stream, event, outputs
        self._future: Any = None

    def __del__(self) -> None:
        # What waits for the event has been told which of its records it waits for. One of a graph stays the graph's.
        if self._stream is self._side.stream:
            self._side.events.append(self._event)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Make the current stream wait for the exchange; the host goes on. It may be called on several streams, any
        number of times. With a timeout the host waits too, and gets the exchange's error."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if seconds is not None and seconds > 0:
            deadline = time.monotonic() + seconds
            while not self._event.query():
                if time.monotonic() > deadline:
                    raise errors.TimedOut(f"switchyard: Operation timed out: not complete after {seconds} s; it goes on")
                time.sleep(1e-4)
            self._gpu.check()
        torch.cuda.current_stream(self._gpu.device).wait_event(self._event)
        return True

    def synchronize(self) -> None:
        """What ``wait`` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the exchange has run, well or not."""
        return bool(self._event.query())

    def is_success(self) -> bool:
        """Whether it has run, and no exchange of the group has failed so far."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What an exchange of the group has come to so far."""
        try:
            self._gpu.check()
        except errors.Error as err:
            return err
        return None

    def result(self) -> list[Tensor]:
        """The outputs."""
        return self._outputs

    def source_rank(self) -> int:
        """Collectives have no source."""
        raise errors.Unsupported("switchyard: sourceRank() may only be called on work objects of a receive from any source")

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of the outputs. Who waits for it has the current stream wait."""
        with _making:
            if self._future is None:
                future: Any = torch.futures.Future(devices=[torch.device("cuda", self._gpu.device)])
                with torch.cuda.stream(self._stream):
                    torch.cuda.current_stream().wait_event(self._event)
                    future.set_result(self._outputs)
                self._future = future
        return self._future


class Enqueued(_base):
    """An exchange on the stream of its caller, who has nothing to wait for."""

    def __init__(self, outputs: list[Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self._outputs


# Symmetric memory

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = py_object, [c_void_p, c_char_p, c_void_p]


def _bytes_at(address: int, size: int, kind: int, device: int) -> Tensor:
    """Memory of a device as a tensor of bytes, which does not own it."""
    about = _native.library().describe(address, size, kind, device)
    if not about:
        raise MemoryError
    return torch.from_dlpack(_new_capsule(about, b"dltensor", None))


def empty(gpu: Gpu, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in the symmetric heap, for work on the current stream."""
    size = dtype.itemsize
    for n in shape:
        size *= n
    block: Block = gpu.alloc(size, _raw_stream(gpu.device))
    if size == 0:
        return torch.empty(shape, dtype=dtype, device=torch.device("cuda", gpu.device))
    return _bytes_at(block.address, size, _arrays.DL_CUDA, gpu.device).view(dtype).view(shape)


def stream_of(tensor: Tensor) -> int:
    """The CUstream that is current for a tensor."""
    return int(_raw_stream(tensor.get_device()))


# Allocators are used by their pools as long as there are tensors of those.
_allocators: list[Any] = []


def mem_pool(gpu: Gpu, size: int) -> Any:
    """A ``torch.cuda.MemPool`` of size bytes of the symmetric heap."""
    number = gpu.pool(size, _raw_stream(gpu.device))
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        _native.path(), f"switchyard_pool_alloc_{number}", f"switchyard_pool_free_{number}"
    )
    _allocators.append(allocator)
    return torch.cuda.MemPool(allocator.allocator())


def index_of(device: Any) -> int:
    """The ordinal of a CUDA device that may be given in any of torch's ways."""
    d = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if d.type != "cuda":
        raise errors.InvalidArgument(f"switchyard: device {device}, want a CUDA device")
    if not torch.cuda.is_available():
        raise errors.Unsupported("switchyard: torch has no CUDA here")
    return torch.cuda.current_device() if d.index is None else d.index
