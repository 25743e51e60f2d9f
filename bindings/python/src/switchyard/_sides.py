"""Which side serves a call: that of arrays, or that of torch tensors. Nothing of either is loaded before it is needed."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from . import errors

if TYPE_CHECKING:
    from ._core.comm import Communicator
    from ._core.places import Place


def is_tensor(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def compiling() -> bool:
    """Whether the call is on its way into a graph of torch.compile."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def outside(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Make a call that is no operator, on the way into a graph of torch.compile, which ends before it."""
    from ._torch import compiler

    return compiler.outside(call, *arguments, **named)


def on_stream(stream: Any, *tensors: Any) -> AbstractContextManager[None]:
    """Have another stream of CUDA than the current one be it, for a call that uses tensors."""
    if not all(map(is_tensor, tensors)):
        raise errors.InvalidArgument(f"switchyard: stream is {stream!r}: streams are for CUDA tensors")
    found: AbstractContextManager[None] = tensor_calls().cuda.on_stream(stream, *tensors)
    return found


#: The module of the calls on tensors, once it is in use.
calls_in_use: Any = None


def tensor_calls() -> Any:
    """The module of the calls on tensors."""
    global calls_in_use
    if calls_in_use is None:
        from ._torch import calls

        calls_in_use = calls
    return calls_in_use


def array_calls() -> Any:
    """The module of the calls on arrays."""
    from ._arrays import calls

    return calls


def array_pairs() -> Any:
    """The module of messages and transfers of arrays."""
    from ._arrays import pairs

    return pairs


def tensor_pairs() -> Any:
    """The module of messages and transfers of tensors."""
    from ._torch import pairs

    return pairs


def array_plans() -> Any:
    """The module of plans on arrays."""
    from ._arrays import plans

    return plans


def tensor_plans() -> Any:
    """The module of plans on tensors."""
    from ._torch import plans

    return plans


def tensor_shares() -> Any:
    """The module of tensors that two ranks share."""
    if "torch" not in sys.modules:
        raise errors.Unsupported(
            "switchyard: only tensors of torch are shared: peers reach arrays of switchyard.empty by put and get as they are"
        )
    from ._torch import shares

    return shares


def peer_of(group: Any, peer: Any) -> Any:
    """The number in a group of a rank that may be numbered as torch does it."""
    return tensor_pairs().peer_of(group, peer) if "torch" in sys.modules else peer


def same(one: Any, other: Any) -> bool:
    """Whether two groups are one: torch's default group has no name, or that of WORLD."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    world = None if c10d is None else c10d.GroupMember.WORLD
    return (None if one is world else one) is (None if other is world else other)


def communicator(group: Any) -> Communicator:
    """The communicator of a group: one of ours, or that of a torch process group."""
    from ._core import comm as core

    if isinstance(group, core.Communicator):
        return group
    if "torch" in sys.modules:
        comm: Communicator | None = tensor_calls().communicator(group)
        if comm is None:
            raise errors.Unsupported("switchyard: the ranks of this group have no symmetric memory: torch does its calls")
        return comm
    if group is not None:
        from ._core.arguments import type_of

        raise errors.InvalidType(f"switchyard: group is {type_of(group)}, want a switchyard.Communicator")
    return core.default()


def configure(group: Any, **options: Any) -> None:
    """Options of a group's communicator, before its ranks meet."""
    if "torch" in sys.modules:
        from ._torch import groups

        if groups.configure(group, options):
            return
    raise errors.InvalidArgument(
        "switchyard: validate, plans and algorithm are options of switchyard.init for groups that it makes"
    )


def place_of(group: Any, device: Any) -> tuple[Place, Callable[[int], int] | None]:
    """Where a dispatcher is to be, and on a GPU what says which stream is current there."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        device = torch.get_default_device() if device is None else device
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if where.type == "cuda":
            calls = tensor_calls()
            return calls.gpu(group, where), calls.cuda.raw_stream
        if where.type != "cpu":
            raise errors.Unsupported(f"switchyard: there are no dispatchers on {where}")
    elif device not in (None, "cpu"):
        raise errors.InvalidArgument(f"switchyard: a dispatcher on {device} without torch")
    return communicator(group), None


def empty(size: tuple[Any, ...], dtype: Any, group: Any, device: Any) -> Any:
    """A tensor or an array in the symmetric heap."""
    from ._core.arguments import integer

    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Iterable) else size
    shape = tuple(integer("size", n, 0) for n in shape)
    torch: Any = sys.modules.get("torch")
    if torch is not None and (dtype is None or isinstance(dtype, torch.dtype)):
        from ._torch import symmetric as tensors

        return tensors.empty(shape, dtype or torch.get_default_dtype(), group, device)
    if device is not None:
        raise errors.InvalidArgument(f"switchyard: empty: an array on {device}")
    from ._arrays import symmetric as arrays

    return arrays.empty(shape, dtype, communicator(group))


def free(tensor: Any) -> None:
    """Give the memory of a tensor or an array of empty back."""
    from ._core.arguments import type_of
    from ._core.comm import blocks

    stream = 0
    if hasattr(tensor, "data_ptr"):
        from ._torch.symmetric import stream_of

        address, stream = tensor.data_ptr(), stream_of(tensor)
    elif hasattr(tensor, "__array_interface__"):
        address = tensor.__array_interface__["data"][0]
    else:
        raise errors.InvalidType(f"switchyard: free: tensor is {type_of(tensor)}, want one of switchyard.empty")
    if math.prod(tensor.shape) == 0:
        return
    for block in blocks():
        if block.address == address:
            block.free(stream)
            return
    raise errors.Freed("switchyard: free: not a tensor of switchyard.empty, or given back before")


_tensor_moe: Any = None


def tensor_moe() -> Any:
    """The module of a dispatcher's calls on tensors."""
    global _tensor_moe
    if compiling():
        from ._torch import moe_ops

        return moe_ops
    if _tensor_moe is None:
        from ._torch import moe

        _tensor_moe = moe
    return _tensor_moe


def operated(d: Any) -> Any:
    """A dispatcher's calls that are operators of torch. None where there are none, and on the way into a compiled graph, which
    would find that they have come meanwhile."""
    torch = sys.modules.get("torch")
    return None if torch is None or torch.compiler.is_compiling() else d._operated


_array_moe: Any = None


def array_moe() -> Any:
    """The module of a dispatcher's calls on arrays."""
    global _array_moe
    if _array_moe is None:
        from ._arrays import moe

        _array_moe = moe
    return _array_moe
