"""Kernels of one's own that work with those of other ranks. The header ``switchyard.cuh`` lies in this package's folder."""

from __future__ import annotations

import ctypes
import struct
from ctypes import byref, c_int64, c_uint64
from typing import TYPE_CHECKING, Any

from . import _sides, errors
from ._core.arguments import Bound, integer, type_of

if TYPE_CHECKING:
    from ._types import Device, Group, Stream


class DeviceCommunicator(Bound):
    """The other ranks for kernels of one's own on a GPU: their addresses, signals and waits that end.

    All ranks of ``group`` make it together, on the GPU ``device``, by default the current one. ``signals`` is how many there
    are from each rank to each other, at most 4096. It lasts as long as the group. Errors of launches that have run are
    raised by the next one, and by ``switchyard.check``.

    ``argument`` is the address, on the GPU, of the ``switchyard::communicator`` that kernels take: for launches by other
    means, such as those of kernels in Triton with ``switchyard.triton``.
    """

    def __init__(self, group: Group = None, *, device: Device = "cuda", signals: int = 256) -> None:
        signals = integer("signals", signals)
        self._gpu = _sides.tensor_calls().gpu(group, device)
        comm, ticket, address = self._gpu._comm, c_uint64(), c_uint64()
        self._lib = comm._lib
        code = self._lib.kernels_open(comm._handle, self._gpu._handle, signals, byref(ticket))
        self._handle = comm._control(code, ticket)
        self._lib.check(self._lib.kernels_argument(self._handle, byref(address)))
        self.argument: int = address.value

    def load(self, image: bytes, name: str) -> Kernel:
        """Find a kernel by its name (``extern "C"``) in a cubin, a fatbin or PTX. It can wait for kernels that run: all ranks
        load before they launch."""
        if not isinstance(image, bytes) or not isinstance(name, str):
            raise errors.InvalidType(f"switchyard: image is {type_of(image)}, name {type_of(name)}: want bytes and a string")
        number = c_int64()
        self._lib.check(self._lib.kernels_load(self._handle, image, len(image), name.encode(), byref(number)))
        return Kernel(self, number.value)


class Kernel(Bound):
    """A kernel of a :class:`DeviceCommunicator`. Calling it launches it: all ranks launch the same ones in the same order."""

    def __init__(self, of: DeviceCommunicator, number: int) -> None:
        self._of, self._number = of, number

    def __call__(self, blocks: int, threads: int, *arguments: Any, shared: int = 0, stream: Stream = None) -> None:
        """Launch ``blocks`` of ``threads``, with ``shared`` bytes of dynamic shared memory each, on the current stream or on
        ``stream``. All blocks must fit on the GPU at the same time.

        The kernel has one parameter, a struct. ``arguments`` are its words of 8 bytes: integers, CUDA tensors for their
        addresses, and the :class:`DeviceCommunicator`; or the struct as one ``bytes``. Tensors are the caller's to keep.
        """
        of = self._of
        if len(arguments) == 1 and isinstance(arguments[0], bytes):
            parameter = arguments[0]
        else:
            parameter = b"".join(map(_word, arguments))
        cuda = _sides.tensor_calls().cuda
        with cuda.on_stream(stream, device=of._gpu.device):
            now = cuda.raw_stream(of._gpu.device)
            numbers = (integer("blocks", blocks), integer("threads", threads), integer("shared", shared))
            memory = ctypes.create_string_buffer(parameter, len(parameter))
            code = of._lib.kernels_launch(of._handle, now, self._number, *numbers, memory, len(parameter))
        of._lib.check(code)


def _word(argument: Any) -> bytes:
    """An argument of a kernel as 8 bytes."""
    if isinstance(argument, DeviceCommunicator):
        argument = argument.argument
    elif _sides.is_tensor(argument):
        argument = argument.data_ptr()
    if isinstance(argument, bool) or not isinstance(argument, int) or not -(1 << 63) <= argument < 1 << 64:
        raise errors.InvalidType(f"switchyard: a kernel's argument is {argument!r}, want an integer of 64 bits or a tensor")
    return struct.pack("=q" if argument < 0 else "=Q", argument)
