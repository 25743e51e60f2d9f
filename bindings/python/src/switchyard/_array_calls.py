"""The collectives on arrays of other libraries than torch."""

from __future__ import annotations

from typing import Any

from . import errors
from ._arrays import Array, array_of
from ._comm import Communicator, Ticket, Work, default, reduction
from ._splits import common, splits


def communicator(group: Any) -> Communicator:
    """The communicator of a group: one of ours, or that of a torch process group."""
    if isinstance(group, Communicator):
        return group
    import sys

    if "torch" in sys.modules:
        from . import _torch

        comm = _torch.communicator(group)
        if comm is None:
            raise errors.Unsupported("switchyard: the ranks of this group are not on one host")
        return comm
    if group is not None:
        raise errors.InvalidType(f"switchyard: group is a {type(group).__name__}, want a switchyard.Communicator")
    return default()


def _work(ticket: Ticket | None, output: Any) -> Work | None:
    return None if ticket is None else Work(ticket, (output,))


def _pair(output: Any, input: Any) -> tuple[Array, Array]:
    out, inp = array_of(output, "output", write=True), array_of(input, "input")
    if out.dtype != inp.dtype:
        raise errors.InvalidArgument(f"Invalid usage of tensors with different dtypes: found {out.dtype} and {inp.dtype}")
    return out, inp


def all_to_all_single(output: Any, input: Any, output_splits: Any, input_splits: Any, group: Any, async_op: bool) -> Any:
    comm = communicator(group)
    out, inp = _pair(output, input)
    for name, a in (("output", out), ("input", inp)):
        if not a.shape:
            raise errors.InvalidArgument(f"switchyard: {name} has no dimension to split")
    send, recv = splits(input_splits, inp.shape[0], comm.size), splits(output_splits, out.shape[0], comm.size)
    send, recv, elem = common(send, inp.row_bytes, recv, out.row_bytes)
    keep = (out.keep, inp.keep, send, recv)
    return _work(comm.all_to_all(out.address, out.nbytes, inp.address, inp.nbytes, send, recv, elem, keep, async_op), output)


def _kind(dtype: str, op: str) -> tuple[int, int]:
    kind = reduction(dtype, op)
    if kind is None:
        raise errors.Unsupported(f"switchyard: {op} of {dtype or 'this data type'}")
    return kind


def _op(op: Any) -> str:
    return op.lower() if isinstance(op, str) else str(op).rsplit(".", 1)[-1].lower().replace("product", "prod")


def all_reduce(tensor: Any, op: Any, group: Any, async_op: bool) -> Any:
    comm = communicator(group)
    a = array_of(tensor, "tensor", write=True)
    dtype, how = _kind(a.dtype, _op(op))
    return _work(comm.all_reduce(a.address, a.address, a.nbytes, dtype, how, a.keep, async_op), tensor)


def reduce_scatter_tensor(output: Any, input: Any, op: Any, group: Any, async_op: bool) -> Any:
    comm = communicator(group)
    out, inp = _pair(output, input)
    if out.nbytes * comm.size != inp.nbytes:
        raise errors.InvalidArgument("input tensor must be the same size as output size times world size")
    dtype, how = _kind(out.dtype, _op(op))
    keep = (out.keep, inp.keep)
    return _work(comm.reduce_scatter(out.address, out.nbytes, inp.address, inp.nbytes, dtype, how, keep, async_op), output)


def all_gather_into_tensor(output: Any, input: Any, group: Any, async_op: bool) -> Any:
    comm = communicator(group)
    out, inp = _pair(output, input)
    if inp.nbytes * comm.size != out.nbytes:
        raise errors.InvalidArgument("output tensor size must be equal to world_size times input tensor size")
    keep = (out.keep, inp.keep)
    return _work(comm.all_gather(out.address, out.nbytes, inp.address, inp.nbytes, keep, async_op), output)


def barrier(group: Any, async_op: bool) -> Any:
    return _work(communicator(group).barrier(async_op), None)
