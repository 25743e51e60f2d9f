"""The collectives on torch tensors. Imported only where torch is."""

from __future__ import annotations

import threading
import warnings
import weakref
from array import array
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from . import _comm, _cuda, errors
from ._comm import Communicator, Ticket
from ._splits import common, splits
from ._tensors import PLAIN, contiguous, is_tensor, real, same_dtype

_float8 = {name: kind for name in ("float8_e4m3fn", "float8_e5m2") if (kind := getattr(torch, name, None)) is not None}

#: torch's data types by the name that reductions know them by.
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    **{kind: name for name, kind in _float8.items()},
}

_OP_NAMES = ("sum", "avg", "min", "max", "prod")
_OPS: dict[Any, str] = {}
if dist.is_available():
    _OPS = dict(
        zip(
            (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT),
            _OP_NAMES,
        )
    )

_KINDS: dict[tuple[torch.dtype, str], tuple[int, int] | None] = {
    (dtype, op): _comm.reduction(name, op) for dtype, name in DTYPE_NAMES.items() for op in _OP_NAMES
}


def op_name(op: Any) -> str:
    """The operator's name, empty for those that Switchyard does not have."""
    if isinstance(op, str):
        return op.lower()
    try:
        return _OPS[op]
    except (KeyError, TypeError):  # what torch's options hold is equal to the operator, but has another hash or none
        return next((name for known, name in _OPS.items() if op == known), "")


compiling = torch.compiler.is_compiling

# Groups

_groups: dict[int, tuple[weakref.ref[Any], Communicator | None]] = {}
_meeting = threading.RLock()


def resolve(group: Any) -> tuple[Communicator | None, Any]:
    """The communicator of a group, and its process group. The first call for a process group is collective: its ranks
    meet through its own store. Without a communicator the process group has to do the work."""
    if group is None:
        pg = c10d.GroupMember.WORLD if dist.is_available() else None
        if pg is None:
            return _comm.default(), None
    elif isinstance(group, Communicator):
        return group, None
    else:
        pg = group
    known = _groups.get(id(pg))
    if known is not None and known[0]() is pg:
        return known[1], pg
    return _meet(pg), pg


def communicator(group: Any) -> Communicator | None:
    """The communicator of a group, None where its ranks cannot have one."""
    return resolve(group)[0]


def _meet(pg: Any) -> Communicator | None:
    if not isinstance(pg, dist.ProcessGroup):
        raise errors.InvalidType(
            f"switchyard: group is a {type(pg).__name__}, want a ProcessGroup or a switchyard.Communicator"
        )
    with _meeting:
        known = _groups.get(id(pg))
        if known is not None and known[0]() is pg:
            return known[1]
        _, store = c10d._world.pg_map[pg]
        return meet(pg, store, pg.rank(), pg.size(), _timeout(pg), c10d._world.pg_names.get(pg, ""))


def meet(pg: Any, store: Any, rank: int, size: int, timeout: timedelta | None, name: str) -> Communicator | None:
    """Make the communicator of a process group with its store. Collective."""
    turn = store.add(f"switchyard/joins/{rank}", 1)  # every rank's own count, so that each join has its own keys

    def key(r: int) -> str:
        return f"switchyard/{turn}/{r}"

    def get(r: int) -> bytes | None:
        return bytes(store.get(key(r))) if store.check([key(r)]) else None

    options: dict[str, Any] = {}
    if timeout is not None:
        options = {"TimeoutSeconds": timeout.total_seconds(), "JoinSeconds": min(timeout.total_seconds(), 600.0)}
    comm = Communicator.meet(rank, size, lambda r, card: store.set(key(r), card), get, options, name or "torch")
    if comm is None and rank == 0:
        warnings.warn(f"switchyard: the ranks of group {name!r} are not on one host: its calls go to torch", stacklevel=4)
    remember(pg, comm)
    return comm


def remember(pg: Any, comm: Communicator | None) -> None:
    """Tie a communicator to a process group, for as long as that lives."""
    number = id(pg)

    def gone(_: object) -> None:
        known = _groups.pop(number, None)
        if known is not None and known[1] is not None:
            known[1].abandon()

    _groups[number] = (weakref.ref(pg, gone), comm)


def forget(pg: Any) -> None:
    """End a process group's communicator before its time."""
    known = _groups.pop(id(pg), None)
    if known is not None and known[1] is not None:
        known[1].abandon()


