"""Calls between two ranks of a group, in which the others take no part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _sides, errors
from ._core.arguments import type_of

if TYPE_CHECKING:
    from ._types import Device, Group, Memory, Stream


def send(tensor: Memory, dst: int, group: Group = None, tag: int = 0, *, stream: Stream = None) -> None:
    """Send a tensor to rank dst, which receives it by a ``recv`` of the same tag and size.

    It returns when the tensor may be written again, which does not say that it was received: messages up to 8 KiB are copied
    at once and larger ones when their receiver is late, up to 256 MiB in all. So rings in which all ranks send first do not
    lock. Messages of one rank and tag are received in the order in which they were sent.

    Ranks are numbered as ``torch.distributed`` does it: by the process group ``WORLD`` where the group is torch's, and by the
    group where it is a :class:`switchyard.Communicator`. Ranks that disagree on the size both get both sizes
    (:class:`switchyard.errors.Mismatch`), a sender that had returned from its next send to that rank. Their data types are not
    compared. A message that nobody receives is a :class:`switchyard.errors.TimedOut` that says which tags are waited for.

    On CUDA tensors the call is enqueued, on the current stream or on ``stream``, a ``torch.cuda.Stream`` or a CUstream.
    """
    _one(False, tensor, dst, group, tag, False, stream)


def isend(tensor: Memory, dst: int, group: Group = None, tag: int = 0, *, stream: Stream = None) -> Any:
    """``send`` behind the caller's back. The tensor must not be written before the work object's ``wait()`` has returned."""
    return _one(False, tensor, dst, group, tag, True, stream)


def recv(tensor: Memory, src: int | None = None, group: Group = None, tag: int = 0, *, stream: Stream = None) -> int:
    """Receive a tensor of rank src, or of any rank, and return the rank that sent it. See ``send``. On CUDA tensors a receive
    from any rank waits for the stream, to know the rank; ``irecv`` does not, and a CUDA graph captures it."""
    found: int = _one(True, tensor, src, group, tag, False, stream)
    return found


def irecv(tensor: Memory, src: int | None = None, group: Group = None, tag: int = 0, *, stream: Stream = None) -> Any:
    """``recv`` behind the caller's back: the tensor is complete after the work object's ``wait()``, and its ``source_rank()``
    is the sender's number in the group."""
    return _one(True, tensor, src, group, tag, True, stream)


class P2POp(NamedTuple):
    """A message for ``batch_isend_irecv``: op is ``isend`` or ``irecv``. The peer of an ``irecv`` may be None, for any rank."""

    op: Callable[..., Any]
    tensor: Memory
    peer: int | None
    group: Group = None
    tag: int = 0


def batch_isend_irecv(p2p_op_list: Sequence[Any], *, stream: Stream = None) -> list[Any]:
    """Send and receive several messages of one group at the same time, in any order: none waits for another, but those of one
    rank and tag pair up in the order of the list. Entries are :class:`P2POp` or those of ``torch.distributed``. The result is a
    list with one work object for all of them. ``stream`` is that of ``send``."""
    if isinstance(p2p_op_list, (str, bytes)) or not isinstance(p2p_op_list, Iterable):
        raise errors.InvalidType(f"switchyard: p2p_op_list is {type_of(p2p_op_list)}, want a list of P2POp")
    ops = list(p2p_op_list)
    if not ops:
        raise errors.InvalidArgument("switchyard: batch_isend_irecv: the list is empty")
    for i, op in enumerate(ops):
        if getattr(getattr(op, "op", None), "__name__", "") not in ("isend", "irecv"):
            raise errors.InvalidType(f"switchyard: p2p_op_list[{i}] is {op!r}, want a P2POp of isend or irecv")
        if not _sides.same(op.group, ops[0].group):
            raise errors.InvalidArgument(f"switchyard: p2p_op_list[{i}] is of another group than the first")
    if stream is not None:
        if _sides.compiling():
            made: list[Any] = _sides.outside(batch_isend_irecv, ops, stream=stream)
            return made
        with _sides.on_stream(stream, *(op.tensor for op in ops)):
            return batch_isend_irecv(ops)
    if any(_sides.is_tensor(op.tensor) for op in ops):
        return [_sides.tensor_pairs().batch(ops)]
    return [_sides.array_pairs().batch(ops, _sides.communicator(ops[0].group))]


def put(tensor: Memory, at: Memory, dst: int, group: Group = None, *, stream: Stream = None) -> None:
    """Copy a tensor to the memory of rank dst that lies there where ``at`` lies here: ``at`` is a tensor of ``empty``, or a
    part of one, with as many bytes. Rank dst may use them once it has waited for a ``signal`` that came behind the put.

    On the host it is complete on return. On CUDA tensors it is enqueued on the current stream, or on ``stream``.
    """
    _move("put", tensor, at, dst, group, stream)


def get(tensor: Memory, at: Memory, src: int, group: Group = None, *, stream: Stream = None) -> None:
    """Copy the memory of rank src that lies there where ``at`` lies here into a tensor. See ``put``."""
    _move("get", tensor, at, src, group, stream)


def signal(dst: int, semaphore: int = 0, group: Group = None, *, device: Device = None, stream: Stream = None) -> None:
    """Count a semaphore at rank dst up by one, behind what this rank has put there: one of 8 of each rank for each other.

    With a CUDA device it is one of the GPU's, and enqueued behind the puts of the current stream, or of ``stream``.
    """
    _flag("signal", dst, semaphore, group, device, stream)


def wait(src: int, semaphore: int = 0, group: Group = None, *, device: Device = None, stream: Stream = None) -> None:
    """Wait for a signal of rank src and consume it. With a CUDA device the stream waits, and the host goes on. A rank that
    does not signal is named by :class:`switchyard.errors.TimedOut`: here, or on a GPU by the next call. It then has
    consumed none."""
    _flag("wait", src, semaphore, group, device, stream)


def _one(receive: bool, tensor: Any, peer: Any, group: Any, tag: Any, async_op: bool, stream: Any) -> Any:
    if stream is not None:
        if _sides.compiling():
            return _sides.outside(_one, receive, tensor, peer, group, tag, async_op, stream)
        with _sides.on_stream(stream, tensor):
            return _one(receive, tensor, peer, group, tag, async_op, None)
    if _sides.is_tensor(tensor):
        return _sides.tensor_pairs().message(receive, tensor, peer, group, tag, async_op)
    return _sides.array_pairs().message(receive, tensor, peer, _sides.communicator(group), tag, async_op)


def _move(kind: str, tensor: Any, at: Any, peer: Any, group: Any, stream: Any) -> None:
    if _sides.is_tensor(tensor) or _sides.is_tensor(at):
        _sides.tensor_pairs().move(kind, tensor, at, peer, group, stream)
        return
    _no_stream(stream)
    _sides.array_pairs().move(kind, tensor, at, peer, _sides.communicator(group))


def _flag(kind: str, peer: Any, semaphore: Any, group: Any, device: Any, stream: Any) -> None:
    if device is not None and device != "cpu":
        _sides.tensor_pairs().flag_on_gpu(kind, peer, semaphore, group, device, stream)
        return
    _no_stream(stream)
    from ._core.pairs import flag

    flag(_sides.communicator(group), kind, _sides.peer_of(group, peer), semaphore)


def _no_stream(stream: Any) -> None:
    if stream is not None:
        raise errors.InvalidArgument(f"switchyard: stream is {stream!r}: streams are for CUDA tensors")
