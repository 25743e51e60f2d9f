"""Switchyard inside torch: differentiable calls, operators for the compiler, and a backend of ``torch.distributed``.

- ``all_to_all_single``, ``all_reduce``, ``reduce_scatter_tensor`` and ``all_gather_into_tensor`` of this module return
  their result and have gradients. They are operators ``torch.ops.switchyard.*``, so ``torch.compile`` keeps them in the
  graph.
- ``average_hook`` averages the gradients of ``DistributedDataParallel``.
- ``dist.init_process_group("switchyard")`` makes process groups whose collectives are Switchyard's where it has them, and
  those of gloo (host) and NCCL (CUDA) where not. This module need not be imported for that: torch finds the name.
- ``install()``, or ``python -m switchyard.torch script.py`` (or ``-m module``), puts that backend in the place of gloo and
  NCCL, for scripts that name those.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from . import errors
from ._core.comm import Communicator, default
from ._core.dtypes import OPS
from ._torch import autoload, calls
from ._torch.backend import SwitchyardProcessGroup

__all__ = [
    "SwitchyardProcessGroup",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "average_hook",
    "install",
    "reduce_scatter_tensor",
]


def __dir__() -> list[str]:
    return __all__


# Operators. Groups go by name, as compiled graphs need it.

_named: dict[str, Communicator] = {}


def _name_of(group: Any) -> str:
    """The name by which operators find the group."""
    if group is None:
        pg = c10d.GroupMember.WORLD if dist.is_available() else None
        if pg is None:
            group = default()
        else:
            group = pg
    if isinstance(group, Communicator):
        name = f"switchyard:{group._handle}"
        _named[name] = group
        return name
    return group.group_name


# torch.compiler.assume_constant_result sets this too, but imports the compiler, which takes as long as all else here.
_name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
    calls.all_to_all_single(output, input.contiguous(), output_split_sizes, input_split_sizes, _group(group_name), False)
    return output


@_a2a_op.register_fake
def _(input, output_split_sizes, input_split_sizes, group_name):  # type: ignore[no-untyped-def]
    return input.new_empty((_rows(output_split_sizes, input.shape[0]), *input.shape[1:]))


def _a2a_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.output_splits, ctx.input_splits, ctx.group_name = inputs


def _a2a_backward(ctx: Any, grad: Tensor) -> Any:
    # Rows that came from a rank go back to it.
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
    calls.all_to_all_single(output, input, output_split_sizes, input_split_sizes, _group(group_name), False)


@_a2a_into_op.register_fake
def _(output, input, output_split_sizes, input_split_sizes, group_name):  # type: ignore[no-untyped-def]
    return None


@torch.library.custom_op("switchyard::all_reduce", mutates_args=())
def _reduce_op(input: Tensor, op: str, group_name: str) -> Tensor:
    output = input.clone(memory_format=torch.contiguous_format)
    calls.all_reduce(output, op, _group(group_name), False)
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
    calls.all_reduce(tensor, op, _group(group_name), False)


@_reduce_into_op.register_fake
def _(tensor, op, group_name):  # type: ignore[no-untyped-def]
    return None


@torch.library.custom_op("switchyard::reduce_scatter_tensor", mutates_args=())
def _scatter_op(input: Tensor, op: str, group_name: str) -> Tensor:
    size = _size_of(group_name)
    if input.shape[0] % size:
        raise errors.InvalidArgument(f"switchyard: {input.shape[0]} rows do not divide equally among {size} ranks")
    output = input.new_empty((input.shape[0] // size, *input.shape[1:]))
    calls.reduce_scatter_tensor(output, input.contiguous(), op, _group(group_name), False)
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
    calls.reduce_scatter_tensor(output, input, op, _group(group_name), False)


@_scatter_into_op.register_fake
def _(output, input, op, group_name):  # type: ignore[no-untyped-def]
    return None


@torch.library.custom_op("switchyard::all_gather_into_tensor", mutates_args=())
def _gather_op(input: Tensor, group_name: str) -> Tensor:
    output = input.new_empty((input.shape[0] * _size_of(group_name), *input.shape[1:]))
    calls.all_gather_into_tensor(output, input.contiguous(), _group(group_name), False)
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
    calls.all_gather_into_tensor(output, input, _group(group_name), False)


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


def average_hook(group, bucket):  # type: ignore[no-untyped-def]  # torch wants classes here or nothing, not their names
    """Average the gradients of ``torch.nn.parallel.DistributedDataParallel``: ``model.register_comm_hook(None, average_hook)``,
    where None is the default process group. The reductions of a backward run in its order, next to its later computations.
    Floats of 16 bits are added in float32."""
    gradients = bucket.buffer()
    work = calls.all_reduce(gradients, "avg", group, True)
    return work.get_future().then(lambda done: done.value()[0])


def _is_operator(op: Any) -> bool:
    """Whether reductions by an operator, which may be given by name, are in compiled graphs."""
    return calls.op_name(op) in OPS


def _op(op: Any) -> str:
    name = calls.op_name(op)
    if name not in OPS:
        raise errors.Unsupported(f"switchyard: the operator {op}")
    return name


# In a compiled graph switchyard's own functions are operators that write their output.


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


def install() -> None:
    """Put this backend in the place of gloo and NCCL: process groups that are made of them from here on, or of no backend
    in particular, are Switchyard's. Those of other backends stay what they are."""
    autoload.register()
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
    """Run a script, or a module with -m, with Switchyard in the place of gloo and NCCL."""
    import os
    import runpy

    module = arguments[:1] == ["-m"]
    sys.argv = arguments[module:]
    if not sys.argv or sys.argv[0].startswith("-"):
        usage = "usage: python -m switchyard.torch (script.py | -m module) [arguments], also under torchrun"
        asked = arguments[:1] in (["-h"], ["--help"])
        print(usage, file=sys.stdout if asked else sys.stderr)
        raise SystemExit(0 if asked else 2)
    install()
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))  # as Python has it for scripts
        runpy.run_path(sys.argv[0], run_name="__main__")


autoload.register()

if __name__ == "__main__":
    from switchyard.torch import main as run

    run(sys.argv[1:])