def _timeout(pg: Any) -> timedelta | None:
    """How long the group's operations may take."""
    for device in ("cpu", "cuda"):
        try:
            return pg._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return c10d.default_pg_timeout


# Work

_base: Any = dist.Work if dist.is_available() else object


class Work(_base):
    """An operation on torch tensors that runs behind the caller's back. It is a ``torch.distributed.Work``."""

    def __init__(self, ticket: Ticket, outputs: list[Tensor], back: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._ticket, self._outputs = ticket, outputs
        self._future: Any = None
        self._back, self._once = back, threading.Lock()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until the operation is complete and raise its error. It may be called again, from any thread."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if seconds is not None and seconds <= 0:
            seconds = None
        if not self._ticket.wait(seconds):
            raise errors.TimedOut(f"switchyard: Operation timed out: not complete after {seconds} s; it goes on")
        if self._back is not None:
            with self._once:
                if self._back is not None:
                    self._back()
                    self._back = None
        return True

    def synchronize(self) -> None:
        """Order what comes after behind the operation; on the host this is ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation has run, well or not."""
        return self._ticket.poll()

    def is_success(self) -> bool:
        """Whether the operation has run well."""
        return self._ticket.poll() and self._ticket.error is None

    def exception(self) -> BaseException | None:
        """The operation's error once it has run."""
        return self._ticket.error if self._ticket.poll() else None

    def result(self) -> list[Tensor]:
        """The outputs."""
        return self._outputs

    def source_rank(self) -> int:
        """Collectives have no source."""
        raise errors.Unsupported("switchyard: sourceRank() may only be called on work objects of a receive from any source")

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of the outputs. A thread of the communicator completes it."""
        with self._once:
            if self._future is None:
                self._future = torch.futures.Future()
                _completer(self._ticket.comm).add(self)
        return self._future


class _Completer:
    """Completes the futures of a communicator's work in order, on a thread of its own."""

    def __init__(self) -> None:
        self._work: list[Work] = []
        self._more = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, work: Work) -> None:
        with self._more:
            self._work.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="switchyard-futures", daemon=True)
                self._thread.start()
            self._more.notify()

    def _run(self) -> None:
        while True:
            with self._more:
                if not self._work and not self._more.wait_for(lambda: self._work, timeout=10):
                    self._thread = None
                    return
                work = self._work.pop(0)
            try:
                work.wait()
            except Exception as err:
                work._future.set_exception(err)
            else:
                work._future.set_result(work._outputs)


_completers: weakref.WeakKeyDictionary[Communicator, _Completer] = weakref.WeakKeyDictionary()


def _completer(comm: Communicator) -> _Completer:
    with _meeting:
        found = _completers.get(comm)
        if found is None:
            found = _completers[comm] = _Completer()
        return found


# Tensors

def _ours(x: Tensor) -> bool:
    """Whether the tensor's memory is the host's, and really there."""
    return x.is_cpu and x.layout is torch.strided and type(x) in PLAIN


def _outside(group: Any, name: str) -> bool:
    """Whether this rank is no member of the group, which gets a warning as torch gives it."""
    if group is not None and dist.is_available() and group is c10d.GroupMember.NON_GROUP_MEMBER:
        c10d._warn_not_in_group(name)
        return True
    return False


def _coalescing(pg: Any) -> bool:
    return pg is not None and bool(c10d._world.pg_coalesce_state)


def _no_group(what: str) -> errors.Error:
    return errors.Unsupported(
        f"switchyard: {what}: Switchyard does not do that, and there is no process group whose backend could"
    )


def _done(ticket: Ticket | None, output: Tensor, async_op: bool) -> Work | None:
    return Work(ticket, [output]) if ticket is not None and async_op else None


