"""All-to-alls by plans, and how reductions and gathers are carried, for arrays of other libraries than torch."""

from __future__ import annotations

from typing import Any

from .. import errors
from .._core.comm import Communicator
from .._core.dtypes import DTYPES
from . import calls
from .memory import Array


def _slices(ranks: int, output: Any, input: Any) -> tuple[Array, Array]:
    out, inp = calls._pair(output, input)
    if out.nbytes != inp.nbytes or not inp.shape or inp.shape[0] % ranks:
        raise errors.InvalidArgument(
            f"switchyard: output has shape {out.shape}, input {inp.shape}: a plan moves as many "
            f"rows to each of {ranks} ranks as come from there"
        )
    return out, inp


def all_to_all_by_plan(output: Any, input: Any, comm: Communicator, async_op: bool) -> Any:
    out, inp = comm._prepare(_slices, comm.size, output, input)
    return calls._work(comm._all_to_all_by_plan(out.address, inp.address, inp.nbytes, (out.keep, inp.keep), async_op), output)


def explain_reduction(call: str, output: Any, input: Any, comm: Communicator) -> str:
    kind = DTYPES["uint8"]
    if call == "all_reduce":
        whole, (kind, _) = calls._reduction(output, "max")
    elif call == "reduce_scatter_tensor":
        _, whole, (kind, _) = calls._scatter(comm.size, output, input, "max")
    elif call == "all_gather_into_tensor":
        whole, _ = calls._gather(comm.size, output, input)
    else:
        whole, _ = _slices(comm.size, output, input)
    return comm._explain_reduction(call, whole.nbytes, kind)
