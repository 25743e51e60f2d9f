"""All-to-alls by plans, and how reductions and gathers are carried, for torch tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import errors
from .._core.comm import Communicator
from .._core.dtypes import DTYPES
from .._core.places import Gpu, Place
from . import calls, cuda
from .groups import Submission
from .tensors import is_tensor, readable, same_dtype, writable, written


def all_to_all_by_plan(output: Tensor, input: Tensor, group: Any, async_op: bool) -> Any:
    if calls._outside(group, "all_to_all_by_plan"):
        return None
    on_gpu = _on_gpu(output, input)
    calls.hint_gradient("all_to_all_by_plan", input)
    if on_gpu:
        gpu = calls.gpu(group, input.device)
        call = gpu._prepare(slices, gpu._shapes.ranks, output, input)
        return cuda.reductions(gpu, [call], [output], async_op)
    comm = calls.here(group)
    return calls._now(comm, comm._prepare(slices, comm.size, output, input), output, async_op)


def _on_gpu(output: Any, input: Any) -> bool:
    """Whether a call is on a GPU. Refuses tensors for which there are no plans."""
    is_tensor(output, "output")
    is_tensor(input, "input")
    if cuda.ours(output, input):
        cuda.one_device(output, input)
        return True
    for name, x in (("output", output), ("input", input)):
        if not calls._ours(x):
            what = f"{name} is {x.layout} on {x.device}"
            raise errors.Unsupported(f"switchyard: {what}: plans are for dense tensors, both of the host or both of a GPU")
    return False


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
    place: Place = calls.gpu(group, input.device) if _on_gpu(output, input) else calls.here(group)
    ranks = place._shapes.ranks
    output, input = output.data, input.data  # nothing is written, so autograd hears of nothing
    kind = (DTYPES["uint8"], 0)
    if call in ("all_reduce", "reduce_scatter_tensor"):
        found = calls.kind_of(input, "sum")
        if found is None:
            raise errors.Unsupported(f"switchyard: explain: {call} of {input.dtype}: Switchyard does not reduce that")
        kind = found
    whole = input
    if call == "reduce_scatter_tensor":
        calls.scatter(ranks, output, input, kind)
    elif call == "all_gather_into_tensor":
        whole = output
        calls.gather(ranks, output, input)
    elif call == "all_to_all_by_plan":
        slices(ranks, output, input)
    if isinstance(place, Gpu) and not place.reduces:
        place.open_reducer()
    return place._explain_reduction(call, whole.numel() * whole.element_size(), kind[0])
