"""Switchyard: calls with the meaning of ``torch.distributed``'s, for tensors that cross between ranks.

``all_to_all_single`` and its companions take the arguments of the functions of the same name in ``torch.distributed``.
Importing this package loads nothing; the first call loads the shared library and lets the ranks meet, through the process
group's own store where there is one.

They take torch tensors, and without torch numpy arrays and everything with DLPack or the buffer protocol.
On the host and on NVIDIA GPUs the calls are Switchyard's. Other calls go to the process group's backend; the
table in the package's README lists it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from . import _sides, errors
from ._members import admit, replace, shrink
from ._pairs import P2POp, batch_isend_irecv, get, irecv, isend, put, recv, send, signal, wait
from ._plans import all_to_all_by_plan, explain, register_algorithm
from ._shares import open_shared, share
from ._version import __version__ as __version__
from .errors import Error

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ._core.comm import Communicator
    from ._core.shares import Opened, Shared
    from ._core.work import Work
    from ._types import Device, DType, Group, Memory, Op, Plans, Sizes, Stream
    from .devcomm import DeviceCommunicator
    from .moe import Combining, Dispatched, Dispatcher

__all__ = [
    "Combining",
    "Communicator",
    "DeviceCommunicator",
    "Dispatched",
    "Dispatcher",
    "Error",
    "Opened",
    "P2POp",
    "Shared",
    "Work",
    "admit",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_by_plan",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "check",
    "communicator",
    "empty",
    "errors",
    "explain",
    "free",
    "get",
    "init",
    "irecv",
    "isend",
    "mem_pool",
    "metrics",
    "new_id",
    "open_shared",
    "put",
    "recv",
    "reduce_scatter_tensor",
    "register_algorithm",
    "replace",
    "send",
    "share",
    "shrink",
    "shutdown",
    "signal",
    "synchronize",
    "verify",
    "wait",
]

# Names that are loaded when they are asked for.
_LAZY = {"Communicator": "_core.comm", "Work": "_core.work", "DeviceCommunicator": "devcomm"}
_LAZY |= dict.fromkeys(("Shared", "Opened"), "_core.shares")
_LAZY |= dict.fromkeys(("Dispatcher", "Dispatched", "Combining"), "moe")


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("." + module, __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def all_to_all_single(
    output: Memory,
    input: Memory,
    output_split_sizes: Sizes = None,
    input_split_sizes: Sizes = None,
    group: Group = None,
    async_op: bool = False,
    *,
    peer_displs: Sizes = None,
    max_sms: int | None = None,
    copy_sms: int | None = None,
    no_sms: bool | None = None,
    stream: Stream = None,
) -> Any:
    """Send ``input_split_sizes[k]`` rows of input to rank k and receive ``output_split_sizes[k]`` from it into output.

    ``None`` or an empty list divides the rows equally; split sizes are a list, a tuple or an array of integers. Both tensors
    are of one data type and on one device, and do not overlap; what a row is, is each tensor's own business as long as the
    bytes agree. What rank i sends to rank j has the size that j expects from i; otherwise j, and i too if the message is
    large, gets an error (:class:`switchyard.errors.Mismatch`), and later calls work.

    Returns ``None``, or with ``async_op`` a work object: output is complete after its ``wait()``, and neither tensor may
    be changed before. The meaning, the results and the errors are those of ``torch.distributed.all_to_all_single``.

    On CUDA tensors the call is enqueued: on the current stream, or with ``async_op`` on a second one that begins where the
    current stream is now, and ``wait()`` makes the then current stream wait. CUDA graphs can capture it, after one call
    outside. An error while it runs is raised by the next call, and :func:`check` and :func:`synchronize` do. The first call
    of a group with tensors of a GPU is collective, like making a group, and takes up to some seconds.

    Split sizes of CUDA tensors may lie on the GPU themselves, both as int64 tensors. They are read there when the call runs,
    and not by the host. The rows of the tensors are then the most that there is room for, and what is left of output stays as
    it was. Splits that do not fit are an :class:`switchyard.errors.InvalidArgument` of this call on all ranks, whose ``rank``
    says where they are. The next call works.

    ``max_sms``, ``copy_sms`` and ``no_sms`` say for this call what :func:`communicator` says for all; ranks need not agree.
    With ``async_op`` and none of them, ``max_sms`` is 8: the other multiprocessors are left to what runs meanwhile.
    ``peer_displs[k]`` is the row of rank k's output from which on this rank's rows lie there. Copy engines need it, and an
    output in symmetric memory at the same place on every rank. It must be right.

    ``stream``, a ``torch.cuda.Stream`` or a CUstream, takes the place of the current stream, here and in the other calls.
    """
    if stream is not None and not _sides.compiling():
        with _sides.on_stream(stream, output, input):
            return all_to_all_single(
                output, input, output_split_sizes, input_split_sizes, group, async_op, peer_displs=peer_displs,
                max_sms=max_sms, copy_sms=copy_sms, no_sms=no_sms,
            )  # fmt: skip
    extra = None
    if peer_displs is not None or max_sms is not None or copy_sms is not None or no_sms is not None:
        _limits(max_sms, copy_sms, no_sms)
        extra = peer_displs, max_sms, copy_sms, no_sms
    calls = _sides.calls_in_use
    if calls is not None and isinstance(input, calls.Tensor) and not calls.compiling():  # fast path
        return calls.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op, extra)
    if _sides.compiling():
        from . import torch as ours

        if extra is not None or stream is not None:
            return _sides.outside(
                all_to_all_single, output, input, output_split_sizes, input_split_sizes, group, async_op,
                peer_displs=peer_displs, max_sms=max_sms, copy_sms=copy_sms, no_sms=no_sms, stream=stream,
            )  # fmt: skip
        return ours._compiled_all_to_all(output, input, output_split_sizes, input_split_sizes, group, async_op)
    if _sides.is_tensor(input) or _sides.is_tensor(output):
        return _sides.tensor_calls().all_to_all_single(
            output, input, output_split_sizes, input_split_sizes, group, async_op, extra
        )
    if extra is not None:
        raise errors.InvalidArgument("switchyard: peer_displs, max_sms, copy_sms and no_sms are for CUDA tensors")
    comm = _sides.communicator(group)
    return _sides.array_calls().all_to_all_single(output, input, output_split_sizes, input_split_sizes, comm, async_op)


def _limits(max_sms: Any, copy_sms: Any, no_sms: Any) -> None:
    from ._core.arguments import flag, integer

    if max_sms is not None:
        integer("max_sms", max_sms, 1)
    if copy_sms is not None:
        integer("copy_sms", copy_sms, 0)
    if no_sms is not None:
        flag("no_sms", no_sms)


def all_reduce(
    tensor: Memory, op: Op = "sum", group: Group = None, async_op: bool = False, *, stream: Stream = None
) -> Any:
    """Combine the ranks' tensors element by element, in place, with the same bits on every rank.

    op is a ``torch.distributed.ReduceOp`` or one of "sum", "avg", "min", "max" and "prod". Sums of 16-bit and 8-bit
    floats are made in float32.
    """
    if stream is not None and not _sides.compiling():
        with _sides.on_stream(stream, tensor):
            return all_reduce(tensor, op, group, async_op)
    if _sides.compiling():
        from . import torch as ours

        if stream is not None or not ours._is_operator(op):
            return _sides.outside(all_reduce, tensor, op, group, async_op, stream=stream)
        return ours._compiled_all_reduce(tensor, op, group, async_op)
    if _sides.is_tensor(tensor):
        return _sides.tensor_calls().all_reduce(tensor, op, group, async_op)
    return _sides.array_calls().all_reduce(tensor, op, _sides.communicator(group), async_op)


def reduce_scatter_tensor(
    output: Memory, input: Memory, op: Op = "sum", group: Group = None, async_op: bool = False, *, stream: Stream = None
) -> Any:
    """Combine the ranks' inputs element by element and leave slice r of the result in rank r's output."""
    if stream is not None and not _sides.compiling():
        with _sides.on_stream(stream, output, input):
            return reduce_scatter_tensor(output, input, op, group, async_op)
    if _sides.compiling():
        from . import torch as ours

        if stream is not None or not ours._is_operator(op):
            return _sides.outside(reduce_scatter_tensor, output, input, op, group, async_op, stream=stream)
        return ours._compiled_reduce_scatter(output, input, op, group, async_op)
    if _sides.is_tensor(input) or _sides.is_tensor(output):
        return _sides.tensor_calls().reduce_scatter_tensor(output, input, op, group, async_op)
    return _sides.array_calls().reduce_scatter_tensor(output, input, op, _sides.communicator(group), async_op)


def all_gather_into_tensor(
    output_tensor: Memory, input_tensor: Memory, group: Group = None, async_op: bool = False, *, stream: Stream = None
) -> Any:
    """Put rank r's input into slice r of every rank's output."""
    if stream is not None and not _sides.compiling():
        with _sides.on_stream(stream, output_tensor, input_tensor):
            return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
    if _sides.compiling():
        from . import torch as ours

        if stream is not None:
            return _sides.outside(all_gather_into_tensor, output_tensor, input_tensor, group, async_op, stream=stream)
        return ours._compiled_all_gather(output_tensor, input_tensor, group, async_op)
    if _sides.is_tensor(input_tensor) or _sides.is_tensor(output_tensor):
        return _sides.tensor_calls().all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
    comm = _sides.communicator(group)
    return _sides.array_calls().all_gather_into_tensor(output_tensor, input_tensor, comm, async_op)


def barrier(group: Group = None, async_op: bool = False, device_ids: list[int] | None = None) -> Any:
    """Return once every rank of the group has called it."""
    if "torch" in sys.modules:
        return _sides.tensor_calls().barrier(group, async_op, device_ids)
    return _sides.array_calls().barrier(_sides.communicator(group), async_op)


def init(
    rank: int | None = None,
    world_size: int | None = None,
    addr: str | None = None,
    *,
    secret: str | None = None,
    timeout: float | None = None,
    join_timeout: float | None = None,
    peer_timeout: float | None = None,
    heap: int | None = None,
    validate: bool = False,
    plans: Plans = None,
    algorithm: str | None = None,
    default: bool = True,
    late: bool = False,
    replaces: bool = False,
    replaceable: bool = False,
) -> Communicator:
    """Meet the other ranks without torch and return the communicator.

    Without arguments the launcher says who this rank is: torchrun, Slurm, Open MPI, MPICH, Kubernetes and others, which the
    page docs/launchers.md lists. Otherwise this one is ``rank`` of ``world_size``, and rank 0 listens at ``addr``, a
    "host:port", until all have come; or the ranks meet at "@name" on this host, by a file, "file:///path", or with what
    ``new_id`` made. ``secret`` keeps strangers out. ``timeout`` bounds every wait of an operation for a peer (30 s by
    default), ``join_timeout`` the meeting and ``peer_timeout`` the silence of a process, all in seconds. ``heap`` is the size
    in bytes of the first part of the symmetric heap. With ``validate`` the ranks compare every call before they make it, so
    that a disagreement is an error on every rank and nothing has moved; that costs a round of socket messages a call. ``plans``
    and ``algorithm`` are as for :func:`communicator`. Calls without a group use the communicator, unless ``default`` is false:
    they then stay with the one that they had.

    With ``late`` this process joins a group that runs, whose ranks call :func:`admit` with ``addr``; its rank comes from there.
    With ``replaces`` it comes in the place of a rank that was lost, see :func:`replace`, and ``replaceable`` ranks keep what
    that needs.
    """
    from ._core import comm as core
    from ._core.arguments import address, flag, integer, reductions, seconds, text

    options: dict[str, Any] = reductions(plans, algorithm)
    options.update(Late=flag("late", late), Replaces=flag("replaces", replaces), Replaceable=flag("replaceable", replaceable))
    if late:
        if rank is not None or world_size is not None or addr is None or replaces:
            raise errors.InvalidArgument("switchyard: init: late goes with addr, and without rank, world_size and replaces")
        options["Addr"] = address("addr", addr)
    elif rank is None and world_size is None:
        options["Env"] = True
        if replaces and addr is not None:
            options["Addr"] = address("addr", addr)
        elif addr is not None:
            raise errors.InvalidArgument("switchyard: init: an address without a rank and a world size")
    elif rank is None or world_size is None:
        raise errors.InvalidArgument("switchyard: init: rank, world_size and addr go together")
    else:
        size = integer("world_size", world_size, 1)
        if addr is None and size > 1:
            raise errors.InvalidArgument("switchyard: init: rank, world_size and addr go together")
        options.update(Rank=integer("rank", rank, 0), Size=size, Addr="" if addr is None else address("addr", addr))
        if options["Rank"] >= size:
            raise errors.InvalidArgument(f"switchyard: rank is {rank}, want less than world_size, {size}")
    if secret is not None:
        options["Secret"] = text("secret", secret)
    for option, name, value in (
        ("TimeoutSeconds", "timeout", timeout),
        ("JoinSeconds", "join_timeout", join_timeout),
        ("PeerSeconds", "peer_timeout", peer_timeout),
    ):
        if value is not None:
            options[option] = seconds(name, value)
    if peer_timeout is not None and options["PeerSeconds"] < 0.1:
        raise errors.InvalidArgument(f"switchyard: peer_timeout is {peer_timeout}, want at least 0.1")
    if heap is not None:
        options["SegmentBytes"] = integer("heap", heap, 1)
    options["Validate"] = flag("validate", validate)
    try:
        comm = core.Communicator._open(options)
    except errors.Unsupported as err:
        if " hosts: " in str(err):
            without = "ranks of one host meet without it, and calls of torch's process groups go to torch's own backends"
            err.args = (f"{err}; {without}",)
        raise
    if default:
        core.set_default(comm)
    return comm


def new_id(host: str = "") -> str:
    """Make an address where the ranks of one group can meet, and a secret that they prove there, in one text.

    One process makes it and hands it to all ranks by any channel; each passes it to ``init`` as ``addr``. ``host`` is an
    address of rank 0's host, where a port is chosen that is free now. Without it the ranks are on one host and need none.
    """
    from ._core import comm as core
    from ._core.arguments import text

    return core.new_id(text("host", host))


def communicator(
    group: Group = None,
    device: Device = None,
    *,
    validate: bool | None = None,
    plans: Plans = None,
    algorithm: str | None = None,
    max_sms: int | None = None,
    copy_sms: int | None = None,
    no_sms: bool | None = None,
) -> Communicator:
    """The communicator behind a torch process group, or the default one. The first call for a group is collective.

    With a CUDA device it is made ready for tensors there, which is collective too: what the first ``all_to_all_single``
    would do otherwise. Ranks may share a GPU. :class:`switchyard.errors.Unsupported` says, on every rank, that these GPUs
    cannot exchange.

    Options are for the first call of all for a group or a GPU, and the same on all ranks:

    - ``validate``: the ranks of the group compare every call before they make it, so that a disagreement is an error on every
      rank and nothing has moved. That costs a round of socket messages a call, and graphs cannot capture it. Exchanges
      and gathers compare bytes, not types.
    - ``plans``: collectives as steps, which are paths of JSON files, or dicts with what such files have. They are checked now:
      a cycle, a race, a hole or ranks with other bits is an :class:`switchyard.errors.InvalidArgument` on every rank.
      Reductions and gathers of the host and of GPUs take one where its times are less than the estimates of other ways, and
      :func:`all_to_all_by_plan` takes one always. Groups made of this one have those for as many ranks as they have.
    - ``algorithm``: what reductions and gathers of the host take without a choice: "one-shot", "two-shot", "ring", or the name
      of a plan, for the plan's collective, or of a registered algorithm. On GPUs they take the plan, or what is registered for
      GPUs, that it names.
    - ``max_sms``: how many multiprocessors of the GPU a call takes at most to send, where its messages are larger than packets;
      16 by default.
    - ``copy_sms``: how many more copy out of staging, where peers cannot write the output; with ``max_sms`` none by default,
      then those that send do it.
    - ``no_sms``: none at all: such calls go by the GPU's copy engines, or are refused. They need an output in symmetric memory
      and the ``peer_displs`` of :func:`all_to_all_single`.
    """
    from ._core.arguments import flag, reductions

    _limits(max_sms, copy_sms, no_sms)
    given = {"MaxSMs": max_sms, "CopySMs": -1 if copy_sms == 0 else copy_sms, "NoSMs": no_sms}
    options = {name: value for name, value in given.items() if value is not None}
    if options and device is None:
        raise errors.InvalidArgument("switchyard: max_sms, copy_sms and no_sms are for a CUDA device")
    chosen = reductions(plans, algorithm)
    if validate is not None:
        chosen["Validate"] = flag("validate", validate)
    if chosen:
        _sides.configure(group, **chosen)
    if device is not None:
        return _sides.tensor_calls().gpu(group, device, **options)._comm
    return _sides.communicator(group)


def check(group: Group = None) -> None:
    """Raise what exchanges of CUDA tensors that have run by now have come to: a lost rank, a rank that did not come in
    time, ranks that disagree on sizes. It waits for nothing. The next call does the same."""
    communicator(group).check()


def metrics() -> dict[str, Any]:
    """The state of the ranks of this process: calls, times, bytes by peer, for whom they wait and since when, heaps,
    faults. It works while calls hang, from another thread. docs/observability.md and package observe in Go have the names;
    SWITCHYARD_METRICS serves the same to Prometheus."""
    import json

    from ._core.observe import OWN, observe

    state: dict[str, Any] = json.loads(observe(OWN))
    return state


def synchronize(group: Group = None) -> None:
    """Wait until the GPUs of this rank's exchanges have run everything, and then :func:`check`."""
    comm = communicator(group)
    for device in comm._gpus:
        sys.modules["torch"].cuda.synchronize(device)
    comm.check()


