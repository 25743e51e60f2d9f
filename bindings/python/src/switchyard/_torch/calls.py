"""The collectives on torch tensors. Imported only where torch is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from .. import errors
from .._core.arguments import type_of
from .._core.comm import Communicator
from .._core.dtypes import reduction
from .._core.places import Gpu
from .._core.splits import Shapes
from . import cuda, fallback, operators
from .compiler import uncompiled
from .groups import Submission, communicator, find, group_of, process_group
from .profile import profiled, span
from .tensors import PLAIN, into, is_tensor, readable, real, same_dtype, splittable, writable, written
from .work import Work

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
    (dtype, op): reduction(name, op) for dtype, name in DTYPE_NAMES.items() for op in _OP_NAMES
}

#: Types that gloo reduces as little as Switchyard does.
_NOT_GLOOS = frozenset((torch.int16, torch.uint16, torch.uint32, torch.uint64))

#: Names that torch has and Switchyard has not.
_TORCHS = {
    name: getattr(dist.ReduceOp, name.upper()) for name in ("band", "bor", "bxor") if dist.is_available()
}


def op_name(op: Any) -> str:
    """The operator's name, empty for those that only torch has."""
    if isinstance(op, str):
        name = op.lower()
        if name not in _OP_NAMES and name not in _TORCHS:
            raise errors.InvalidArgument(f"switchyard: op is {op!r}, want one of {', '.join((*_OP_NAMES, *_TORCHS))}")
        return name if name in _OP_NAMES else ""
    try:
        return _OPS[getattr(op, "op", op)]  # torch's options hold an operator in an object
    except (KeyError, TypeError):  # which is equal to the operator, but has another hash or none
        name = next((name for known, name in _OPS.items() if op == known), "")
    if not name and not isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        raise errors.InvalidType(f"switchyard: op is {type_of(op)}, want a torch.distributed.ReduceOp or a name")
    return name


def _torch_op(op: Any) -> Any:
    """An operator that may be given by name as torch has it."""
    if isinstance(op, str):
        return _TORCHS.get(op.lower()) or {name: value for value, name in _OPS.items()}[op.lower()]
    return op


compiling = torch.compiler.is_compiling

# Tensors

def _ours(x: Tensor) -> bool:
    """Whether the tensor's memory is the host's, and really there."""
    return x.is_cpu and x.layout is torch.strided and type(x) in PLAIN


def hint_gradient(call: str, x: Tensor) -> None:
    """Warn of a call that has no gradient where its input needs one. torch's own call is silent there."""
    if x.requires_grad and torch.is_grad_enabled():
        text = f"switchyard.{call} has no gradient, and its input needs one: use switchyard.torch.{call}, or detach() the input"
        warnings.warn(text, stacklevel=4)


def _outside(group: Any, name: str) -> bool:
    """Whether this rank is no member of the group, which gets a warning as torch gives it."""
    if group is not None and dist.is_available() and group is c10d.GroupMember.NON_GROUP_MEMBER:
        c10d._warn_not_in_group(name)
        return True
    return False


def _coalescing(pg: Any) -> bool:
    return pg is not None and bool(c10d._world.pg_coalesce_state)


def _operators(group: Any, x: Tensor) -> operators.Exchanges | None:
    """The calls of a group that are operators, on the device of a tensor."""
    comm = None if profiled() else find(group)[0]
    if comm is None:
        return None
    made: operators.Exchanges | None = comm._exchanges.get(x.get_device()) or operators.exchanges(comm, x.get_device())
    return made


def soonest(
    group: Any, output: Tensor, input: Tensor, async_op: bool, make: Callable[[operators.Exchanges, int], bool]
) -> tuple[Work | None] | None:
    """The answer of a call that make makes as an operator, which is soonest, or None where something about the call is
    unusual. make gets what to hand to the operator."""
    if type(output) is not Tensor or type(input) is not Tensor or c10d._world.pg_coalesce_state:
        return None
    made = _operators(group, input)
    if made is None:
        return None
    if async_op:
        tensors = (output,) if output is input else (output, input)
        work = made.aside(tensors, lambda at: make(made, at))
        return work and (work,)
    return (None,) if make(made, 0) else None


