"""Tensors that two ranks share. Imported only where torch is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import errors
from .._core.pairs import rank_of
from .._core.places import Gpu, Place, memory
from .._core.shares import Opened, Shared
from . import calls, cuda
from .compiler import uncompiled
from .pairs import peer_of
from .tensors import contiguous, description, is_tensor, real, tensor_on


@uncompiled
def share(tensor: Tensor, dst: Any, group: Any) -> Shared:
    is_tensor(tensor, "tensor")
    contiguous(tensor, "tensor")
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        raise errors.InvalidArgument("switchyard: share: the tensor has no elements")
    place: Place
    file = (-1, 0)
    if cuda.ours(tensor, tensor):
        place = calls.gpu(group, tensor.device)
    elif calls._ours(tensor):
        place, file = calls.here(group), _file_of(tensor)
    else:
        raise errors.Unsupported(f"switchyard: share: a tensor on {tensor.device} of layout {tensor.layout}")
    peer = rank_of(place._comm.rank, place._comm.size, False, peer_of(group, dst))
    return Shared(place, peer, (real(tensor).data_ptr(), size), file, tensor)


def _file_of(tensor: Tensor) -> tuple[int, int]:
    """The descriptor of the shared memory that a host tensor is in, which stays torch's, and where it begins there."""
    storage = tensor.untyped_storage()
    if not storage.is_shared() or torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        raise errors.Unsupported(
            "switchyard: share: a host tensor outside of shared memory has no descriptor that a peer could map: call its "
            "share_memory_() before, with torch's sharing strategy file_descriptor, or take switchyard.empty, which every peer "
            "reaches"
        )
    fd, _ = storage._share_fd_cpu_()
    return int(fd), tensor.storage_offset() * tensor.element_size()


@uncompiled
def open_shared(src: Any, group: Any, device: Any, timeout: float | None) -> Opened:
    where = torch.get_default_device() if device is None else torch.device(device)
    place: Place
    if where.type == "cuda":
        place = calls.gpu(group, where)
    elif where.type == "cpu":
        place = calls.here(group)
    else:
        raise errors.Unsupported(f"switchyard: open_shared: there is no memory to share on {where}")
    peer = rank_of(place._comm.rank, place._comm.size, True, peer_of(group, src))
    opened = Opened(place, peer, timeout)
    if isinstance(place, Gpu):
        about = description(opened.address, torch.device("cuda", place.device), torch.uint8, opened.size)
        opened.tensor = tensor_on(about.buffer_info()[0])
    else:
        opened.tensor = torch.frombuffer(memory(opened.address, opened.size, None), dtype=torch.uint8)
    return opened
