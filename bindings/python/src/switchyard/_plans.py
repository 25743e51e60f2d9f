"""Algorithms of the user's own, all-to-alls by plans, and how calls are carried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _sides, errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Callable

    from ._types import Group, Memory, Sizes


def all_to_all_by_plan(output: Memory, input: Memory, group: Group = None, async_op: bool = False) -> Any:
    """Send slice k of input to rank k and receive its slice into slice k of output, by one of the group's plans.

    All slices have the same number of rows. It is for tensors of the host and of GPUs, and for arrays; output may be input.
    Without a plan for all-to-alls, :class:`switchyard.errors.Unsupported` says so on every rank, and :func:`all_to_all_single`
    is the way.
    """
    if _sides.compiling():
        return _sides.outside(all_to_all_by_plan, output, input, group, async_op)
    if _sides.is_tensor(input) or _sides.is_tensor(output):
        return _sides.tensor_plans().all_to_all_by_plan(output, input, group, async_op)
    return _sides.array_plans().all_to_all_by_plan(output, input, _sides.communicator(group), async_op)


def register_algorithm(
    name: str,
    cost: Callable[[int, int], float],
    schedule: Callable[[int], Mapping[str, Any]],
    *,
    collective: str = "all-reduce",
    ranks: Iterable[int] = range(2, 9),
    device: str = "cpu",
) -> None:
    """Add an algorithm of one's own, which calls choose by size. Groups that are made later have it; register it on all ranks,
    in one order. ``device`` is "cpu" for tensors and arrays of the host, or "cuda" for CUDA tensors. An algorithm for both is
    registered twice, with the times that it takes there; both may have one name.

    ``schedule(size)`` returns its steps for that many ranks: a dict with ``programs``, a list of steps for each rank, and where
    they are needed ``chunks`` and ``scratch``, as plans have them (docs/extending.md). ``cost(nbytes, size)`` is the time of
    a call in microseconds by the bytes of a rank's input; it is asked for powers of two from 64 B to 1 GiB, and
    ``math.inf`` says never. ``collective`` is "all-reduce", "reduce-scatter", "all-gather", "all-to-all", which is what
    :func:`all_to_all_by_plan` does, or "exchange". ``ranks`` are the sizes of groups that have it, from 2 on. Both functions
    are called now.

    An "exchange" is what :func:`all_to_all_single` does, with any splits. Its ``schedule(size)`` returns ``orders``, a list for
    each rank of the peers in the order in which it sends to them, and where they are wanted ``window``, from how many peers a
    rank receives at a time (all by default), ``staged``, which has no peer write the output in place, and ``chunk_bytes``, how
    many bytes a peer may write there before it waits for more. ``nbytes`` is what a rank sends or receives, whichever is more,
    and each rank chooses for itself.

    The algorithm is checked now: a cycle, a race, a hole, ranks with other bits, a peer that an order lacks or two ranks that
    send to a third in one step are an :class:`switchyard.errors.InvalidArgument`. Ranks that register other algorithms get a
    :class:`switchyard.errors.Mismatch` with both when they make a group, or first use their GPUs. The ``algorithm`` of
    :func:`init` and :func:`communicator` may be its name. A name that is registered again for a device gets the new algorithm.
    Groups on several hosts do without. On GPUs a ``window`` other than 1 is all, and ``chunk_bytes`` is passed over. The check
    loads the library, so processes that fork register afterwards.
    """
    from ._core.algorithms import register

    register(name, cost, schedule, collective, ranks, device)


def explain(
    output: Memory,
    input: Memory,
    output_split_sizes: Sizes = None,
    input_split_sizes: Sizes = None,
    group: Group = None,
    *,
    call: str = "all_to_all_single",
) -> str:
    """Say how a call with these tensors would be carried: by which algorithm, and why. Nothing is sent, and other ranks need
    not call it once the group is in use.

    Of ``all_to_all_single`` it also says whether peers would write output in place. ``call`` may be another one:
    "all_reduce", whose output is its input, "reduce_scatter_tensor", "all_gather_into_tensor" or "all_to_all_by_plan". The
    first line names the plan where one is taken. On a GPU all ranks call it together where that has made none of these calls
    yet.
    """
    from ._core.options import one_of
    from ._core.places import COLLECTIVES

    tensors = _sides.is_tensor(input) or _sides.is_tensor(output)
    exchange = "all_to_all_single"
    if one_of((exchange, *COLLECTIVES))("call", call) == exchange:
        if tensors:
            return str(_sides.tensor_calls().explain(output, input, output_split_sizes, input_split_sizes, group))
        comm = _sides.communicator(group)
        return str(_sides.array_calls().explain(output, input, output_split_sizes, input_split_sizes, comm))
    if output_split_sizes is not None or input_split_sizes is not None:
        raise errors.InvalidArgument(f"switchyard: explain: {call} has no split sizes")
    if tensors:
        return str(_sides.tensor_plans().explain_reduction(call, output, input, group))
    return str(_sides.array_plans().explain_reduction(call, output, input, _sides.communicator(group)))