def gpu_for(group: Any, output: Tensor, input: Tensor) -> Gpu | None:
    """The end of the group's communicator on the GPU of tensors that are on one; None where torch has to do the work."""
    comm = communicator(group)
    if comm is None:
        return None
    cuda.one_device(output, input)
    device = input.get_device()
    return comm._gpus.get(device) or cuda.gpu_of(comm, process_group(group), device)


def torchs_group(group: Any, operation: str, what: str, tensors: list[Tensor], kinds: Any = (), gpus: bool = True) -> Any:
    """The process group that has to do what Switchyard does not: an operation of what. It is counted, with the reason that
    the rest tells; see there."""
    pg = process_group(group)
    if pg is None:
        raise errors.Unsupported(
            f"switchyard: {operation}{what}: Switchyard does not do that, and there is no process group whose backend could"
        )
    known = group_of(pg)
    if not known.counts:
        known.fell_back(operation, fallback.reason(known, tensors, kinds, gpus), pg, tensors)
    return pg


def _many(tensor: Tensor) -> str:
    return f" of {tensor.layout} {tensor.device.type} tensors"


def _run(
    operation: str,
    group: Any,
    prepare: Callable[[Shapes], Submission],
    torchs: Callable[[Any], Any],
    output: Tensor,
    async_op: bool,
) -> Any:
    """An operation on host tensors: prepare says what to submit, and torchs does it in a process group of torch's."""
    comm, known = find(group)
    if comm is None and not async_op:
        comm = known.wait()  # type: ignore[union-attr]
    if comm is None:
        assert known is not None
        call = known.prepare(prepare, known.shapes)
        if async_op:
            return known.submit(operation, call, torchs, [output])
        known.fell_back(operation, fallback.GROUP, known.elsewhere, [output])
        return torchs(known.elsewhere)
    call = comm._prepare(prepare, comm._shapes)
    if profiled():
        with span(operation):
            return _now(comm, call, output, async_op)
    return _now(comm, call, output, async_op)


def _now(comm: Communicator, call: Submission, output: Tensor, async_op: bool) -> Work | None:
    """Submit an operation, and wait for it where that is asked for."""
    function, arguments, back = call
    ticket = function(comm, *arguments, async_op)
    if async_op:
        return Work(ticket, [output], back)
    if back is not None:
        back()
    return None


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Any,
    input_split_sizes: Any,
    group: Any,
    async_op: bool,
    extra: cuda.Extra | None = None,
) -> Any:
    if group is not None and _outside(group, "all_to_all_single"):
        return None
    if isinstance(input, Tensor) and input.requires_grad:
        hint_gradient("all_to_all_single", input)
    if extra is None:
        sizes = (output_split_sizes, input_split_sizes)
        made = soonest(group, output, input, async_op, lambda made, at: made.make(output, input, *sizes, at))
        if made:
            return made[0]
    if cuda.ours(output, input):
        gpu = gpu_for(group, output, input)
        if gpu is None:
            pg = torchs_group(group, "all_to_all_single", _many(input), [output, input])
            return dist.all_to_all_single(output, input, output_split_sizes, input_split_sizes, pg, async_op)
        if async_op:
            return cuda.start(gpu, output, input, output_split_sizes, input_split_sizes, extra)
        cuda.exchange(gpu, output, input, output_split_sizes, input_split_sizes, extra)
        return None
    is_tensor(output, "output")
    is_tensor(input, "input")
    if input.device.type != output.device.type:
        raise errors.InvalidArgument(f"switchyard: output is on {output.device}, input on {input.device}")
    if extra is not None:
        raise errors.InvalidArgument("switchyard: peer_displs, max_sms, copy_sms and no_sms are for CUDA tensors")
    mine = _ours(output) and _ours(input)
    if mine and (comm := find(group)[0]) is not None:  # what is asked most, soonest
        try:
            call = exchange(comm._shapes, output, input, output_split_sizes, input_split_sizes)
        except errors.Error as err:
            comm._refuse(err)
            raise
        return _now(comm, call, output, async_op)

    def torchs(pg: Any) -> Any:
        given = (output, input, output_split_sizes, input_split_sizes, pg, async_op)
        return fallback.in_rows(dist.all_to_all_single, "wr", given)

    if not mine:
        return torchs(torchs_group(group, "all_to_all_single", _many(input), [output, input]))
    return _run(
        "all_to_all_single",
        group,
        lambda shapes: exchange(shapes, output, input, output_split_sizes, input_split_sizes),
        torchs,
        output,
        async_op,
    )


