"""Switchyard as a backend of torch.distributed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from .. import errors
from .._core.places import Gpu
from . import calls, cuda, fallback, groups, lists, pairs
from .arguments import every, flat, kinds_of, listed, number, ours
from .groups import Submission
from .operators import Exchanges
from .tensors import apart, as_bytes, readable
from .work import Theirs, Work

#: The cure where torch's own groups get other ranks.
_NO_OTHERS = "groups of this backend keep their ranks: make one by new_group, or use switchyard.shrink and switchyard.admit"


class _Gloo(dist.ProcessGroupGloo):
    """gloo, which also hears of timeouts that are set for the backends of a group."""

    group: weakref.ref[groups.Group]

    def _set_default_timeout(self, timeout: timedelta) -> None:
        groups.check_timeout("set_timeout", timeout)
        super()._set_default_timeout(timeout)
        group = self.group()
        if group is not None:
            group.set_timeout(timeout)


class SwitchyardProcessGroup(dist.ProcessGroup):
    """A process group whose collectives are Switchyard's where it has them.

    Everything else goes to the groups it wraps: gloo for host tensors and, where torch can use GPUs, NCCL for CUDA
    tensors. The ranks of Switchyard begin to meet when the group is made, and nobody waits for that before the first call.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, options: Any = None) -> None:
        try:
            super().__init__(store, rank, size)
        except TypeError:  # of a torch whose base class takes a store of its own makers only
            super().__init__(rank, size)  # type: ignore[call-arg]
        self._store, self._splits = store, 0
        self._wrapped = dist.ProcessGroup(store, rank, size)
        self._together: list[tuple[bool, Tensor, Any, int]] | None = None  # messages of torch's batch_isend_irecv
        self._group = groups.remember(self, groups.Group(self, store, rank, size, timeout, ""))
        self._group.counts = True
        gloo = _Gloo(dist.PrefixStore("gloo/", store), rank, size, timeout=timeout)
        gloo.group = weakref.ref(self._group)
        number(gloo)
        self._backends: list[Any] = [gloo]
        for pg in (self, self._wrapped):
            pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            pg._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        if torch.cuda.is_available() and dist.is_nccl_available():
            settings = options if isinstance(options, dist.ProcessGroupNCCL.Options) else dist.ProcessGroupNCCL.Options()
            settings._timeout = timeout
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), rank, size, settings)
            number(nccl)
            self._backends.append(nccl)
            for pg in (self, self._wrapped):
                pg._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)

        self._group.meet_early()

    def getBackendName(self) -> str:
        return "switchyard"

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Bound the waits of this rank's calls from here on, those of torch's groups too."""
        self._group.set_timeout(timeout)
        for backend in self._backends:
            backend._set_default_timeout(timeout)

    def split_group(  # type: ignore[no-untyped-def]
        self, new_ranks, timeout=None, opts=None, group_name=None, group_desc=None, device_types=None
    ):
        """Make a group of some ranks, in their order, where all ranks call it. None is the group of the others."""
        self._splits += 1
        rank, ranks = self.rank(), list(new_ranks)
        kinds = {torch.device(kind).type for kind in device_types or self._device_types}
        missing = {kind.type for kind in self._device_types} - kinds
        if missing:
            without = ", ".join(sorted(missing))
            raise errors.Unsupported(f"switchyard: split_group: without {without}: a group has all devices of its parent")
        wrong = [r for r in ranks if not isinstance(r, int) or not 0 <= r < self.size()]
        if wrong or len(set(ranks)) != len(ranks):
            raise errors.InvalidArgument(f"switchyard: split_group: ranks {ranks}, want different ones of {self.size()}")
        limit = (self._group.timeout or c10d.default_pg_timeout) if timeout is None else timeout
        groups.check_timeout("split_group", limit)
        if rank not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{self._splits}"
        store = dist.PrefixStore(f"{name}/", self._store)
        pg = SwitchyardProcessGroup(store, ranks.index(rank), len(ranks), limit, opts)
        pg._set_group_name(name)
        pg._set_group_desc(group_desc or f"{self.group_desc}:split")
        return pg

    @property
    def supports_reconfigure(self) -> bool:
        return False

    def get_reconfigure_handle(self) -> str:
        raise errors.Unsupported(f"switchyard: get_reconfigure_handle: {_NO_OTHERS}")

    def reconfigure(self, *arguments: Any, **named: Any) -> Any:
        raise errors.Unsupported(f"switchyard: reconfigure: {_NO_OTHERS}")

    def merge_remote_group(self, *arguments: Any, **named: Any) -> Any:
        raise errors.Unsupported(f"switchyard: merge_remote_group: {_NO_OTHERS}")

    def _submit(
        self, operation: str, prepare: Callable[[], Submission], torchs: Callable[[Any], Any], outputs: list[Tensor]
    ) -> Any:
        """Submit an operation on tensors that are ours. Nobody waits for the ranks to meet."""
        return self._group.submit(operation, self._group.prepare(prepare), lambda pg: torchs(fallback.Rows(pg)), outputs)

    def _theirs(self, operation: str, tensors: list[Tensor], kinds: Any = (), gpus: bool = True) -> Any:
        """The groups that make a call which is not Switchyard's. It is counted, with the reason; see there."""
        why = fallback.reason(self._group, tensors, kinds, gpus)
        self._group.fell_back(operation, why, self._wrapped, tensors)
        return fallback.Rows(self._wrapped)

    def alltoall_base(  # type: ignore[no-untyped-def]
        self, output, input, output_split_sizes, input_split_sizes, opts=None
    ):
        opts = opts or dist.AllToAllOptions()
        if cuda.ours(output, input):
            return self._alltoall_cuda(output, input, output_split_sizes, input_split_sizes, opts)

        def torchs(pg: Any) -> Any:
            return pg.alltoall_base(output, input, listed(output_split_sizes), listed(input_split_sizes), opts)

        if output.dtype is not input.dtype or not ours(output, input):
            return torchs(self._theirs("all_to_all_single", [output, input]))
        return self._submit(
            "all_to_all_single",
            lambda: calls.exchange(self._group.shapes, output, input, output_split_sizes, input_split_sizes),
            torchs,
            [output],
        )

    def _operated(self, opts: Any, output: Tensor, input: Tensor, make: Callable[[Exchanges, int], bool]) -> Work | None:
        """The work of a call of CUDA tensors that make makes as an operator of torch, None where something about it is
        unusual."""
        made = calls.soonest(self, output, input, getattr(opts, "asyncOp", True), make)
        return made and (made[0] or Work(cuda.Enqueued(), [output]))

    def _alltoall_cuda(self, output, input, output_splits, input_splits, opts):  # type: ignore[no-untyped-def]
        work = self._operated(
            opts, output, input, lambda made, at: made.make(output, input, output_splits, input_splits, at)
        )
        if work is not None:
            return work
        gpu = self._gpu_of([input])
        if gpu is None:
            theirs = self._theirs("all_to_all_single", [output, input])
            return theirs.alltoall_base(output, input, listed(output_splits), listed(input_splits), opts)
        if getattr(opts, "asyncOp", True):
            return cuda.start(gpu, output, input, output_splits, input_splits)
        cuda.exchange(gpu, output, input, output_splits, input_splits)
        return Work(cuda.Enqueued(), [output])

    def _gpu_of(self, tensors: list[Tensor]) -> Gpu | None:
        """The communicator's end on the GPU of tensors that are ours; None where these GPUs cannot."""
        comm = self._group.wait()
        for x in tensors[1:]:
            cuda.one_device(tensors[0], x)
        return None if comm is None else cuda.gpu_of(comm, self._wrapped, tensors[0].get_device())

    def _on_gpu(
        self, opts: Any, outputs: list[Tensor], inputs: list[Tensor], prepare: Callable[[], list[Submission]],
        make: Callable[[Exchanges, int], bool] | None = None,
    ) -> Any:  # fmt: skip
        """Reductions or gathers of CUDA tensors that are ours; None where these GPUs cannot. make makes the call of one output
        and one input as an operator, which is sooner."""
        work = self._operated(opts, outputs[0], inputs[0], make) if make and len(outputs) == len(inputs) == 1 else None
        if work is not None:
            return work
        gpu = self._gpu_of([*inputs, *outputs])
        if gpu is None:
            return None
        work = cuda.reductions(gpu, gpu._prepare(prepare), outputs, getattr(opts, "asyncOp", True))
        return work or Work(cuda.Enqueued(), outputs)

    def alltoall(self, outputs, inputs, opts=None):  # type: ignore[no-untyped-def]
        """all_to_all of lists, which gloo does not have: through two tensors."""
        opts = opts or dist.AllToAllOptions()
        tensors = [*outputs, *inputs]
        on_gpu = all(cuda.ours(x, x) for x in tensors)
        if not (on_gpu or ours(*tensors)):
            return self._theirs("all_to_all", tensors).alltoall(outputs, inputs, opts)
        size = self._group.size
        if len(outputs) != size or len(inputs) != size:
            raise errors.InvalidArgument(f"switchyard: {len(outputs)} and {len(inputs)} tensors for {size} ranks")
        if on_gpu:
            gpu = self._gpu_of(tensors)
            if gpu is None:
                return self._theirs("all_to_all", tensors).alltoall(outputs, inputs, opts)
            gpu._prepare(lists.same_own, self._group.rank, outputs, inputs)
            work = cuda.exchange_lists(gpu, outputs, inputs, getattr(opts, "asyncOp", True))
            return work or Work(cuda.Enqueued(), outputs)
        source = torch.cat([as_bytes(readable(x)) for x in inputs])
        target = source.new_empty(sum(map(lists.nbytes, outputs)))
        back = apart(outputs, target)
        out_sizes, in_sizes = [*map(lists.nbytes, outputs)], [*map(lists.nbytes, inputs)]

        def prepare() -> Submission:
            lists.same_own(self._group.rank, outputs, inputs)
            function, arguments, _ = calls.exchange(self._group.shapes, target, source, out_sizes, in_sizes)
            return function, arguments, back

        def torchs(pg: Any) -> Any:
            return Work(Theirs(pg.alltoall_base(target, source, out_sizes, in_sizes)), outputs, back)

        return self._submit("all_to_all", prepare, torchs, outputs)

    def _op_of(self, call: str, tensors: list[Tensor], opts: Any) -> str:
        """The operator of a call's reductions, of which those are refused that gloo would fail at."""
        op = calls.op_name(opts.reduceOp)
        for x in tensors:
            calls.refuse_gloos(self, call, x, op)
        return op

    def allreduce(self, tensors, opts=None):  # type: ignore[no-untyped-def]
        opts = opts or dist.AllreduceOptions()
        kinds = kinds_of(tensors, self._op_of("all_reduce", tensors, opts))
        work = self._reduce_on_gpu(tensors, kinds, opts) if len(tensors) == 1 else None
        if work is not None:
            return work
        if len(tensors) != 1 or kinds[0] is None or not ours(*tensors):
            return self._theirs("all_reduce", tensors, kinds).allreduce(tensors, opts)
        return self._reduce("all_reduce", tensors[0], kinds[0], opts)

    def allreduce_coalesced(self, tensors, opts=None):  # type: ignore[no-untyped-def]
        opts = opts or dist.AllreduceCoalescedOptions()
        kinds = kinds_of(tensors, self._op_of("all_reduce_coalesced", tensors, opts))
        work = self._reduce_on_gpu(tensors, kinds, opts)
        if work is not None:
            return work
        if None in kinds or not ours(*tensors):
            return self._theirs("all_reduce_coalesced", tensors, kinds).allreduce_coalesced(tensors, opts)
        return every([self._reduce("all_reduce_coalesced", *each, opts) for each in zip(tensors, kinds)], tensors)

    def _reduce_on_gpu(self, tensors: list[Tensor], kinds: list[Any], opts: Any) -> Any:
        """all_reduce of tensors that are all on a GPU; None where the library does not have it, or these GPUs cannot."""
        if not tensors or None in kinds or not all(map(cuda.ours, tensors, tensors)):
            return None
        return self._on_gpu(
            opts,
            tensors,
            tensors,
            lambda: [calls.reduce(*each) for each in zip(tensors, kinds)],
            lambda made, at: made.reduce(tensors[0], kinds[0], at),
        )

    def _reduce(self, operation: str, x: Tensor, kind: Any, opts: Any) -> Any:
        def torchs(pg: Any) -> Any:
            options = dist.AllreduceOptions()
            options.reduceOp = opts.reduceOp
            return pg.allreduce([x], options)

        return self._submit(operation, lambda: calls.reduce(x, kind), torchs, [x])

    def _allgather_base(self, output, input, opts=None):  # type: ignore[no-untyped-def]
        opts = opts or c10d.AllgatherOptions()
        work = self._gather_on_gpu([output], [input], opts)
        if work is not None:
            return work
        if not ours(output, input):
            return self._theirs("all_gather_into_tensor", [output, input])._allgather_base(output, input, opts)
        return self._submit(
            "all_gather_into_tensor",
            lambda: calls.gather(self._group.size, output, input),
            lambda pg: pg._allgather_base(output, input, opts),
            [output],
        )

    def _gather_on_gpu(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        """all_gather into tensors that are all on a GPU; None where they are not, or these GPUs cannot."""
        if not outputs or not all(map(cuda.ours, outputs, inputs)):
            return None
        n = self._group.size
        return self._on_gpu(
            opts,
            outputs,
            inputs,
            lambda: [calls.gather(n, *each) for each in zip(outputs, inputs)],
            lambda made, at: made.gather(outputs[0], inputs[0], at),
        )

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):  # type: ignore[no-untyped-def]
        work = self._gather_on_gpu(outputs, inputs, opts)
        if work is not None:
            return work
        if not ours(*outputs, *inputs):
            theirs = self._theirs("all_gather_into_tensor_coalesced", [*outputs, *inputs])
            return theirs.allgather_into_tensor_coalesced(outputs, inputs, opts or c10d.AllgatherOptions())
        return every([self._allgather_base(o, i) for o, i in zip(outputs, inputs)], outputs)

    def _reduce_scatter_base(self, output, input, opts=None):  # type: ignore[no-untyped-def]
        opts = opts or dist.ReduceScatterOptions()
        kind = calls.kind_of(input, self._op_of("reduce_scatter_tensor", [input], opts))
        work = self._scatter_on_gpu([output], [input], [kind], opts)
        if work is not None:
            return work
        if kind is None or not ours(output, input):
            return self._theirs("reduce_scatter_tensor", [output, input], [kind])._reduce_scatter_base(output, input, opts)
        return self._submit(
            "reduce_scatter_tensor",
            lambda: calls.scatter(self._group.size, output, input, kind),
            lambda pg: pg._reduce_scatter_base(output, input, opts),
            [output],
        )

    def _scatter_on_gpu(self, outputs: list[Tensor], inputs: list[Tensor], kinds: list[Any], opts: Any) -> Any:
        """reduce_scatter of tensors that are all on a GPU; None where the library does not have it, or these GPUs cannot."""
        if not outputs or None in kinds or not all(map(cuda.ours, outputs, inputs)):
            return None
        n = self._group.size
        return self._on_gpu(
            opts,
            outputs,
            inputs,
            lambda: [calls.scatter(n, *each) for each in zip(outputs, inputs, kinds)],
            lambda made, at: made.scatter(outputs[0], inputs[0], kinds[0], at),
        )

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):  # type: ignore[no-untyped-def]
        opts = opts or dist.ReduceScatterOptions()
        op = self._op_of("reduce_scatter_tensor_coalesced", inputs, opts)
        kinds = [calls.kind_of(x, op) for x in inputs]
        work = self._scatter_on_gpu(outputs, inputs, kinds, opts)
        if work is not None:
            return work
        if None in kinds or not ours(*outputs, *inputs):
            theirs = self._theirs("reduce_scatter_tensor_coalesced", [*outputs, *inputs], kinds)
            return theirs.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        return every([self._reduce_scatter_base(o, i, opts) for o, i in zip(outputs, inputs)], outputs)

    def allgather(self, outputs, inputs, opts=None):  # type: ignore[no-untyped-def]
        opts, targets = opts or c10d.AllgatherOptions(), flat(outputs)
        one = len(outputs) == 1 and len(inputs) == 1

        def prepare() -> Submission:
            return lists.all_gather(self._group.size, targets, inputs[0])

        if one and all(cuda.ours(x, x) for x in (*targets, *inputs)):
            work = self._on_gpu(opts, targets, inputs, lambda: [prepare()])
            return work or self._theirs("all_gather", [*targets, *inputs]).allgather(outputs, inputs, opts)
        if not one or not ours(*targets, *inputs):
            return self._theirs("all_gather", [*targets, *inputs]).allgather(outputs, inputs, opts)
        return self._submit("all_gather", prepare, lambda pg: pg.allgather(outputs, inputs, opts), targets)

    def reduce_scatter(self, outputs, inputs, opts=None):  # type: ignore[no-untyped-def]
        opts = opts or dist.ReduceScatterOptions()
        op = self._op_of("reduce_scatter", outputs, opts)
        kind = calls.kind_of(outputs[0], op) if outputs else None
        one, sources = kind is not None and len(outputs) == 1 and len(inputs) == 1, flat(inputs)

        def prepare() -> Submission:
            assert kind is not None
            return lists.reduce_scatter(self._group.size, outputs[0], sources, kind)

        if one and all(cuda.ours(x, x) for x in (*outputs, *sources)):
            work = self._on_gpu(opts, outputs, sources, lambda: [prepare()])
            return work or self._theirs("reduce_scatter", [*outputs, *sources]).reduce_scatter(outputs, inputs, opts)
        if not one or not ours(*outputs, *sources):
            return self._theirs("reduce_scatter", [*outputs, *sources], [kind]).reduce_scatter(outputs, inputs, opts)
        return self._submit("reduce_scatter", prepare, lambda pg: pg.reduce_scatter(outputs, inputs, opts), outputs)

    def gather(self, *arguments, **named):  # type: ignore[no-untyped-def]
        if named or len(arguments) != 3 or not isinstance(arguments[2], dist.GatherOptions):  # torch's variant of one tensor
            return self._theirs("gather", []).gather(*arguments, **named)
        (outputs, inputs, opts), group = arguments, self._group
        targets = flat(outputs)
        if len(inputs) == 1 and all(cuda.ours(x, x) for x in (*inputs, *targets)):
            work = self._on_gpu(
                opts, targets, inputs, lambda: [lists.gather(group.shapes, group.rank, opts.rootRank, targets, inputs[0])]
            )
            return work or self._theirs("gather", [*inputs, *targets]).gather(outputs, inputs, opts)
        if len(inputs) != 1 or not ours(*inputs, *targets):
            return self._theirs("gather", [*inputs, *targets], gpus=False).gather(outputs, inputs, opts)
        return self._submit(
            "gather",
            lambda: lists.gather(group.shapes, group.rank, opts.rootRank, targets, inputs[0]),
            lambda pg: pg.gather(outputs, inputs, opts),
            targets,
        )

    def scatter(self, *arguments, **named):  # type: ignore[no-untyped-def]
        if named or len(arguments) != 3 or not isinstance(arguments[2], dist.ScatterOptions):  # torch's variant of one tensor
            return self._theirs("scatter", []).scatter(*arguments, **named)
        (outputs, inputs, opts), group = arguments, self._group
        sources = flat(inputs)
        if len(outputs) == 1 and all(cuda.ours(x, x) for x in (*outputs, *sources)):
            work = self._on_gpu(
                opts, outputs, sources, lambda: [lists.scatter(group.shapes, group.rank, opts.rootRank, outputs[0], sources)]
            )
            return work or self._theirs("scatter", [*outputs, *sources]).scatter(outputs, inputs, opts)
        if len(outputs) != 1 or not ours(*outputs, *sources):
            return self._theirs("scatter", [*outputs, *sources], gpus=False).scatter(outputs, inputs, opts)
        return self._submit(
            "scatter",
            lambda: lists.scatter(group.shapes, group.rank, opts.rootRank, outputs[0], sources),
            lambda pg: pg.scatter(outputs, inputs, opts),
            outputs,
        )

    def reduce(self, tensors, opts=None, **named):  # type: ignore[no-untyped-def]
        if opts is None:  # torch's variants with an operator by name, whose backend refuses
            return self._theirs("reduce", tensors).reduce(tensors, **named)
        kinds = kinds_of(tensors, self._op_of("reduce", tensors, opts))
        if len(tensors) == 1 and tensors[0].is_cuda:
            own = tensors if self._group.rank == opts.rootRank else [tensors[0].detach().clone()]
            work = self._reduce_on_gpu(own, kinds, opts)
            return work or self._theirs("reduce", tensors, kinds).reduce(tensors, opts)
        if len(tensors) != 1 or kinds[0] is None or not ours(*tensors):
            return self._theirs("reduce", tensors, kinds, gpus=False).reduce(tensors, opts)
        (x,) = tensors
        if self._group.rank != opts.rootRank:  # all ranks reduce, and what the root alone is to get stays in a copy
            x = x.detach().clone()
        return self._reduce("reduce", x, kinds[0], opts)

    # Torch's names of them from 2.15 on.
    all_to_all_single = alltoall_base
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def barrier(self, opts=None):  # type: ignore[no-untyped-def]
        opts = opts or dist.BarrierOptions()
        if opts.device_ids:
            return self._theirs("barrier", []).barrier(opts)
        calls.settle()
        return self._submit("barrier", lambda: calls.BARRIER, lambda pg: pg.barrier(opts), [])

    def _start_coalescing(self, device):  # type: ignore[no-untyped-def]
        self._together = []
        self._wrapped._start_coalescing(device)

    def _end_coalescing(self, device):  # type: ignore[no-untyped-def]
        """The messages since then, as one, and the calls that torch's backend has coalesced."""
        ops, self._together = self._together, None
        theirs = self._wrapped._end_coalescing(device)
        if not ops:
            return theirs or Work(cuda.Enqueued(), [])
        gpu = self._gpu_of([ops[0][1]])
        assert gpu is not None
        ours = pairs.on_gpu(gpu, ops, True)
        return ours if theirs is None else every([ours, Work(Theirs(theirs), [])], [x for _, x, _, _ in ops])

    def shutdown(self) -> None:
        """Leave the group."""
        groups.forget(self)
        for backend in self._backends:
            backend.shutdown()

    def abort(self) -> None:
        """Fail the group on all ranks."""
        if self._group.comm is not None:
            self._group.comm.abort("the process group was aborted")
        for backend in self._backends:
            backend.abort()

    # torch calls these from C++ too, where a group of Python's has to name them. Those that it does not name run with the
    # interpreter's lock held in torch 2.15. They wait for a lock of gloo's, whose threads may hold that one and wait for the
    # interpreter to free a tensor.

    def broadcast(self, tensors, opts=None):  # type: ignore[no-untyped-def]
        opts, group = opts or dist.BroadcastOptions(), self._group
        if len(tensors) != 1 or not (cuda.ours(*tensors, *tensors) or ours(*tensors)):
            return self._theirs("broadcast", tensors).broadcast(tensors, opts)

        def prepare() -> Submission:
            return lists.broadcast(group.rank, opts.rootRank, tensors[0])

        if tensors[0].is_cuda:
            work = self._on_gpu(opts, tensors, tensors, lambda: [prepare()])
            return work or self._theirs("broadcast", tensors).broadcast(tensors, opts)
        return self._submit("broadcast", prepare, lambda pg: pg.broadcast(tensors, opts), tensors)

    def send(self, tensors, dst, tag=0):  # type: ignore[no-untyped-def]
        return self._message(False, tensors, dst, tag, lambda pg: pg.send(tensors, dst, tag))

    def recv(self, tensors, src, tag=0):  # type: ignore[no-untyped-def]
        return self._message(True, tensors, src, tag, lambda pg: pg.recv(tensors, src, tag))

    def recv_anysource(self, tensors, tag=0):  # type: ignore[no-untyped-def]
        return self._message(True, tensors, None, tag, lambda pg: pg.recv_anysource(tensors, tag))

    def _message(self, receive: bool, tensors: list[Tensor], peer: int | None, tag: int, torchs: Callable[[Any], Any]) -> Any:
        name = "recv" if receive else "send"
        if len(tensors) == 1 and cuda.ours(*tensors, *tensors):
            together, self._together = self._together, None  # where the next line raises, torch ends no batch
            gpu = self._gpu_of(tensors)
            self._together = together
            if gpu is None:
                return torchs(self._theirs(name, tensors))
            if self._together is not None:  # batch_isend_irecv
                self._together.append((receive, tensors[0], peer, tag))
                return Work(cuda.Enqueued(), tensors)
            return pairs.on_gpu(gpu, [(receive, tensors[0], peer, tag)], True)
        if len(tensors) != 1 or not ours(*tensors):
            return torchs(self._theirs(name, tensors, gpus=False))
        call = self._group.prepare(lambda: pairs.submission(self._group, [(receive, tensors[0], peer, tag)]))
        return self._group.submit(name, call, lambda pg: torchs(fallback.Rows(pg)), tensors)


def process_group(options: Any, backend_options: Any = None) -> SwitchyardProcessGroup:
    """Torch calls this to make a process group of the backend "switchyard"."""
    pg = SwitchyardProcessGroup(options.store, options.group_rank, options.group_size, options.timeout, backend_options)
    pg._set_group_name(options.group_id)
    return pg
