"""All-to-alls by plans, and how reductions and gathers are carried, for torch tensors of the host."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import errors
from .._core.comm import Communicator
from .._core.dtypes import DTYPES
from . import calls
from .groups import Submission
from .tensors import is_tensor, readable, same_dtype, writable, written


def all_to_all_by_plan(output: Tensor, input: Tensor, group: Any, async_op: bool) -> Any:
    if calls._outside(group, "all_to_all_by_plan"):
        return None
    _on_host("output", output)
    _on_host("input", input)
    calls.hint_gradient("all_to_all_by_plan", input)
    comm = calls.here(group)
    return calls._now(comm, comm._prepare(slices, comm.size, output, input), output, async_op)


def _on_host(name: str, x: Any) -> None:
    is_tensor(x, name)
    if not calls._ours(x):
        raise errors.Unsupported(f"switchyard: {name} is {x.layout} on {x.device}: plans are for dense tensors of the host")


def slices(ranks: int, output: Tensor, input: Tensor) -> Submission:
    """all_to_all_by_plan of tensors that are ours."""
    same_dtype(output, input)
    if output.numel() != input.numel() or not input.dim() or input.shape[0] % ranks:
        raise errors.InvalidArgument(
            f"switchyard: output has shape {tuple(output.shape)}, input {tuple(input.shape)}: a plan moves as "
            f"many rows to each of {ranks} ranks as come from there"
        )
    input, (output, back) = readable(input), writable(output, "output")
    written(output)
    arguments = (output.data_ptr(), input.data_ptr(), input.numel() * input.element_size(), (output, input))
    return Communicator._all_to_all_by_plan, arguments, back


def explain_reduction(call: str, output: Tensor, input: Tensor, group: Any) -> str:
    _on_host("output", output)
    _on_host("input", input)
    comm = calls.here(group)
    output, input = output.data, input.data  # nothing is written, so autograd hears of nothing
    kind = (DTYPES["uint8"], 0)
    if call in ("all_reduce", "reduce_scatter_tensor"):
        found = calls.kind_of(input, "sum")
        if found is None:
            raise errors.Unsupported(f"switchyard: explain: {call} of {input.dtype}: Switchyard does not reduce that")
        kind = found
    whole = input
    if call == "reduce_scatter_tensor":
        calls.scatter(comm.size, output, input, kind)
    elif call == "all_gather_into_tensor":
        whole = output
        calls.gather(comm.size, output, input)
    elif call == "all_to_all_by_plan":
        slices(comm.size, output, input)
    return comm._explain_reduction(call, whole.numel() * whole.element_size(), kind[0])