def all_to_all_single(
    output: Tensor, input: Tensor, output_split_sizes: Any, input_split_sizes: Any, group: Any, async_op: bool
) -> Any:
    if group is not None and _outside(group, "all_to_all_single"):
        return None
    if _cuda.ours(output, input):
        comm, pg = resolve(group)
        gpu = None
        if comm is not None:
            device = input.get_device()
            gpu = comm._gpus.get(device) or _cuda.gpu_of(comm, pg, device)
        if gpu is None:
            return dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, pg, async_op)
        if async_op:
            return _cuda.start(gpu, output, input, output_split_sizes, input_split_sizes)
        _cuda.exchange(gpu, output, input, output_split_sizes, input_split_sizes)
        return None
    is_tensor(output, "output")
    is_tensor(input, "input")
    if input.is_cuda is not output.is_cuda:
        raise errors.InvalidArgument(f"switchyard: output is on {output.device}, input on {input.device}")
    same_dtype(output, input)
    comm, pg = resolve(group)
    if comm is None or not (_ours(output) and _ours(input)):
        if pg is None:
            raise _no_group(f"all_to_all_single of {input.layout} {input.device.type} tensors")
        return dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, pg, async_op)
    ticket = exchange(comm, output, input, output_split_sizes, input_split_sizes, async_op)
    return _done(ticket, output, async_op)


def exchange(
    comm: Communicator, output: Tensor, input: Tensor, output_split_sizes: Any, input_split_sizes: Any, async_op: bool
) -> Ticket | None:
    """all_to_all_single of tensors that are ours."""
    if input.is_complex() or input.is_neg() or output.is_neg():
        input, output = real(input), real(output)
    if not (input.is_contiguous() and output.is_contiguous()):
        contiguous(input, "input")
        contiguous(output, "output")
    out_shape, in_shape = output.shape, input.shape
    if not out_shape or not in_shape:
        raise errors.InvalidArgument("switchyard: a tensor without dimensions cannot be split")
    size, item = comm.size, input.element_size()
    out_bytes, in_bytes = output.numel() * item, input.numel() * item
    send: array[int] | None
    recv: array[int] | None
    if output_split_sizes is None and input_split_sizes is None and not (in_shape[0] % size or out_shape[0] % size):
        send = recv = None
        elem = item
    else:
        send = splits(input_split_sizes, in_shape[0], size)
        recv = splits(output_split_sizes, out_shape[0], size)
        send, recv, elem = common(
            send, in_bytes // in_shape[0] if in_bytes else 0, recv, out_bytes // out_shape[0] if out_bytes else 0
        )
    return comm.all_to_all(
        output.data_ptr(),
        out_bytes,
        input.data_ptr(),
        in_bytes,
        send,
        recv,
        elem,
        (output, input),
        async_op,
    )


def _dense(x: Tensor) -> bool:
    """Whether the tensor's elements fill one stretch of memory, in whatever order."""
    if x.is_contiguous() or x.numel() == 0:
        return True
    step = 1
    for stride, n in sorted((stride, n) for stride, n in zip(x.stride(), x.shape) if n != 1):
        if stride != step:
            return False
        step *= n
    return True


def all_reduce(tensor: Tensor, op: Any, group: Any, async_op: bool) -> Any:
    is_tensor(tensor, "tensor")
    if _outside(group, "all_reduce"):
        return None
    comm, pg = resolve(group)
    if comm is None or not _ours(tensor) or _coalescing(pg):
        if pg is None:
            raise _no_group(f"all_reduce of {tensor.layout} {tensor.device.type} tensors")
        return dist.all_reduce(tensor, _torch_op(op), pg, async_op)
    how = op_name(op)
    if tensor.is_complex() and how not in ("sum", "avg"):
        raise ValueError(f"all_reduce does not support {op} on complex tensors")
    x = real(tensor)
    kind = _KINDS.get((x.dtype, how))
    if kind is None:
        if pg is None:
            raise _no_group(f"all_reduce ({op}) of {tensor.dtype}")
        return dist.all_reduce(tensor, _torch_op(op), pg, async_op)
    if not _dense(x):
        contiguous(x, "tensor")
    return _done(reduce(comm, x, x, kind, async_op), tensor, async_op)


def reduce(comm: Communicator, output: Tensor, input: Tensor, kind: tuple[int, int], async_op: bool) -> Ticket | None:
    """all_reduce of tensors that are ours and alike."""
    return comm.all_reduce(
        output.data_ptr(),
        input.data_ptr(),
        input.numel() * input.element_size(),
        kind[0],
        kind[1],
        (output, input),
        async_op,
    )


def _torch_op(op: Any) -> Any:
    """An operator that may be given by name as torch has it."""
    if isinstance(op, str):
        return {name: value for value, name in _OPS.items()}[op.lower()]
    return op