def exchange(shapes: Shapes, output: Tensor, input: Tensor, output_split_sizes: Any, input_split_sizes: Any) -> Submission:
    """all_to_all_single of tensors that are ours."""
    back, shapes_of, item = None, (output.shape, input.shape), input.element_size()
    same_dtype(output, input)
    if input.is_complex() or input.is_neg() or not input.is_contiguous():
        input = splittable(input, "input")
    if output.is_complex() or output.is_neg() or not output.is_contiguous():
        output, back = writable(output, "output")
    shape = shapes.find(*shapes_of, item, output_split_sizes, input_split_sizes)
    written(output)
    return Communicator._all_to_all, (output.data_ptr(), input.data_ptr(), shape[0], (output, input, shape)), back


def explain(output: Tensor, input: Tensor, output_split_sizes: Any, input_split_sizes: Any, group: Any) -> str:
    if cuda.ours(output, input):
        return cuda.explain(gpu(group, input.device), output, input, output_split_sizes, input_split_sizes)
    is_tensor(output, "output")
    is_tensor(input, "input")
    comm = communicator(group)
    if comm is None or not (_ours(output) and _ours(input)):
        return "torch: Switchyard does not exchange such tensors"
    # Nothing is written, so autograd hears of nothing.
    _, (dst, _, shape, _), _ = exchange(comm._shapes, output.data, input, output_split_sizes, input_split_sizes)
    return comm._explain(dst, shape)


def all_reduce(tensor: Tensor, op: Any, group: Any, async_op: bool) -> Any:
    is_tensor(tensor, "tensor")
    if _outside(group, "all_reduce"):
        return None
    hint_gradient("all_reduce", tensor)
    how = op_name(op)
    usual = _KINDS.get((tensor.dtype, how))
    made = usual and soonest(group, tensor, tensor, async_op, lambda made, at: made.reduce(tensor, usual, at))
    if made:
        return made[0]

    def torchs(pg: Any) -> Any:
        return fallback.in_rows(dist.all_reduce, "b", (tensor, _torch_op(op), pg, async_op))

    on_gpu = cuda.ours(tensor, tensor)
    if not (on_gpu or _ours(tensor)) or _coalescing(process_group(group)):
        return torchs(torchs_group(group, "all_reduce", _many(tensor), [tensor]))
    if tensor.is_complex() and how not in ("sum", "avg"):
        raise errors.InvalidArgument(f"switchyard: all_reduce does not support {op} on complex tensors")
    refuse_gloos(group, "all_reduce", tensor, how)
    kind = kind_of(tensor, how)
    if kind is None:
        return torchs(torchs_group(group, "all_reduce", f" ({op}) of {tensor.dtype}", [tensor], [kind]))
    if on_gpu:
        gpu = gpu_for(group, tensor, tensor)
        if gpu is None:
            return torchs(torchs_group(group, "all_reduce", _many(tensor), [tensor], [kind]))
        return cuda.reductions(gpu, [gpu._prepare(reduce, tensor, kind)], [tensor], async_op)
    return _run("all_reduce", group, lambda _: reduce(tensor, kind), torchs, tensor, async_op)


