"""The collectives on arrays of other libraries than torch, in a communicator."""

from __future__ import annotations

from typing import Any

from .. import errors
from .._core.arguments import type_of
from .._core.comm import Communicator
from .._core.dtypes import OPS, REDUCIBLE, reduction
from .._core.splits import Shapes
from .._core.work import Ticket, Work
from .memory import Array, array_of


def _work(ticket: Ticket | None, output: Any) -> Work | None:
    return None if ticket is None else Work(ticket, (output,))


def _pair(output: Any, input: Any, suffix: str = "") -> tuple[Array, Array]:
    out, inp = array_of(output, "output" + suffix, write=True), array_of(input, "input" + suffix)
    if out.dtype != inp.dtype:
        raise errors.InvalidType(
            f"switchyard: output{suffix} is {out.dtype}, input{suffix} {inp.dtype}: Invalid usage of tensors with different "
            "dtypes"
        )
    return out, inp


def _exchange(
    shapes: Shapes, output: Any, input: Any, output_splits: Any, input_splits: Any
) -> tuple[Array, Array, tuple[int, Any]]:
    out, inp = _pair(output, input)
    return out, inp, shapes.find(out.shape, inp.shape, inp.item, output_splits, input_splits)


def all_to_all_single(
    output: Any, input: Any, output_splits: Any, input_splits: Any, comm: Communicator, async_op: bool
) -> Any:
    out, inp, shape = comm._prepare(_exchange, comm._shapes, output, input, output_splits, input_splits)
    keep = (out.keep, inp.keep, shape)
    return _work(comm._all_to_all(out.address, inp.address, shape[0], keep, async_op), output)


def explain(output: Any, input: Any, output_splits: Any, input_splits: Any, comm: Communicator) -> str:
    out, _, shape = _exchange(comm._shapes, output, input, output_splits, input_splits)
    return comm._explain(out.address, shape[0])


def _kind(name: str, dtype: str, op: str) -> tuple[int, int]:
    kind = reduction(dtype, op)
    if kind is None:
        if op not in OPS:
            raise errors.Unsupported(f"switchyard: op is {op!r}, which is for torch tensors; want one of {', '.join(OPS)}")
        able = ", ".join(known for known in REDUCIBLE if reduction(known, op))
        raise errors.Unsupported(f"switchyard: {name} is {dtype or 'of an unknown data type'}; op {op!r} takes {able}")
    return kind


def _op(op: Any) -> str:
    name = op.lower() if isinstance(op, str) else str(op).rsplit(".", 1)[-1].lower().replace("product", "prod")
    if name in OPS or name in ("band", "bor", "bxor", "premul_sum"):  # these are torch's
        return name
    if not isinstance(op, str):
        raise errors.InvalidType(f"switchyard: op is {type_of(op)}, want one of {', '.join(OPS)}")
    raise errors.InvalidArgument(f"switchyard: op is {op!r}, want one of {', '.join(OPS)}")


def _reduction(tensor: Any, op: Any) -> tuple[Array, tuple[int, int]]:
    a = array_of(tensor, "tensor", write=True)
    return a, _kind("tensor", a.dtype, _op(op))


def all_reduce(tensor: Any, op: Any, comm: Communicator, async_op: bool) -> Any:
    a, (dtype, how) = comm._prepare(_reduction, tensor, op)
    return _work(comm._all_reduce(a.address, a.address, a.nbytes, dtype, how, a.keep, async_op), tensor)


def _scatter(ranks: int, output: Any, input: Any, op: Any) -> tuple[Array, Array, tuple[int, int]]:
    out, inp = _pair(output, input)
    if out.nbytes * ranks != inp.nbytes:
        raise errors.InvalidArgument(
            f"switchyard: input has {inp.nbytes} bytes, output {out.nbytes} for each of {ranks} ranks: input tensor must be "
            "the same size as output size times world size"
        )
    return out, inp, _kind("input", inp.dtype, _op(op))


def reduce_scatter_tensor(output: Any, input: Any, op: Any, comm: Communicator, async_op: bool) -> Any:
    out, inp, (dtype, how) = comm._prepare(_scatter, comm.size, output, input, op)
    keep = (out.keep, inp.keep)
    return _work(comm._reduce_scatter(out.address, out.nbytes, inp.address, inp.nbytes, dtype, how, keep, async_op), output)


def _gather(ranks: int, output: Any, input: Any) -> tuple[Array, Array]:
    out, inp = _pair(output, input, "_tensor")
    if inp.nbytes * ranks != out.nbytes:
        raise errors.InvalidArgument(
            f"switchyard: output_tensor has {out.nbytes} bytes, input_tensor {inp.nbytes} on each of {ranks} ranks: output "
            "tensor size must be equal to world_size times input tensor size"
        )
    return out, inp


def all_gather_into_tensor(output: Any, input: Any, comm: Communicator, async_op: bool) -> Any:
    out, inp = comm._prepare(_gather, comm.size, output, input)
    keep = (out.keep, inp.keep)
    return _work(comm._all_gather(out.address, out.nbytes, inp.address, inp.nbytes, keep, async_op), output)


def barrier(comm: Communicator, async_op: bool) -> Any:
    return _work(comm._barrier(async_op), None)
