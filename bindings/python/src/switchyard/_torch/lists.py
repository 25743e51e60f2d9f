"""Collectives of a process group on tensors in lists, and on those that one rank alone gets or gives."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import errors
from .._core.comm import Communicator
from .._core.splits import Shapes
from . import calls
from .groups import Submission
from .tensors import as_bytes, into, readable, writable, written


def all_gather(ranks: int, outputs: list[Tensor], input: Tensor) -> Submission:
    """all_gather into a list, through one tensor."""
    fresh, back = _spread("output_tensors", ranks, outputs, input)
    function, arguments, _ = calls.gather(ranks, fresh, input)
    return function, arguments, back


def reduce_scatter(ranks: int, output: Tensor, inputs: list[Tensor], kind: tuple[int, int]) -> Submission:
    """reduce_scatter of a list, through one tensor."""
    _alike("input_tensors", ranks, inputs, output)
    return calls.scatter(ranks, output, torch.cat([x.detach().reshape(-1) for x in inputs]), kind)


def broadcast(rank: int, root: int, tensor: Tensor) -> Submission:
    """broadcast of the bytes of rank root."""
    x, back = (readable(tensor), None) if rank == root else writable(tensor, "tensor")
    if rank != root:
        written(x)
    return Communicator._broadcast, (x.data_ptr(), x.numel() * x.element_size(), root, x), back


def gather(shapes: Shapes, rank: int, root: int, outputs: list[Tensor], input: Tensor) -> Submission:
    """gather into a list of rank root: an exchange in which the others receive nothing."""
    source = as_bytes(readable(input))
    sent = [source.numel() if p == root else 0 for p in range(shapes.ranks)]
    if rank != root:
        return calls.exchange(shapes, source.new_empty(0), source, [0] * shapes.ranks, sent)
    fresh, back = _spread("gather_list", shapes.ranks, outputs, input)
    function, arguments, _ = calls.exchange(shapes, as_bytes(fresh), source, [source.numel()] * shapes.ranks, sent)
    return function, arguments, back


def scatter(shapes: Shapes, rank: int, root: int, output: Tensor, inputs: list[Tensor]) -> Submission:
    """scatter of a list of rank root: an exchange in which the others send nothing."""
    fresh, back = writable(output, "output")
    target = as_bytes(fresh)
    received = [target.numel() if p == root else 0 for p in range(shapes.ranks)]
    source, sent = target.new_empty(0), [0] * shapes.ranks
    if rank == root:
        _alike("scatter_list", shapes.ranks, inputs, output)
        source, sent = torch.cat([as_bytes(readable(x)) for x in inputs]), [target.numel()] * shapes.ranks
    function, arguments, _ = calls.exchange(shapes, target, source, received, sent)
    return function, arguments, back


def _spread(name: str, ranks: int, outputs: list[Tensor], input: Tensor):  # type: ignore[no-untyped-def]
    """A tensor for what all ranks give, and what brings it into a list."""
    _alike(name, ranks, outputs, input)
    fresh = torch.empty((ranks, *input.shape), dtype=input.dtype, device=input.device)
    backs = [into(x, part.view(x.shape), f"{name}[{i}]") for i, (x, part) in enumerate(zip(outputs, fresh))]

    def back() -> None:
        for each in backs:
            each()

    return fresh, back


def _alike(name: str, ranks: int, tensors: list[Tensor], one: Tensor) -> None:
    """Refuse a list that is not as long as the group, or that has tensors of other sizes or types than a rank's one tensor."""
    if len(tensors) != ranks:
        raise errors.InvalidArgument(f"switchyard: {name} has {len(tensors)} tensors for {ranks} ranks")
    for i, x in enumerate(tensors):
        if x.dtype is not one.dtype:
            raise errors.InvalidType(f"switchyard: {name}[{i}] is {x.dtype}, this rank's tensor {one.dtype}")
        if x.numel() != one.numel():
            raise errors.InvalidArgument(f"switchyard: {name}[{i}] has {x.numel()} elements, this rank's tensor {one.numel()}")


def nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def same_own(rank: int, outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Refuse lists whose tensors for this rank itself are not of one size, or that have elements of different types."""
    for name, tensors in (("output", outputs), ("input", inputs)):
        for i, x in enumerate(tensors):
            if x.dtype is not inputs[0].dtype:
                raise errors.InvalidType(
                    f"switchyard: {name}_tensor_list[{i}] is {x.dtype}, input_tensor_list[0] {inputs[0].dtype}"
                )
    output, input = outputs[rank], inputs[rank]
    if nbytes(output) != nbytes(input):
        raise errors.InvalidArgument(
            f"switchyard: output_tensor_list[{rank}] has shape {tuple(output.shape)}, input_tensor_list[{rank}] "
            f"{tuple(input.shape)}: what a rank sends to itself it receives"
        )