def refuse_gloos(group: Any, call: str, x: Tensor, how: str) -> None:
    """Refuse what would go to gloo and fail there: averages of integers, after it has enqueued them, and its missing types."""
    none = x.dtype in _NOT_GLOOS
    if not none and (how != "avg" or x.is_floating_point() or x.is_complex()):
        return
    pg = process_group(group)
    if (none and pg is None) or ((x.is_cuda or none) and cuda.has_backend(pg, x.device, but=dist.ProcessGroupGloo)):
        return

    def refuse() -> Submission:
        what = f"switchyard: {call}: tensor is {x.dtype} on {x.device}"
        if none:
            raise errors.Unsupported(f"{what}, which neither Switchyard nor gloo reduces: convert it (Invalid scalar type)")
        raise errors.Unsupported(f"{what}; op 'avg' takes floats there: convert it, or divide the sum")

    comm, known = find(group)
    if comm is not None:
        comm._prepare(refuse)
    elif known is not None:
        known.prepare(refuse)


def kind_of(x: Tensor, how: str) -> tuple[int, int] | None:
    """Data type and operator of a reduction as the library takes them, None for what it cannot do."""
    if x.is_complex():
        return _KINDS.get((real(x).dtype, how)) if how in ("sum", "avg") else None
    return _KINDS.get((x.dtype, how))


def reduce(tensor: Tensor, kind: tuple[int, int]) -> Submission:
    """all_reduce of a tensor that is ours."""
    x, back = real(tensor), None
    if x.is_neg() or not x.is_contiguous():
        fresh = x.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
        x, back = fresh, into(x, fresh, "tensor")
    written(x)
    address = x.data_ptr()
    return Communicator._all_reduce, (address, address, x.numel() * x.element_size(), *kind, x), back


def reduce_scatter_tensor(output: Tensor, input: Tensor, op: Any, group: Any, async_op: bool) -> Any:
    is_tensor(output, "output")
    is_tensor(input, "input")
    if _outside(group, "reduce_scatter_tensor"):
        return None
    hint_gradient("reduce_scatter_tensor", input)
    how = op_name(op)
    usual = _KINDS.get((input.dtype, how))
    made = usual and soonest(group, output, input, async_op, lambda made, at: made.scatter(output, input, usual, at))
    if made:
        return made[0]
    refuse_gloos(group, "reduce_scatter_tensor", input, how)
    kind = kind_of(input, how)

    def torchs(pg: Any) -> Any:
        return fallback.in_rows(dist.reduce_scatter_tensor, "wr", (output, input, _torch_op(op), pg, async_op))

    on_gpu = cuda.ours(output, input)
    if kind is None or not (on_gpu or (_ours(output) and _ours(input))) or _coalescing(process_group(group)):
        what = f" ({op}) of {input.dtype} {input.device.type} tensors"
        return torchs(torchs_group(group, "reduce_scatter_tensor", what, [output, input], [kind]))
    if on_gpu:
        gpu = gpu_for(group, output, input)
        if gpu is None:
            return torchs(torchs_group(group, "reduce_scatter_tensor", _many(input), [output, input], [kind]))
        return cuda.reductions(gpu, [gpu._prepare(scatter, gpu._shapes.ranks, output, input, kind)], [output], async_op)
    return _run(
        "reduce_scatter_tensor", group, lambda shapes: scatter(shapes.ranks, output, input, kind), torchs, output, async_op
    )


def scatter(ranks: int, output: Tensor, input: Tensor, kind: tuple[int, int]) -> Submission:
    """reduce_scatter_tensor of tensors that are ours."""
    if output.dtype is not input.dtype:
        raise errors.InvalidType(
            f"switchyard: output is {output.dtype}, input {input.dtype}: input tensor must be the same type as the output "
            "tensor"
        )
    if output.numel() * ranks != input.numel():
        raise errors.InvalidArgument(
            f"switchyard: input has {input.numel()} elements, output {output.numel()} for each of {ranks} ranks: input tensor "
            "must be the same size as output size times world size"
        )
    input, (output, back) = readable(input), writable(output, "output")
    written(output)
    size = output.element_size()
    arguments = (output.data_ptr(), output.numel() * size, input.data_ptr(), input.numel() * size, *kind, (output, input))
    return Communicator._reduce_scatter, arguments, back


