"""Messages and transfers between two ranks on arrays of other libraries than torch."""

from __future__ import annotations

from array import array
from typing import Any

from .._core import pairs
from .._core.comm import Communicator
from .._core.work import Work
from .memory import array_of


def message(receive: bool, tensor: Any, peer: Any, comm: Communicator, tag: Any, async_op: bool) -> Any:
    a = array_of(tensor, "tensor", write=receive)
    request = comm._messages(pairs.message(comm, receive, peer, tag, (a.address, a.nbytes)), a.keep, async_op)
    if async_op:
        return Work(request, (tensor,))
    return request.sources[0] if receive else None


def batch(ops: list[Any], comm: Communicator) -> Work:
    calls, keep = array("q"), []
    for op in ops:
        receive = op.op.__name__ == "irecv"
        a = array_of(op.tensor, "tensor", write=receive)
        calls += pairs.message(comm, receive, op.peer, op.tag, (a.address, a.nbytes))
        keep.append(a.keep)
    return Work(comm._messages(calls, keep, True), [op.tensor for op in ops])


def move(kind: str, tensor: Any, at: Any, peer: Any, comm: Communicator) -> None:
    mine, place = array_of(tensor, "tensor", write=kind == "get"), array_of(at, "at")
    call = pairs.transfer(comm, kind, peer, (mine.address, mine.nbytes), (place.address, place.nbytes))
    pairs.same_elements(kind, mine.dtype, place.dtype)
    comm._transfer(call, (mine, place))
