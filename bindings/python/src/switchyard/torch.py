"""Switchyard inside torch: differentiable calls, operators for the compiler, and a backend of ``torch.distributed``.

- ``all_to_all_single``, ``all_reduce``, ``reduce_scatter_tensor`` and ``all_gather_into_tensor`` of this module return
  their result and have gradients. They are operators ``torch.ops.switchyard.*``, so ``torch.compile`` keeps them in the
  graph.
- ``dist.init_process_group("switchyard")`` makes process groups whose collectives are Switchyard's where it has them, and
  those of gloo (host) and NCCL (CUDA) where not. This module need not be imported for that: torch finds the name.
- ``install()``, or ``python -m switchyard.torch script.py``, puts that backend in the place of gloo and NCCL, for scripts
  that name those.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Optional

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from . import _autoload, _comm, _cuda, _torch, errors
from ._comm import Communicator

__all__ = [
    "SwitchyardProcessGroup",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "install",
    "reduce_scatter_tensor",
]

# Operators. Groups go by name, as compiled graphs need it.

_named: dict[str, Communicator] = {}


@torch._dynamo.assume_constant_result
def _name_of(group: Any) -> str:
    """The name by which operators find the group."""
    if group is None:
        pg = c10d.GroupMember.WORLD if dist.is_available() else None
        if pg is None:
            group = _comm.default()
        else:
            group = pg
    if isinstance(group, Communicator):
        name = f"switchyard:{group._handle}"
        _named[name] = group
        return name
    return group.group_name


def _resolve(name: str) -> Any:
    resolve: Any = c10d._resolve_process_group
    return resolve(name)


def _size_of(name: str) -> int:
    if name.startswith("switchyard:"):
        return _named[name].size
    return _resolve(name).size()


def _group(name: str) -> Any:
    """The group as the functions on tensors take it."""
    return _named[name] if name.startswith("switchyard:") else _resolve(name)


def _rows(sizes: Sequence[int] | None, rows: int) -> int:
    return rows if not sizes else sum(sizes)


@torch.library.custom_op("switchyard::all_to_all_single", mutates_args=())
def _a2a_op(
    input: Tensor,
    output_split_sizes: Optional[Sequence[int]],
    input_split_sizes: Optional[Sequence[int]],
    group_name: str,
) -> Tensor:
    output = input.new_empty((_rows(output_split_sizes, input.shape[0]), *input.shape[1:]))
    _torch.all_to_all_single(output, input.contiguous(), output_split_sizes, input_split_sizes, _group(group_name), False)
    return output


@_a2a_op.register_fake
def _(input, output_split_sizes, input_split_sizes, group_name):  # type: ignore[no-untyped-def]
    return input.new_empty((_rows(output_split_sizes, input.shape[0]), *input.shape[1:]))


def _a2a_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.output_splits, ctx.input_splits, ctx.group_name = inputs


def _a2a_backward(ctx: Any, grad: Tensor) -> Any:
    # What came from a rank goes back to it.
    return _a2a_op(grad.contiguous(), ctx.input_splits, ctx.output_splits, ctx.group_name), None, None, None


_a2a_op.register_autograd(_a2a_backward, setup_context=_a2a_setup)


@torch.library.custom_op("switchyard::all_to_all_single_", mutates_args=("output",))
def _a2a_into_op(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Optional[Sequence[int]],
    input_split_sizes: Optional[Sequence[int]],
    group_name: str,
) -> None:
    _torch.all_to_all_single(output, input, output_split_sizes, input_split_sizes, _group(group_name), False)


@_a2a_into_op.register_fake
def _(output, input, output_split_sizes, input_split_sizes, group_name):  # type: ignore[no-untyped-def]
    return None


@torch.library.custom_op("switchyard::all_reduce", mutates_args=())
def _reduce_op(input: Tensor, op: str, group_name: str) -> Tensor:
    output = input.clone(memory_format=torch.contiguous_format)
    _torch.all_reduce(output, op, _group(group_name), False)
    return output


@_reduce_op.register_fake
def _(input, op, group_name):  # type: ignore[no-untyped-def]
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _linear(op: str) -> None:
    if op not in ("sum", "avg"):
        raise errors.Unsupported(f"switchyard: {op} has no gradient here; sum and avg have")


def _reduce_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.op, ctx.group_name = inputs


def _reduce_backward(ctx: Any, grad: Tensor) -> Any:
    _linear(ctx.op)
    return _reduce_op(grad.contiguous(), ctx.op, ctx.group_name), None, None


_reduce_op.register_autograd(_reduce_backward, setup_context=_reduce_setup)


@torch.library.custom_op("switchyard::all_reduce_", mutates_args=("tensor",))
def _reduce_into_op(tensor: Tensor, op: str, group_name: str) -> None:
    _torch.all_reduce(tensor, op, _group(group_name), False)


@_reduce_into_op.register_fake
def _(tensor, op, group_name):  # type: ignore[no-untyped-def]
    return None


@torch.library.custom_op("switchyard::reduce_scatter_tensor", mutates_args=())
def _scatter_op(input: Tensor, op: str, group_name: str) -> Tensor:
    size = _size_of(group_name)
    if input.shape[0] % size:
        raise errors.InvalidArgument(f"switchyard: {input.shape[0]} rows do not divide equally among {size} ranks")
    output = input.new_empty((input.shape[0] // size, *input.shape[1:]))
    _torch.reduce_scatter_tensor(output, input.contiguous(), op, _group(group_name), False)
    return output


@_scatter_op.register_fake
def _(input, op, group_name):  # type: ignore[no-untyped-def]
    return input.new_empty((input.shape[0] // _size_of(group_name), *input.shape[1:]))


def _scatter_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.op, ctx.group_name = inputs


def _scatter_backward(ctx: Any, grad: Tensor) -> Any:
    _linear(ctx.op)
    back = _gather_op(grad.contiguous(), ctx.group_name)
    return back / _size_of(ctx.group_name) if ctx.op == "avg" else back, None, None


_scatter_op.register_autograd(_scatter_backward, setup_context=_scatter_setup)


@torch.library.custom_op("switchyard::reduce_scatter_tensor_", mutates_args=("output",))
def _scatter_into_op(output: Tensor, input: Tensor, op: str, group_name: str) -> None:
    _torch.reduce_scatter_tensor(output, input, op, _group(group_name), False)


@_scatter_into_op.register_fake
def _(output, input, op, group_name):  # type: ignore[no-untyped-def]
    return None


@torch.library.custom_op("switchyard::all_gather_into_tensor", mutates_args=())
def _gather_op(input: Tensor, group_name: str) -> Tensor:
    output = input.new_empty((input.shape[0] * _size_of(group_name), *input.shape[1:]))
    _torch.all_gather_into_tensor(output, input.contiguous(), _group(group_name), False)
    return output


@_gather_op.register_fake
def _(input, group_name):  # type: ignore[no-untyped-def]
    return input.new_empty((input.shape[0] * _size_of(group_name), *input.shape[1:]))


def _gather_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.group_name = inputs


def _gather_backward(ctx: Any, grad: Tensor) -> Any:
    return _scatter_op(grad.contiguous(), "sum", ctx.group_name), None


_gather_op.register_autograd(_gather_backward, setup_context=_gather_setup)


@torch.library.custom_op("switchyard::all_gather_into_tensor_", mutates_args=("output",))
def _gather_into_op(output: Tensor, input: Tensor, group_name: str) -> None:
    _torch.all_gather_into_tensor(output, input, _group(group_name), False)


@_gather_into_op.register_fake
def _(output, input, group_name):  # type: ignore[no-untyped-def]
    return None


# The functions that users call


def all_to_all_single(
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
) -> Tensor:
    """Send ``input_split_sizes[k]`` rows to rank k and return what arrives, ``output_split_sizes[k]`` rows from rank k.

    Its gradient is the exchange the other way round. ``None`` divides the rows equally.
    """
    return _a2a_op(input, output_split_sizes, input_split_sizes, _name_of(group))


def all_reduce(input: Tensor, op: Any = "sum", group: Any = None) -> Tensor:
    """Return the ranks' tensors combined. The gradient of sums and averages is the same reduction of the gradients."""
    return _reduce_op(input, _op(op), _name_of(group))