def all_gather_into_tensor(output: Tensor, input: Tensor, group: Any, async_op: bool) -> Any:
    is_tensor(input, "input_tensor")
    is_tensor(output, "output_tensor")
    if _outside(group, "all_gather_into_tensor"):
        return None
    hint_gradient("all_gather_into_tensor", input)
    made = soonest(group, output, input, async_op, lambda made, at: made.gather(output, input, at))
    if made:
        return made[0]

    def torchs(pg: Any) -> Any:
        return fallback.in_rows(dist.all_gather_into_tensor, "wr", (output, input, pg, async_op))

    on_gpu = cuda.ours(output, input)
    if not (on_gpu or (_ours(output) and _ours(input))) or _coalescing(process_group(group)):
        return torchs(torchs_group(group, "all_gather_into_tensor", _many(input), [output, input]))
    if on_gpu:
        gpu = gpu_for(group, output, input)
        if gpu is None:
            return torchs(torchs_group(group, "all_gather_into_tensor", _many(input), [output, input]))
        return cuda.reductions(gpu, [gpu._prepare(gather, gpu._shapes.ranks, output, input)], [output], async_op)
    return _run("all_gather_into_tensor", group, lambda shapes: gather(shapes.ranks, output, input), torchs, output, async_op)


def gather(ranks: int, output: Tensor, input: Tensor) -> Submission:
    """all_gather_into_tensor of tensors that are ours."""
    if output.dtype is not input.dtype:
        raise errors.InvalidType(
            f"switchyard: output_tensor is {output.dtype}, input_tensor {input.dtype}: output tensor must have the same type "
            "as input tensor"
        )
    if input.numel() * ranks != output.numel():
        raise errors.InvalidArgument(
            f"switchyard: output_tensor has {output.numel()} elements, input_tensor {input.numel()} on each of {ranks} ranks: "
            "output tensor size must be equal to world_size times input tensor size"
        )
    input, (output, back) = readable(input), writable(output, "output_tensor")
    written(output)
    size = output.element_size()
    arguments = (output.data_ptr(), output.numel() * size, input.data_ptr(), input.numel() * size, (output, input))
    return Communicator._all_gather, arguments, back


@uncompiled
def barrier(group: Any, async_op: bool, device_ids: Any = None) -> Any:
    if _outside(group, "barrier"):
        return None

    def torchs(pg: Any) -> Any:
        return dist.barrier(pg, async_op, device_ids)

    if device_ids is not None:
        return torchs(torchs_group(group, "barrier", " with device_ids", []))
    settle()
    comm, known = find(group)
    if comm is None and not async_op:
        comm = known.wait()  # type: ignore[union-attr]
    if comm is None:
        assert known is not None
        if async_op:
            return known.submit("barrier", BARRIER, torchs, [])
        known.fell_back("barrier", fallback.GROUP, known.elsewhere, [])
        return torchs(known.elsewhere)
    ticket = comm._barrier(async_op)
    return Work(ticket, []) if ticket is not None else None


BARRIER: Submission = (Communicator._barrier, (), None)


def settle() -> None:
    """Wait for the current stream where torch uses a GPU: NCCL's barrier is behind it too."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def here(group: Any) -> Communicator:
    """The communicator of a group, for what torch's backends do not have."""
    comm = communicator(group)
    if comm is None:
        raise errors.Unsupported("switchyard: the ranks of this group have no symmetric memory: torch does its calls")
    return comm


def gpu(group: Any, device: Any, **options: Any) -> Gpu:
    """The end of a group's communicator on a CUDA device."""
    return here(group)._gpu(cuda.index_of(device), **options)