def reduce_scatter_tensor(output: Tensor, input: Tensor, op: Any, group: Any, async_op: bool) -> Any:
    is_tensor(output, "output")
    is_tensor(input, "input")
    if _outside(group, "reduce_scatter_tensor"):
        return None
    comm, pg = resolve(group)
    how = op_name(op)
    kind = _KINDS.get((torch.view_as_real(input).dtype if input.is_complex() else input.dtype, how))
    if input.is_complex() and how not in ("sum", "avg"):
        kind = None
    if comm is None or kind is None or not (_ours(output) and _ours(input)) or _coalescing(pg):
        if pg is None:
            raise _no_group(f"reduce_scatter_tensor ({op}) of {input.dtype} {input.device.type} tensors")
        return dist.reduce_scatter_tensor(output, input, _torch_op(op), pg, async_op)
    return _done(scatter(comm, output, input, kind, async_op), output, async_op)


def scatter(comm: Communicator, output: Tensor, input: Tensor, kind: tuple[int, int], async_op: bool) -> Ticket | None:
    """reduce_scatter_tensor of tensors that are ours."""
    if output.dtype is not input.dtype:
        raise errors.InvalidType(f"input tensor must be the same type as the output tensor ({input.dtype} and {output.dtype})")
    output, input = real(output), real(input)
    contiguous(output, "output")
    contiguous(input, "input")
    out_bytes, in_bytes = output.numel() * output.element_size(), input.numel() * input.element_size()
    if out_bytes * comm.size != in_bytes:
        raise errors.InvalidArgument(
            "input tensor must be the same size as output size times world size "
            f"({input.numel()} elements, {comm.size} times {output.numel()})"
        )
    return comm.reduce_scatter(
        output.data_ptr(), out_bytes, input.data_ptr(), in_bytes, kind[0], kind[1], (output, input), async_op
    )


def all_gather_into_tensor(output: Tensor, input: Tensor, group: Any, async_op: bool) -> Any:
    is_tensor(input, "input_tensor")
    is_tensor(output, "output_tensor")
    if _outside(group, "all_gather_into_tensor"):
        return None
    comm, pg = resolve(group)
    if comm is None or not (_ours(output) and _ours(input)) or _coalescing(pg):
        if pg is None:
            raise _no_group(f"all_gather_into_tensor of {input.layout} {input.device.type} tensors")
        return dist.all_gather_into_tensor(output, input, pg, async_op)
    return _done(gather(comm, output, input, async_op), output, async_op)


def gather(comm: Communicator, output: Tensor, input: Tensor, async_op: bool) -> Ticket | None:
    """all_gather_into_tensor of tensors that are ours."""
    if output.dtype is not input.dtype:
        raise errors.InvalidType(f"output tensor must have the same type as input tensor ({output.dtype} and {input.dtype})")
    output, input = real(output), real(input)
    contiguous(output, "output_tensor")
    contiguous(input, "input_tensor")
    out_bytes, in_bytes = output.numel() * output.element_size(), input.numel() * input.element_size()
    if in_bytes * comm.size != out_bytes:
        raise errors.InvalidArgument(
            "output tensor size must be equal to world_size times input tensor size "
            f"({output.numel()} elements, {comm.size} times {input.numel()})"
        )
    return comm.all_gather(output.data_ptr(), out_bytes, input.data_ptr(), in_bytes, (output, input), async_op)


def barrier(group: Any, async_op: bool, device_ids: Any = None) -> Any:
    if _outside(group, "barrier"):
        return None
    comm, pg = resolve(group)
    if comm is None or device_ids is not None:
        return dist.barrier(pg, async_op, device_ids)
    settle()
    ticket = comm.barrier(async_op)
    return Work(ticket, []) if ticket is not None else None


def settle() -> None:
    """Wait for the current stream where torch uses a GPU: NCCL's barrier is behind it too."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def gpu(group: Any, device: Any) -> _comm.Gpu:
    """The end of a group's communicator on a CUDA device."""
    comm, _ = resolve(group)
    if comm is None:
        raise errors.Unsupported("switchyard: the ranks of this group are not on one host")
    return comm.gpu(_cuda.index_of(device))


# Symmetric tensors


def tensor_of(block: _comm.Block, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor on symmetric memory, which it holds."""
    if block.size == 0:
        return torch.empty(shape, dtype=dtype)
    return tensor_at(block.memory(), shape, dtype)


def tensor_at(memory: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype).view(shape)