def shutdown() -> None:
    """Leave the default group, together with all its ranks."""
    from ._core import comm as core

    comm = core._default
    core.set_default(None)
    if comm is not None:
        comm.close()


def empty(*size: int | Iterable[int], dtype: DType = None, group: Group = None, device: Device = None) -> Any:
    """A tensor in the symmetric heap, not initialised. Peers write outputs that lie there in place, without staging.

    It is a torch tensor where torch is loaded, unless dtype is numpy's, and a numpy array otherwise. device is the host or a
    CUDA device; ``None`` is torch's default device. Every rank makes the same calls of ``empty``, ``mem_pool`` and ``free``,
    in the same order (``verify`` tells); the heap grows where it has to, which on a GPU takes milliseconds. The memory is
    given back by ``free`` only: never by the garbage collector, which runs at other times on every rank.
    """
    return _sides.empty(size, dtype, group, device)


def mem_pool(size: int, group: Group = None, device: Device = "cuda") -> Any:
    """A ``torch.cuda.MemPool`` with size bytes of the symmetric heap of a GPU, the current one by default.

    Making it is collective, as ``empty`` is. Memory allocated in ``torch.cuda.use_mem_pool(pool)`` is this rank's own
    business: tensors come and go by torch's rules, in any order and at any place of the pool, and exchanges write them in
    place. torch takes 2 MiB at a time for tensors up to 1 MiB, 20 MiB up to 10 MiB, and multiples of 2 MiB above; with no room
    left it raises its ``OutOfMemoryError``. The memory stays the pool's until the process ends; a process can make 16.
    """
    from ._torch import symmetric

    return symmetric.mem_pool(_sides.tensor_calls().gpu(group, device), size)


def free(tensor: Memory) -> None:
    """Give the memory of a tensor of ``empty`` back. Every rank does, in the same order. A GPU's goes back in stream order."""
    _sides.free(tensor)


def verify(group: Group = None) -> None:
    """Compare what the ranks of a group have allocated and freed; :class:`switchyard.errors.Diverged` names the first
    call that differs. Every rank calls it."""
    communicator(group).verify()