def reduce_scatter_tensor(input: Tensor, op: Any = "sum", group: Any = None) -> Tensor:
    """Return this rank's slice of the ranks' tensors combined. Its gradient gathers the slices' gradients."""
    return _scatter_op(input, _op(op), _name_of(group))


def all_gather_into_tensor(input: Tensor, group: Any = None) -> Tensor:
    """Return the ranks' tensors one after the other. Its gradient is summed over the ranks."""
    return _gather_op(input, _name_of(group))


def _op(op: Any) -> str:
    name = _torch.op_name(op)
    if name not in _comm.OPS:
        raise errors.Unsupported(f"switchyard: the operator {op}")
    return name


# What switchyard's own functions are in a compiled graph: operators that write their output.


class _Complete:
    """The work of a call in a compiled graph, which knows the order itself."""

    def wait(self, timeout: object = None) -> bool:
        return True


def _complete(async_op: bool) -> _Complete | None:
    return _Complete() if async_op else None


def _compiled_all_to_all(output, input, output_splits, input_splits, group, async_op):  # type: ignore[no-untyped-def]
    torch.ops.switchyard.all_to_all_single_(output, input, output_splits, input_splits, _name_of(group))
    return _complete(async_op)


def _compiled_all_reduce(tensor, op, group, async_op):  # type: ignore[no-untyped-def]
    torch.ops.switchyard.all_reduce_(tensor, _op(op), _name_of(group))
    return _complete(async_op)


