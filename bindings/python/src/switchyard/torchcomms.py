"""Switchyard as a backend of torchcomms.

``torchcomms.new_comm("switchyard", device, name)`` makes a communicator whose calls are those of the backend of
``torch.distributed``: Switchyard's where it has them, gloo's or NCCL's where not. torchcomms finds this module by itself
(entry point ``torchcomms.backends``); it need not be imported.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torchcomms
from torch import Tensor

from . import errors
from ._torch.backend import SwitchyardProcessGroup

__all__ = ["SwitchyardBackend"]


def __dir__() -> list[str]:
    return __all__


#: How often this process has made a communicator of a name: ranks that make one again meet at other keys of the store.
_made: collections.Counter[str] = collections.Counter()


class SwitchyardBackend(torchcomms.TorchCommBackend):
    """One rank's end of a communicator of torchcomms, which makes it, calls it and ends it (``finalize``).

    A call with ``async_op=False`` is complete on return for host tensors, and enqueued on the current stream for CUDA tensors.
    With ``async_op=True`` it returns work, whose ``wait`` does that. Errors are those of ``switchyard.errors``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pg: SwitchyardProcessGroup | None = None
        self._name, self._device, self._store = "", torch.device("cpu"), None  # type: str, torch.device, Any
        self._splits = 0  # how often this rank has split the communicator

    @property
    def process_group(self) -> SwitchyardProcessGroup:
        """The process group that makes the calls. ``switchyard.communicator`` of it has the calls that torchcomms lacks."""
        if self._pg is None:
            raise errors.Closed(f"switchyard: communicator {self._name!r} is not initialized, or finalized")
        return self._pg

    # Life

    def init(self, device: torch.device, name: str, options: Any) -> None:
        """Begin to meet the other ranks: those of the launcher's variables, in the store of options, or in torch's own."""
        (rank, size), store = _ranks(), options.store
        if store is None:
            store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=options.timeout))
        _made[name] += 1
        self._open(device, name, dist.PrefixStore(f"switchyard/{name}/{_made[name]}", store), rank, size, options.timeout)

    def _open(self, device: torch.device, name: str, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._device, self._name, self._store, self._timeout = device, name, store, timeout
        self._pg = SwitchyardProcessGroup(store, rank, size, timeout)
        self._pg._set_group_name(f"torchcomms/{name}")

    def finalize(self) -> None:
        """Leave the communicator."""
        pg, self._pg = self.process_group, None
        pg.shutdown()

    def split(self, ranks: list[int], name: str, options: Any) -> SwitchyardBackend | None:
        """A communicator of some ranks, in that order; None for a rank that passes none. All ranks make this call, each with
        the ranks of its own part."""
        rank, size = self.get_rank(), self.get_size()
        if any(not 0 <= r < size for r in ranks) or len({*ranks}) != len(ranks):
            raise errors.InvalidArgument(f"switchyard: ranks is {ranks}, want different ones from 0 to {size - 1}")
        self._splits += 1
        if not ranks:
            return None
        if rank not in ranks:
            raise errors.InvalidArgument(f"switchyard: ranks is {ranks}, want {rank} among them, which makes this call")
        part = SwitchyardBackend()
        store = dist.PrefixStore(f"{self._splits}/{name}/{min(ranks)}", self._store)
        part._open(self._device, name, store, ranks.index(rank), len(ranks), options.timeout)
        return part

    def get_rank(self) -> int:
        """This rank's number."""
        return self.process_group.rank()

    def get_size(self) -> int:
        """How many ranks there are."""
        return self.process_group.size()

    def get_backend_name(self) -> str:
        """The name of the backend."""
        return "switchyard"

    def get_comm_name(self) -> str:
        """The name of the communicator."""
        return self._name

    # Calls. torchcomms passes these arguments by their places.

    def send(self, tensor: Tensor, dst: int, async_op: bool) -> Any:
        """Send a tensor to a rank."""
        return _done(self.process_group.send([tensor], dst, 0), async_op)

    def recv(self, tensor: Tensor, src: int, async_op: bool) -> Any:
        """Receive a tensor from a rank."""
        return _done(self.process_group.recv([tensor], src, 0), async_op)

    def broadcast(self, tensor: Tensor, root: int, async_op: bool) -> Any:
        """Give all ranks the tensor of one."""
        return _done(self.process_group.broadcast([tensor], _rooted(dist.BroadcastOptions(), root, async_op)), async_op)

    def all_reduce(self, tensor: Tensor, op: Any, async_op: bool) -> Any:
        """Combine the tensors of all ranks."""
        return _done(self.process_group.allreduce([tensor], _reducing(dist.AllreduceOptions(), op, async_op)), async_op)

    def reduce(self, tensor: Tensor, root: int, op: Any, async_op: bool) -> Any:
        """Combine the tensors of all ranks on one."""
        options = _rooted(_reducing(dist.ReduceOptions(), op, async_op), root, async_op)
        return _done(self.process_group.reduce([tensor], options), async_op)

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor, async_op: bool) -> Any:
        """Give all ranks the tensors of all, of one shape."""
        options = _asynchronous(c10d.AllgatherOptions(), async_op)
        return _done(self.process_group.allgather([tensor_list], [tensor], options), async_op)

    def all_gather_v(self, tensor_list: list[Tensor], tensor: Tensor, async_op: bool) -> Any:
        """Give all ranks the tensors of all, each of its own shape: an exchange in which a rank sends all others the same."""
        return self.all_to_all(tensor_list, [tensor] * self.get_size(), async_op)

    def all_gather_single(self, output: Tensor, input: Tensor, async_op: bool) -> Any:
        """Give all ranks the tensors of all, one after the other."""
        options = _asynchronous(c10d.AllgatherOptions(), async_op)
        return _done(self.process_group._allgather_base(output, input, options), async_op)

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: Any, async_op: bool) -> Any:
        """Combine the lists of all ranks, and give each rank its own entry, all of one shape."""
        options = _reducing(dist.ReduceScatterOptions(), op, async_op)
        return _done(self.process_group.reduce_scatter([output], [input_list], options), async_op)

    def reduce_scatter_v(self, output: Tensor, input_list: list[Tensor], op: Any, async_op: bool) -> Any:
        """Combine the lists of all ranks, and give each rank its own entry: one reduce-scatter of slices as long as the longest
        entry."""
        rank, size = self.get_rank(), self.get_size()
        if len(input_list) != size or input_list[rank].numel() != output.numel():
            sizes = [x.numel() for x in input_list]
            raise errors.InvalidArgument(
                f"switchyard: input_list has tensors of {sizes} elements, output {output.numel()}: want one for each of {size} "
                f"ranks, and that of rank {rank} as large as output"
            )
        padded = output.new_zeros(size, max(x.numel() for x in input_list))
        for row, x in zip(padded, input_list):
            row[: x.numel()].copy_(x.reshape(-1))
        mine = torch.empty_like(padded[rank])
        work = self.reduce_scatter_single(mine, padded, op, True)
        return _done(_Then(work, lambda: output.copy_(mine[: output.numel()].view(output.shape))), async_op)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, op: Any, async_op: bool) -> Any:
        """Combine the tensors of all ranks, and give each rank its slice."""
        options = _reducing(dist.ReduceScatterOptions(), op, async_op)
        return _done(self.process_group._reduce_scatter_base(output, input, options), async_op)

    def all_to_all_single(self, output: Tensor, input: Tensor, async_op: bool) -> Any:
        """Exchange slices of equal sizes."""
        return self.all_to_all_v_single(output, input, [], [], async_op)

    def all_to_all_v_single(
        self, output: Tensor, input: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], async_op: bool
    ) -> Any:
        """Exchange slices of these numbers of rows."""
        options = _asynchronous(dist.AllToAllOptions(), async_op)
        splits = (output_split_sizes or None, input_split_sizes or None)
        return _done(self.process_group.alltoall_base(output, input, *splits, options), async_op)

    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], async_op: bool) -> Any:
        """Exchange tensors: entry k of the input goes to rank k, entry k of the output comes from it."""
        options = _asynchronous(dist.AllToAllOptions(), async_op)
        return _done(self.process_group.alltoall(output_tensor_list, input_tensor_list, options), async_op)

    def barrier(self, async_op: bool) -> Any:
        """Meet all ranks."""
        return _done(self.process_group.barrier(_asynchronous(dist.BarrierOptions(), async_op)), async_op)

    def scatter(self, output_tensor: Tensor, input_tensor_list: list[Tensor], root: int, async_op: bool) -> Any:
        """Give each rank an entry of one rank's list."""
        inputs = [input_tensor_list] if self.get_rank() == root else []
        options = _rooted(dist.ScatterOptions(), root, async_op)
        return _done(self.process_group.scatter([output_tensor], inputs, options), async_op)

    def gather(self, output_tensor_list: list[Tensor], input_tensor: Tensor, root: int, async_op: bool) -> Any:
        """Give one rank the tensors of all."""
        outputs = [output_tensor_list] if self.get_rank() == root else []
        options = _rooted(dist.GatherOptions(), root, async_op)
        return _done(self.process_group.gather(outputs, [input_tensor], options), async_op)


