"""Memory that one rank shares with one other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _sides

if TYPE_CHECKING:
    from ._core.shares import Opened, Shared
    from ._types import Device, Group, Memory


def share(tensor: Memory, dst: int, group: Group = None) -> Shared:
    """Offer a tensor's memory to rank dst of the same host, which opens it by ``open_shared``. The two do it alone, and
    ``share`` waits for nobody: in a ring all ranks share first.

    The tensor is contiguous: a CUDA tensor of torch's allocator, or a host tensor in shared memory
    (``tensor.share_memory_()``). Tensors of ``empty`` are refused, because every peer reaches them as they are. The result
    keeps the tensor until its ``close()`` has returned, which waits for rank dst to open and close it, and withdraws it where
    rank dst does not open it in time. A CUDA
    tensor that is sent to rank dst while that has it open is read where it lies, without staging.

    The first call of a group on its GPUs is one of all its ranks.
    """
    made: Shared = _sides.tensor_shares().share(tensor, dst, group)
    return made


def open_shared(src: int, group: Group = None, *, device: Device = None, timeout: float | None = None) -> Opened:
    """Open the oldest tensor that rank src has shared with this rank and this rank has not opened, and wait for it, by default
    for the timeout of the group. device is where it is, as for ``empty``. Each call is for one ``share``: one whose tensor rank
    src has withdrawn raises :class:`switchyard.errors.Freed`.

    ``tensor`` of the result is the memory, as a tensor of bytes. It is the ``at`` of ``put`` and ``get``, whole or in part, and
    may be read and written as any tensor. It is dead after ``close()``, which gives the memory back to its rank.
    """
    made: Opened = _sides.tensor_shares().open_shared(src, group, device, timeout)
    return made
