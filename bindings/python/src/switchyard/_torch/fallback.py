"""Why torch's own backends make a call in the place of Switchyard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .tensors import PLAIN, into, written
from .work import Theirs, Work

# The reasons as the library knows them. They are values of a label of metrics.
GROUP = "group"  # the ranks have no symmetric memory together
GPU = "gpu"  # these GPUs cannot reach each other's memory
DEVICE = "device"  # the call is not there for tensors on these devices
TENSOR = "tensor"  # the tensors are no plain ones
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


# gloo takes the memory of a tensor for its numbers, one after the other, and neither copies nor refuses others. Of most of
# what it writes autograd does not hear.

#: By call of a process group, for each of its first arguments whether tensors there are read (r), written (w) or both (b).
ROLES = {
    "allgather": "wr",
    "allgather_into_tensor_coalesced": "wr",
    "_allgather_base": "wr",
    "allreduce": "b",
    "allreduce_coalesced": "b",
    "alltoall": "wr",
    "alltoall_base": "wr",
    "broadcast": "b",
    "gather": "wr",
    "recv": "w",
    "recv_anysource": "w",
    "reduce": "b",
    "reduce_scatter": "wr",
    "reduce_scatter_tensor_coalesced": "wr",
    "_reduce_scatter_base": "wr",
    "scatter": "wr",
    "send": "r",
}


class Rows:
    """A process group of torch's that takes tensors of the host with any strides: its backends get them row after row, and what
    these have written is brought back."""

    def __init__(self, pg: Any) -> None:
        self._pg = pg

    def __getattr__(self, name: str) -> Any:
        call, roles = getattr(self._pg, name), ROLES.get(name)
        if roles is None:
            return call

        def make(*given: Any, **named: Any) -> Any:
            reads = name == "broadcast" and len(given) > 1 and given[1].rootRank == self._pg.rank()
            return in_rows(call, "r" if reads else roles, given, named)

        return make

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        """reduce_scatter of a list. gloo of torch 2.8 sums it, whatever the operator is, so with another one it is this rank's
        part of an all_reduce."""
        lists = len(outputs) == 1 and len(inputs) == 1 and len(inputs[0]) == self._pg.size()
        if opts.reduceOp == dist.ReduceOp.SUM or not lists or not _alike(outputs[0], inputs[0], self._pg.rank()):
            return in_rows(self._pg.reduce_scatter, ROLES["reduce_scatter"], (outputs, inputs, opts))
        rank, sizes = self._pg.rank(), [x.numel() for x in inputs[0]]
        whole = torch.cat([x.detach().resolve_conj().resolve_neg().reshape(-1) for x in inputs[0]])
        over = dist.AllreduceOptions()
        over.reduceOp, over.timeout = opts.reduceOp, opts.timeout
        result = self._pg.allreduce([whole], over)
        written(outputs[0])
        mine = whole.split(sizes)[rank].view(outputs[0].shape)
        return Work(Theirs(result), outputs, into(outputs[0], mine, "output"))


def _alike(output: Tensor, inputs: list[Tensor], rank: int) -> bool:
    """Whether the tensors of a list are of the host and of one type, and this rank's has the output's size."""
    plain = all(
        type(x) in PLAIN and x.is_cpu and x.layout is torch.strided and x.dtype is output.dtype for x in (output, *inputs)
    )
    return plain and inputs[rank].numel() == output.numel()


def in_rows(call: Callable[..., Any], roles: str, given: Sequence[Any], named: dict[str, Any] | None = None) -> Any:
    """Make a call of torch's, whose first arguments have tensors with these roles."""
    backs: list[Callable[[], None]] = []
    outputs: list[Tensor] = []
    made = [_fitted(x, role, backs, outputs) for x, role in zip(given, roles)]
    result = call(*made, *given[len(made) :], **(named or {}))
    written(*outputs)
    if not backs:
        return result

    def back() -> None:
        for each in backs:
            each()

    if hasattr(result, "is_completed"):
        return Work(Theirs(result), outputs, back)
    back()  # the call is over
    return result


def _fitted(x: Any, role: str, backs: list[Callable[[], None]], outputs: list[Tensor]) -> Any:
    """A tensor, or lists of them, as gloo takes them. backs are what brings back what it writes there."""
    if isinstance(x, (list, tuple)):
        return [_fitted(each, role, backs, outputs) for each in x]
    if not isinstance(x, Tensor):
        return x
    if role != "r":
        outputs.append(x)
    if type(x) not in PLAIN or not x.is_cpu or x.layout is not torch.strided:
        return x
    if x.is_contiguous() and not x.is_neg() and not x.is_conj() and (x.numel() != 1 or set(x.stride()) <= {1}):
        return x
    fresh = x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if fresh.numel() == 1:
        fresh = fresh.as_strided(fresh.shape, (1,) * fresh.dim())
    if role != "r":
        backs.append(into(x, fresh, "tensor"))
    return fresh
