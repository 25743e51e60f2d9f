"""Messages and transfers between two ranks on torch tensors. Imported only where torch is."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import errors
from .._core import pairs
from .._core.comm import Communicator
from .._core.places import Gpu
from . import calls, cuda, fallback
from .compiler import uncompiled
from .groups import Submission, communicator, process_group
from .profile import named
from .tensors import contiguous, is_tensor, readable, real, writable, written
from .work import Work


def peer_of(group: Any, peer: Any) -> Any:
    """The number in its group of a rank as torch numbers it."""
    pg = process_group(group)
    if peer is None or pg is None or pg is process_group(None):
        return peer
    try:
        return dist.get_group_rank(pg, peer)
    except (ValueError, RuntimeError) as err:
        raise errors.InvalidArgument(f"switchyard: rank {peer} is not in the group: {err}") from None


def _world_rank(group: Any, rank: int) -> int:
    """The number that torch has for a rank of a group."""
    pg = process_group(group)
    return rank if pg is None or pg is process_group(None) else dist.get_global_rank(pg, rank)


def submission(ranks: Any, ops: list[tuple[bool, Tensor, Any, Any]]) -> Submission:
    """Messages of tensors that are ours: whether each is received, its tensor, its peer in the group and its tag. ranks has the
    rank and the size."""
    numbers, keep, backs = array("q"), [], []
    for receive, tensor, peer, tag in ops:
        x, back = writable(tensor, "tensor") if receive else (readable(tensor), None)
        numbers += pairs.message(ranks, receive, peer, tag, (x.data_ptr(), x.numel() * x.element_size()))
        keep.append(x)
        if receive:
            written(x)
        if back is not None:
            backs.append(back)

    def bring() -> None:
        for each in backs:
            each()

    return Communicator._messages, (numbers, keep), bring if backs else None


class _Senders:
    """The ranks that messages on a GPU were received from, -1 for sends. Those of receives from any rank lie on the GPU. The
    host waits for the stream of the messages then, or for the current one where a graph has them."""

    def __init__(self, gpu: Gpu, ops: list[tuple[bool, Tensor, Any, Any]]) -> None:
        self._gpu, self._known = gpu, [peer if receive else -1 for receive, _, peer, _ in ops]
        self.stream: Any = None
        self.told: Tensor | None = None
        if None in self._known:
            self.told = torch.full((len(ops),), -1, dtype=torch.int64, device=ops[0][1].device)

    def __iter__(self) -> Iterator[int]:
        if self.told is None:
            return iter(self._known)
        _outside_graphs(self.told, "source_rank() of a recv")
        with torch.cuda.stream(self.stream or torch.cuda.current_stream(self._gpu.device)):
            told: list[int] = self.told.tolist()
        if any(known is None and rank < 0 for known, rank in zip(self._known, told)):
            self._gpu.check()  # says why
        return iter([rank if known is None else known for known, rank in zip(self._known, told)])


def _outside_graphs(tensor: Tensor, what: str) -> None:
    with torch.cuda.device(tensor.device):
        captured = torch.cuda.is_current_stream_capturing()
    if captured:
        raise errors.Unsupported(
            f"switchyard: {what} from any rank while a graph is captured: the rank is known when it has run, so take irecv, "
            "and ask its work for source_rank() then"
        )


def _enqueue(gpu: Gpu, way: Any, submission: Submission, outputs: list[Tensor], senders: _Senders, async_op: bool) -> Work:
    """Enqueue messages that a submission to the host's communicator describes, with async_op next to what the current stream
    gets later. Those of one way, a direction and a rank, are behind one another, so a send holds up no receive."""
    _, (numbers, keep), back = submission
    told = senders.told
    place = None if told is None else told.data_ptr()
    stream: Any = None
    if async_op:
        with cuda._making:
            side = gpu.ways.get(way) or gpu.ways.setdefault(way, cuda._Side(gpu.device))
        tensors = [*keep, *outputs] if told is None else [*keep, *outputs, told]
        work = cuda._beside(gpu, lambda at: gpu._messages(at, numbers, place), tensors, outputs, back, side)
        done: Any = work._done
        stream = done._stream
    else:
        gpu._messages(cuda.raw_stream(gpu.device), numbers, place)
        if back is not None:
            back()
        work = Work(cuda.Enqueued(), outputs)
    if told is not None and not torch.cuda.is_current_stream_capturing():
        senders.stream = stream or torch.cuda.current_stream()
    return work


def on_gpu(gpu: Gpu, ops: list[tuple[bool, Tensor, Any, Any]], async_op: bool) -> Work:
    """Messages of tensors on a GPU, behind what the current stream has."""
    if torch.cuda.current_device() != gpu.device:
        with torch.cuda.device(gpu.device):
            return on_gpu(gpu, ops, async_op)
    for _, tensor, _, _ in ops:
        cuda.one_device(ops[0][1], tensor)
    call, tensors = submission(gpu._comm, ops), [tensor for _, tensor, _, _ in ops]
    senders = _Senders(gpu, ops)
    work = _enqueue(gpu, ops[0][::2] if len(ops) == 1 else None, call, tensors, senders, async_op)
    done: Any = work._done
    done.sources = senders
    return work


def _on_gpu(group: Any, ops: list[tuple[bool, Tensor, Any, Any]], async_op: bool) -> Work:
    gpu = calls.gpu(group, ops[0][1].device)
    return on_gpu(gpu, [(receive, x, peer_of(group, peer), tag) for receive, x, peer, tag in ops], async_op)


def _start(comm: Communicator, ops: list[tuple[bool, Tensor, Any, Any]], async_op: bool) -> Work:
    function, arguments, back = submission(comm, ops)
    return Work(function(comm, *arguments, async_op), [tensor for _, tensor, _, _ in ops], back)


@named("message")
@uncompiled
def message(receive: bool, tensor: Tensor, peer: Any, group: Any, tag: Any, async_op: bool) -> Any:
    name = ("i" if async_op else "") + ("recv" if receive else "send")
    is_tensor(tensor, "tensor")
    if calls._outside(group, name):
        return -1 if receive and not async_op else None
    if cuda.ours(tensor, tensor):
        any_rank = receive and peer is None
        if any_rank and not async_op:
            _outside_graphs(tensor, "recv of a CUDA tensor")
        work = _on_gpu(group, [(receive, tensor, peer, tag)], async_op)
        if async_op or not receive:
            return work if async_op else None
        return _world_rank(group, work.source_rank()) if any_rank else peer
    comm = communicator(group)
    if comm is None or not calls._ours(tensor):
        pg = calls.torchs_group(group, name, calls._many(tensor), [tensor], gpus=False)
        return fallback.in_rows(getattr(dist, name), "w" if receive else "r", (tensor, peer, pg, tag))
    work = _start(comm, [(receive, tensor, peer_of(group, peer), tag)], async_op)
    if async_op:
        return work
    work.wait()
    return _world_rank(group, work.source_rank()) if receive else None


@named("batch_isend_irecv")
@uncompiled
def batch(ops: list[Any]) -> Any:
    group = ops[0].group
    for i, op in enumerate(ops):
        is_tensor(op.tensor, f"p2p_op_list[{i}].tensor")
    if all(cuda.ours(op.tensor, op.tensor) for op in ops):
        return _on_gpu(group, [(op.op.__name__ == "irecv", op.tensor, op.peer, op.tag) for op in ops], True)
    comm = communicator(group)
    if comm is None or not all(calls._ours(op.tensor) for op in ops):
        what, tensors = f" of {ops[0].tensor.device.type} tensors", [op.tensor for op in ops]
        pg = calls.torchs_group(group, "batch_isend_irecv", what, tensors, gpus=False)

        def call(*made: Tensor) -> _TorchBatch:
            theirs = [dist.P2POp(getattr(dist, op.op.__name__), x, op.peer, pg, op.tag) for op, x in zip(ops, made)]
            return _TorchBatch(dist.batch_isend_irecv(theirs))

        return fallback.in_rows(call, "".join("w" if op.op.__name__ == "irecv" else "r" for op in ops), tensors)
    return _start(comm, [(op.op.__name__ == "irecv", op.tensor, peer_of(group, op.peer), op.tag) for op in ops], True)


class _TorchBatch:
    """The transfers that torch makes itself, as one."""

    def __init__(self, work: list[Any]) -> None:
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        for each in self._work:
            each.wait() if timeout is None else each.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(each.is_completed() for each in self._work)


@uncompiled
def move(kind: str, tensor: Tensor, at: Tensor, peer: Any, group: Any, stream: Any) -> None:
    is_tensor(tensor, "tensor")
    is_tensor(at, "at")
    contiguous(tensor, "tensor")
    contiguous(at, "at")
    peer = peer_of(group, peer)
    on_gpu = cuda.ours(tensor, at)
    if not on_gpu and not (calls._ours(tensor) and calls._ours(at)):
        raise errors.Unsupported(f"switchyard: {kind} of {tensor.device} with memory on {at.device}")
    if on_gpu:
        cuda.one_device(tensor, at)
        with cuda.on_stream(stream, tensor, at):
            gpu = calls.gpu(group, tensor.device)
            call = _transfer(gpu._comm, kind, peer, tensor, at)
            gpu._transfer(cuda.raw_stream(gpu.device), call)
        return
    if stream is not None:
        raise errors.InvalidArgument(f"switchyard: stream is {stream!r}: streams are for CUDA tensors")
    comm = calls.here(group)
    comm._transfer(_transfer(comm, kind, peer, tensor, at), (tensor, at))


def _transfer(comm: Communicator, kind: str, peer: Any, tensor: Tensor, at: Tensor) -> array[int]:
    """A put or a get of tensors that are ours."""
    memory = [(x.data_ptr(), x.numel() * x.element_size()) for x in (real(tensor), real(at))]
    call = pairs.transfer(comm, kind, peer, *memory)
    pairs.same_elements(kind, *(str(x.dtype).removeprefix("torch.") for x in (tensor, at)))
    if kind == "get":
        written(tensor)
    return call


@uncompiled
def flag_on_gpu(kind: str, peer: Any, semaphore: Any, group: Any, device: Any, stream: Any) -> None:
    gpu = calls.gpu(group, device)
    call = pairs.semaphore_call(gpu._comm, kind, peer_of(group, peer), semaphore)
    with cuda.on_stream(stream, device=gpu.device):
        gpu._transfer(cuda.raw_stream(gpu.device), call)