def _ranks() -> tuple[int, int]:
    """This rank and how many there are, by the variables that other backends of torchcomms read, in their order."""
    for rank, size in _VARIABLES:
        if os.environ.get(rank) and os.environ.get(size):
            return int(os.environ[rank]), int(os.environ[size])
    known = ", ".join(f"{rank} with {size}" for rank, size in _VARIABLES)
    raise errors.InvalidArgument(f"switchyard: no launcher's variables say which rank this is: want {known}")


_VARIABLES = (
    ("TORCHCOMM_RANK", "TORCHCOMM_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
)


def _asynchronous(options: Any, async_op: bool) -> Any:
    if hasattr(options, "asyncOp"):
        options.asyncOp = async_op
    return options


def _rooted(options: Any, root: int, async_op: bool) -> Any:
    options.rootRank = root
    return _asynchronous(options, async_op)


def _reducing(options: Any, op: Any, async_op: bool) -> Any:
    """Options with an operator of torchcomms."""
    name = op.type.name
    if not hasattr(dist.ReduceOp, name) or name == "PREMUL_SUM":  # its factor cannot be read
        raise errors.Unsupported(f"switchyard: the operator {name}: scale the tensor before a sum")
    options.reduceOp = getattr(dist.ReduceOp, name)
    return _asynchronous(options, async_op)


def _done(work: Any, async_op: bool) -> Any:
    """Work as torchcomms takes it: none where the call is over."""
    if async_op:
        return work
    if work is not None:
        work.wait()
    return None


class _Then:
    """Work with something to do once it is complete."""

    def __init__(self, work: Any, then: Callable[[], Any]) -> None:
        self._work, self._then = work, then  # type: Any, Callable[[], Any] | None

    def wait(self) -> None:
        """Wait for the work, and do it."""
        self._work.wait()
        if self._then is not None:
            self._then()
            self._then = None


torchcomms.register_backend("switchyard", SwitchyardBackend)
