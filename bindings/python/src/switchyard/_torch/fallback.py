"""Why torch's own backends make a call in the place of Switchyard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .tensors import PLAIN, dense

# The reasons as the library knows them. They are values of a label of metrics.
GROUP = "group"  # the ranks have no symmetric memory together
GPU = "gpu"  # these GPUs cannot reach each other's memory
DEVICE = "device"  # the call is not there for tensors on these devices
TENSOR = "tensor"  # the tensors are no plain dense ones
REDUCTION = "reduction"  # nor is the element type with this operator
FORM = "form"  # nor the call with these options


def reason(group: Any, tensors: Sequence[Tensor], kinds: Iterable[Any] = (), gpus: bool = True) -> str:
    """Why a call of a group is not Switchyard's. kinds are those of its reductions, None for one that the library does not
    have, and gpus says whether it has the call for CUDA tensors."""
    if any(type(x) not in PLAIN or x.layout is not torch.strided for x in tensors):
        return TENSOR
    on_gpus = bool(tensors) and all(x.is_cuda for x in tensors)
    if not (on_gpus and gpus) and not all(x.is_cpu for x in tensors):
        return DEVICE
    if any(kind is None for kind in kinds):
        return REDUCTION
    if any(x.is_neg() or not dense(x) for x in tensors):
        return TENSOR
    if group.met and group.comm is None:
        return GROUP
    if on_gpus and group.comm is not None and any(x.get_device() in group.comm._no_gpus for x in tensors):
        return GPU
    return FORM


def backend(pg: Any, tensors: Sequence[Tensor]) -> str:
    """The name of the backend that makes a call on tensors in a process group of torch's."""
    devices = {x.device.type for x in tensors}
    try:
        return str(pg._get_backend(torch.device(devices.pop() if len(devices) == 1 else "cpu")).name()).lower()
    except (RuntimeError, AttributeError):
        return "torch"