def _compiled_reduce_scatter(output, input, op, group, async_op):  # type: ignore[no-untyped-def]
    torch.ops.switchyard.reduce_scatter_tensor_(output, input, _op(op), _name_of(group))
    return _complete(async_op)


def _compiled_all_gather(output, input, group, async_op):  # type: ignore[no-untyped-def]
    torch.ops.switchyard.all_gather_into_tensor_(output, input, _name_of(group))
    return _complete(async_op)


# The backend


class SwitchyardProcessGroup(dist.ProcessGroup):
    """A process group whose collectives are Switchyard's where it has them: all_to_all_single, and on host tensors more.

    Everything else goes to the groups it wraps: gloo for host tensors and, where torch can use GPUs, NCCL for CUDA
    tensors. The ranks of Switchyard meet at the first collective that needs it.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, options: Any = None) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._wrapped = dist.ProcessGroup(store, rank, size)
        self._store, self._limit = store, timeout
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout=timeout)
        gloo._set_sequence_number_for_group()
        self._backends: list[Any] = [gloo]
        for pg in (self, self._wrapped):
            pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            pg._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        if torch.cuda.is_available() and dist.is_nccl_available():
            settings = options if isinstance(options, dist.ProcessGroupNCCL.Options) else dist.ProcessGroupNCCL.Options()
            settings._timeout = timeout
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), rank, size, settings)
            nccl._set_sequence_number_for_group()
            self._backends.append(nccl)
            for pg in (self, self._wrapped):
                pg._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)

    def getBackendName(self) -> str:
        return "switchyard"

    def _communicator(self) -> Communicator | None:
        known = _torch._groups.get(id(self))
        if known is not None and known[0]() is self:
            return known[1]
        with _torch._meeting:
            return _torch.meet(self, self._store, self.rank(), self.size(), self._limit, self.group_name)

    def _mine(self, *tensors: Tensor) -> Communicator | None:
        """The communicator if it can work on these tensors."""
        return self._communicator() if all(map(_torch._ours, tensors)) else None

    def alltoall_base(  # type: ignore[no-untyped-def]
        self, output, input, output_split_sizes, input_split_sizes, opts=None
    ):
        opts = opts or dist.AllToAllOptions()
        if _cuda.ours(output, input):
            return self._alltoall_cuda(output, input, output_split_sizes or None, input_split_sizes or None, opts)
        comm = self._mine(output, input) if output.dtype is input.dtype else None
        if comm is None:
            return self._wrapped.alltoall_base(output, input, output_split_sizes, input_split_sizes, opts)
        ticket = _torch.exchange(comm, output, input, output_split_sizes, input_split_sizes, True)
        return _torch.Work(ticket, [output])

    def _alltoall_cuda(self, output, input, output_splits, input_splits, opts):  # type: ignore[no-untyped-def]
        comm = self._communicator()
        gpu = None if comm is None else _cuda.gpu_of(comm, self._wrapped, input.get_device())
        if gpu is None:
            return self._wrapped.alltoall_base(output, input, output_splits or [], input_splits or [], opts)
        if getattr(opts, "asyncOp", True):
            return _cuda.start(gpu, output, input, output_splits, input_splits)
        _cuda.exchange(gpu, output, input, output_splits, input_splits)
        return _cuda.Enqueued([output])

    def alltoall(self, outputs, inputs, opts=None):  # type: ignore[no-untyped-def]
        """all_to_all of lists, which gloo does not have: through two tensors."""
        comm = self._mine(*outputs, *inputs)
        if comm is None or not all(x.is_contiguous() for x in (*outputs, *inputs)):
            return self._wrapped.alltoall(outputs, inputs, opts or dist.AllToAllOptions())
        if len(outputs) != comm.size or len(inputs) != comm.size:
            raise errors.InvalidArgument(f"switchyard: {len(outputs)} and {len(inputs)} tensors for {comm.size} ranks")
        source = torch.cat([_bytes(x) for x in inputs])
        target = source.new_empty(sum(map(_nbytes, outputs)))
        ticket = _torch.exchange(comm, target, source, [*map(_nbytes, outputs)], [*map(_nbytes, inputs)], True)

        def back() -> None:
            at = 0
            for x in outputs:
                _bytes(x).copy_(target[at : at + _nbytes(x)])
                at += _nbytes(x)

        return _torch.Work(ticket, outputs, back)

    def allreduce(self, tensors, opts=None):  # type: ignore[no-untyped-def]
        opts = opts or dist.AllreduceOptions()
        work = self._reduce(tensors, opts) if len(tensors) == 1 else None
        return work or self._wrapped.allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors, opts=None):  # type: ignore[no-untyped-def]
        opts = opts or dist.AllreduceCoalescedOptions()
        if all(self._reducible(t, opts) for t in tensors):
            return _all([self._reduce([t], opts) for t in tensors], tensors)
        return self._wrapped.allreduce_coalesced(tensors, opts)

    def _reducible(self, x: Tensor, opts: Any) -> bool:
        if not _torch._ours(x) or x.is_complex() or x.is_neg() or not _torch._dense(x):
            return False
        return _torch._KINDS.get((x.dtype, _torch.op_name(opts.reduceOp))) is not None

    def _reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        (x,) = tensors
        comm = self._communicator() if self._reducible(x, opts) else None
        if comm is None:
            return None
        kind = _torch._KINDS[x.dtype, _torch.op_name(opts.reduceOp)]
        assert kind is not None
        ticket = _torch.reduce(comm, x, x, kind, True)
        assert ticket is not None
        return _torch.Work(ticket, list(tensors))

    def _allgather_base(self, output, input, opts=None):  # type: ignore[no-untyped-def]
        comm = self._mine(output, input)
        if comm is None:
            return self._wrapped._allgather_base(output, input, opts or dist.AllgatherOptions())
        return _torch.Work(_torch.gather(comm, output, input, True), [output])

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):  # type: ignore[no-untyped-def]
        if not all(map(_torch._ours, (*outputs, *inputs))) or self._communicator() is None:
            return self._wrapped.allgather_into_tensor_coalesced(outputs, inputs, opts or dist.AllgatherOptions())
        return _all([self._allgather_base(o, i) for o, i in zip(outputs, inputs)], outputs)

    def _reduce_scatter_base(self, output, input, opts=None):  # type: ignore[no-untyped-def]
        opts = opts or dist.ReduceScatterOptions()
        comm = self._mine(output, input)
        kind = _torch._KINDS.get((input.dtype, _torch.op_name(opts.reduceOp)))
        if comm is None or kind is None:
            return self._wrapped._reduce_scatter_base(output, input, opts)
        return _torch.Work(_torch.scatter(comm, output, input, kind, True), [output])

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):  # type: ignore[no-untyped-def]
        opts = opts or dist.ReduceScatterOptions()
        known = all((x.dtype, _torch.op_name(opts.reduceOp)) in _torch._KINDS for x in inputs)
        if not known or not all(map(_torch._ours, (*outputs, *inputs))) or self._communicator() is None:
            return self._wrapped.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        return _all([self._reduce_scatter_base(o, i, opts) for o, i in zip(outputs, inputs)], outputs)

    def barrier(self, opts=None):  # type: ignore[no-untyped-def]
        opts = opts or dist.BarrierOptions()
        comm = None if opts.device_ids else self._communicator()
        if comm is None:
            return self._wrapped.barrier(opts)
        _torch.settle()
        ticket = comm.barrier(True)
        assert ticket is not None
        return _torch.Work(ticket, [])

    def shutdown(self) -> None:
        """Leave the group."""
        _torch.forget(self)
        for backend in self._backends:
            backend.shutdown()

    def abort(self) -> None:
        """Fail the group on all ranks."""
        comm = (_torch._groups.get(id(self)) or (None, None))[1]
        if comm is not None:
            comm.abort("the process group was aborted")
        for backend in self._backends:
            backend.abort()

    # What Switchyard does not have. torch calls these from C++ too, where a group of Python's has to name them.

    def broadcast(self, tensors, opts=None):  # type: ignore[no-untyped-def]
        return self._wrapped.broadcast(tensors, opts or dist.BroadcastOptions())

    def allgather(self, outputs, inputs, opts=None):  # type: ignore[no-untyped-def]
        return self._wrapped.allgather(outputs, inputs, opts or dist.AllgatherOptions())

    def reduce_scatter(self, outputs, inputs, opts=None):  # type: ignore[no-untyped-def]
        return self._wrapped.reduce_scatter(outputs, inputs, opts or dist.ReduceScatterOptions())

    def send(self, tensors, dst, tag=0):  # type: ignore[no-untyped-def]
        return self._wrapped.send(tensors, dst, tag)

    def recv(self, tensors, src, tag=0):  # type: ignore[no-untyped-def]
        return self._wrapped.recv(tensors, src, tag)


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.detach().reshape(-1).view(torch.uint8)


class _AllWork(dist.Work):
    """Several pieces of work as one."""

    def __init__(self, parts: list[Any], outputs: list[Tensor]) -> None:
        super().__init__()
        self._parts, self._outputs = parts, outputs

    def wait(self, timeout: Any = None) -> bool:
        return all(part.wait() for part in self._parts)

    def is_completed(self) -> bool:
        return all(part.is_completed() for part in self._parts)

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> Any:
        whole: Any = torch.futures.collect_all([part.get_future() for part in self._parts])
        return whole.then(lambda _: self._outputs)


def _all(parts: list[Any], outputs: list[Tensor]) -> Any:
    return parts[0] if len(parts) == 1 else _AllWork(parts, outputs)


def process_group(options: Any, backend_options: Any = None) -> SwitchyardProcessGroup:
    """What torch calls to make a process group of the backend "switchyard"."""
    pg = SwitchyardProcessGroup(options.store, options.group_rank, options.group_size, options.timeout, backend_options)
    pg._set_group_name(options.group_id)
    return pg


def install() -> None:
    """Put this backend in the place of gloo and NCCL: process groups that are made of them from here on, or of no backend
    in particular, are Switchyard's. Those of other backends stay what they are."""
    _autoload.register()
    for name in ("init_process_group", "new_group"):
        function = getattr(c10d, name)
        if not hasattr(function, "_switchyard"):
            replaced = _with_backend(function)
            setattr(c10d, name, replaced)
            setattr(dist, name, replaced)


def _with_backend(function: Callable[..., Any]) -> Callable[..., Any]:
    import functools
    import inspect

    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        backend = bound.arguments.get("backend")
        makes_world = function.__name__ == "init_process_group"
        if (backend is None and makes_world) or str(backend).lower() in (
            "gloo", "nccl", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo",
        ):  # fmt: skip
            bound.arguments["backend"] = "switchyard"
        return function(*bound.args, **bound.kwargs)

    call._switchyard = True  # type: ignore[attr-defined]
    return call


def main(arguments: list[str]) -> None:
    """Run a script with Switchyard in the place of gloo and NCCL."""
    import runpy

    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m switchyard.torch script.py [arguments], also under torchrun", file=sys.stderr)
        raise SystemExit(0 if arguments else 2)
    install()
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


_autoload.register()

if __name__ == "__main__":
    from switchyard.torch import main as run

    run(sys.argv[1:])
