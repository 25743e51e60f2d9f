"""Calls of deep_ep next to the Dispatcher calls under them, in one run.

    python bench.py [--device cuda] [--ranks 2] [--tokens 128,4096] [--hidden 7168] [--experts 256] [--top-k 8] [--calls 60]
                    [--best | --profile] [--pool 1024] [--steps 1000]

A pair is a dispatch and a combine of the same rows, by random uniform routing. Each call of deep_ep alternates with the same by
switchyard.Dispatcher, and figures are medians of the slowest rank: "end" from the common start to the end of the pair on the
GPU, "host" until the calls have returned. In graphs 10 pairs follow each other. --device says where; without it ranks are on
GPUs where there is one for each, else on the host, where "end" is "host".

What Python costs is measured by one rank with few small tokens on the host: with --best a figure is of the fastest of --calls
loops of 10 calls that follow each other, and dispatches and combines have lines of their own.

    python bench.py --best --ranks 1 --tokens 8 --hidden 256 --experts 8 --top-k 4

With --pool results of deep_ep that are rows by token lie in so many MiB of the symmetric heap, where peers write them.

With --profile it prints instead in which functions the calls of deep_ep spend the host's time.

With --steps that many steps of all kinds of calls follow, for the memory of the process, of torch's allocator and of the GPU
after every fifth of them, and then routings without their rows, for the bytes of one by tokens sent and rows received.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import math
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import switchyard
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import deep_ep

IN_A_GRAPH = 10
IN_A_LOOP = 10


class Rank:
    """One rank's tokens, and its clock."""

    def __init__(self, rank: int, arguments: argparse.Namespace) -> None:
        self.rank, self.arguments = rank, arguments
        self.cuda = arguments.device == "cuda"
        self.device = torch.device("cuda", rank) if self.cuda else torch.device("cpu")
        self.type = torch.bfloat16
        #: Memory for results that peers reach.
        self.pool: Any = None

    def tokens(self, count: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(self.rank)
        a = self.arguments
        x = torch.randn(count, a.hidden, device=self.device).to(self.type)
        idx = torch.rand(count, a.experts, device=self.device).topk(a.top_k)[1]
        return x, idx, torch.rand(count, a.top_k, device=self.device)

    def settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        switchyard.barrier(dist.group.WORLD)

    def once(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Microseconds to the end of a call and until it returned."""
        self.settle()
        if self.cuda:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
        before = time.perf_counter()
        call()
        host = (time.perf_counter() - before) * 1e6
        if not self.cuda:
            return host, host
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) * 1e3, host

    def fastest(self, what: str, theirs: Callable[[], Any], ours: Callable[[], Any]) -> None:
        """Print the times of two calls in the fastest loops."""
        best = [math.inf, math.inf]
        for _ in range(self.arguments.calls):
            for i, call in enumerate((theirs, ours)):
                self.settle()
                before = time.perf_counter()
                for _ in range(IN_A_LOOP):
                    call()
                best[i] = min(best[i], (time.perf_counter() - before) * 1e6 / IN_A_LOOP)
        if self.rank == 0:
            print(
                f"{what:34} deep_ep {best[0]:7.1f} | Dispatcher {best[1]:7.1f} | more: {best[0] - best[1]:6.1f} us", flush=True
            )

    def profiled(self, what: str, theirs: Callable[[], Any]) -> None:
        """Print in which functions rank 0 spends the calls."""
        profile = cProfile.Profile()
        for n in range(self.arguments.calls + 10):
            self.settle()
            if n >= 10:
                profile.enable()
            theirs()
            profile.disable()
        if self.rank == 0:
            print(f"{what}: {self.arguments.calls} calls", flush=True)
            pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(18)

    def compare(self, what: str, theirs: Callable[[], Any], ours: Callable[[], Any], part: int = 1) -> None:
        """Print the times of two calls that alternate."""
        if self.arguments.profile:
            self.profiled(what, theirs)
            return
        if self.arguments.best:
            self.fastest(what, theirs, ours)
            return
        times: list[list[tuple[float, float]]] = [[], []]
        for n in range(self.arguments.calls + 10):
            for call, into in zip((theirs, ours), times):
                took = self.once(call)
                if n >= 10:
                    into.append(took)
        columns = torch.tensor([statistics.median(column) / part for into in times for column in zip(*into)])
        columns = columns.to(self.device)
        dist.all_reduce(columns, dist.ReduceOp.MAX)
        if self.rank == 0:
            end, host, plain_end, plain_host = columns.tolist()
            print(
                f"{what:34} deep_ep end {end:7.1f} host {host:7.1f} | Dispatcher end {plain_end:7.1f} host {plain_host:7.1f}"
                f" | more: end {end - plain_end:6.1f} host {host - plain_host:6.1f} us",
                flush=True,
            )

    def pooled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call with its results in memory that peers reach."""

        def made(*arguments: Any) -> Any:
            if torch.cuda.is_current_stream_capturing():
                return call(*arguments)
            with torch.cuda.use_mem_pool(self.pool):
                return call(*arguments)

        return made

    def graphs(self, what: str, theirs: Callable[[], Any], ours: Callable[[], Any]) -> None:
        """The same in graphs."""
        if not self.cuda or self.arguments.profile:
            return
        made = []
        for call in (theirs, ours):
            for _ in range(3):
                call()
            self.settle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool.id if self.pool is not None and call is theirs else None):
                for _ in range(IN_A_GRAPH):
                    call()
            made.append(graph)
        self.compare(f"{what}, in a graph", made[0].replay, made[1].replay, IN_A_GRAPH)

    def halves(self, what: str, of: Any, theirs: Callable[[], Any], dispatcher: Any, ours: Callable[[], Any]) -> None:
        """The same for dispatches and combines apart."""
        self.compare(f"  {what}: dispatch", theirs, ours)
        there, here = theirs(), ours()
        self.compare(f"  {what}: combine", lambda: of.combine(*there), lambda: dispatcher.combine(*here))

    # What is measured

    def normal(self, count: int, float8: bool) -> None:
        """Pairs of the first generation: with a wait of the host for counts, and with worst-case lengths."""
        a = self.arguments
        x, idx, weights = self.tokens(count)
        scales = torch.rand(count, -(-a.hidden // 128), device=self.device) if float8 else None
        sent = x.to(torch.float8_e4m3fn) if float8 else x
        buffer = deep_ep.Buffer(dist.group.WORLD)
        per_rank, _, per_expert, inside, _ = buffer.get_dispatch_layout(idx, a.experts)
        dispatcher = switchyard.Dispatcher(
            a.experts, a.top_k, a.hidden, max_tokens=count, dtype=sent.dtype, combine_dtype=self.type, layout="token_major",
            sources=True, handles=2, host_counts=self.cuda, scale_format="float32", group=dist.group.WORLD, device=self.device,
            low_latency=count <= 256,
        )  # fmt: skip
        back = torch.randn(dispatcher.max_rows, a.hidden, device=self.device).to(self.type)
        name = f"{count} tokens {'fp8' if float8 else 'bf16'}"

        x = (sent, scales) if float8 else sent

        def first(worst: int = 0) -> Any:
            rows, _, _, _, handle, _ = buffer.dispatch(
                x, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank,
                is_token_in_rank=inside, num_tokens_per_expert=per_expert, num_worst_tokens=worst,
            )  # fmt: skip
            return back[: (rows[0] if float8 else rows).shape[0]], handle

        def second() -> Any:
            rows, _, _, handle, _ = elastic.dispatch(x, idx, weights, num_experts=a.experts, num_max_tokens_per_rank=count)
            return back[: (rows[0] if float8 else rows).shape[0]], handle

        def plain(waits: bool = True) -> Any:
            got = dispatcher.dispatch(sent, idx, weights, scales=scales)
            n = got.host_counts().rows if waits or not self.cuda else dispatcher.max_rows
            return back[:n], got

        def expanded() -> Any:
            rows, _, _, handle, _ = elastic.dispatch(
                x, idx, weights, num_experts=a.experts, num_max_tokens_per_rank=count, do_expand=True
            )
            return wide[: rows.shape[0]], handle

        def by_expert() -> Any:
            got = flat.dispatch(sent, idx, weights)
            return wide[: got.host_counts().rows], got

        def pair(of: Any, dispatch: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: of.combine(*dispatch())

        if self.pool is not None:
            first, second = self.pooled(first), self.pooled(second)
        worst = count * a.ranks
        elastic = deep_ep.ElasticBuffer(dist.group.WORLD)
        ways: list[tuple[str, Any, Callable[[], Any], Callable[[], Any]]] = [
            ("V1", buffer, first, plain),
            ("V1 worst-case", buffer, lambda: first(worst), lambda: plain(False)),
            ("V2", elastic, second, plain),
        ]
        for way, of, theirs, ours in ways:
            self.compare(f"{name}, {way}", pair(of, theirs), pair(dispatcher, ours))
            if way == "V1 worst-case":
                self.graphs(f"{name}, {way}", pair(of, theirs), pair(dispatcher, ours))
            if a.best:
                self.halves(f"{name}, {way}", of, theirs, dispatcher, ours)
        if not float8 and count <= 1024:  # the flat output has a row for each choice
            flat = switchyard.Dispatcher(
                a.experts, a.top_k, a.hidden, max_tokens=count, dtype=sent.dtype, combine_dtype=self.type, layout="flat",
                align=1, sources=True, handles=2, host_counts=self.cuda, group=dist.group.WORLD, device=self.device,
            )  # fmt: skip
            wide = torch.randn(flat.max_rows, a.hidden, device=self.device).to(self.type)
            self.compare(f"{name}, V2 expanded", pair(elastic, expanded), pair(flat, by_expert))
            if a.best:
                self.halves(f"{name}, V2 expanded", elastic, expanded, flat, by_expert)
            flat.close()
        dispatcher.close()
        elastic.destroy()
        buffer.destroy()

    def few(self, count: int) -> None:
        """Pairs of low latency of float8, with weights at the combine; the Dispatcher has them at the dispatch."""
        a = self.arguments
        x, idx, weights = self.tokens(count)
        buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
        dispatcher = switchyard.Dispatcher(
            a.experts, a.top_k, a.hidden, max_tokens=count, dtype=self.type, layout="slab", low_latency=True, quantize=True,
            scale_columns=True, row_weights=True, sources=True, handles=2, align=1, group=dist.group.WORLD, device=self.device,
        )  # fmt: skip
        shape = (a.experts // a.ranks, a.ranks * count, a.hidden)
        back = torch.randn(shape, device=self.device).to(self.type)

        flat = back.view(-1, a.hidden)

        def theirs() -> Any:
            handle = buffer.low_latency_dispatch(x, idx, count, a.experts)[2]
            return buffer.low_latency_combine(back, idx, weights, handle)[0]

        def ours() -> Any:
            return dispatcher.combine(flat, dispatcher.dispatch(x, idx, weights))

        name = f"{count} tokens fp8, low latency"
        self.compare(name, theirs, ours)
        self.graphs(name, theirs, ours)
        if a.best:
            self.compare(
                f"  {name}: dispatch", lambda: buffer.low_latency_dispatch(x, idx, count, a.experts),
                lambda: dispatcher.dispatch(x, idx, weights),
            )  # fmt: skip
            handle, got = buffer.low_latency_dispatch(x, idx, count, a.experts)[2], dispatcher.dispatch(x, idx, weights)
            self.compare(
                f"  {name}: combine", lambda: buffer.low_latency_combine(back, idx, weights, handle),
                lambda: dispatcher.combine(flat, got),
            )  # fmt: skip
            del got
        dispatcher.close()
        buffer.destroy()

    # Memory

    def memory(self) -> tuple[float, ...]:
        """MiB of this process, and on a GPU those that torch has given away, those that it has reserved, and those of the GPU
        that are taken by anybody."""
        gc.collect()
        with open("/proc/self/statm") as f:
            sizes = [int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")]
        if self.cuda:
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            sizes += [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free]
        return tuple(size / 2**20 for size in sizes)

    def steps(self, most: int) -> None:
        """Steps of all kinds of calls, with other numbers of tokens and other routings each time."""
        a = self.arguments
        buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD)
        drawn, few = [self.tokens(most - most // 8 * n) for n in range(4)], min(most // 2, 128)
        for step in range(a.steps + 1):
            x, idx, weights = drawn[(step + self.rank) % 4]
            rows, _, _, _, handle, _ = self.sent(buffer, x, idx, weights)
            buffer.combine(rows, handle)
            buffer.dispatch(x, handle=handle)
            rows, _, beside, handle, _ = elastic.dispatch(x, idx, weights, num_experts=a.experts, do_expand=step % 2 == 0)
            elastic.combine(rows, handle, beside)
            rows, _, handle, _, _ = buffer.low_latency_dispatch(x[:few], idx[:few], few, a.experts, use_fp8=False)
            buffer.low_latency_combine(rows, idx[:few], weights[:few], handle)
            if step % max(a.steps // 5, 1) == 0:
                taken = ", ".join(f"{size:.1f}" for size in self.memory())
                if self.rank == 0:
                    print(f"after {step + 1:5} steps of {most} tokens: {taken} MiB", flush=True)
        elastic.destroy()
        buffer.destroy()

    def routings(self, count: int) -> None:
        """The bytes of a live routing."""
        buffer, (x, idx, weights) = deep_ep.Buffer(dist.group.WORLD), self.tokens(count)
        handles = []
        for n in range(17):
            rows, _, _, _, handle, _ = self.sent(buffer, x, idx, weights)
            came = rows.shape[0]
            del rows, _
            handles.append(handle)
            if n == 0:
                before = self.held()
        each = (self.held() - before) / 16 / (count + came)
        if self.rank == 0:
            print(f"a routing of {count} tokens and {came} rows: {each:.1f} bytes for each of them", flush=True)
        handles.clear()
        buffer.destroy()

    def held(self) -> int:
        """Bytes of tensors that are alive."""
        gc.collect()
        if self.cuda:
            return torch.cuda.memory_allocated()
        alive = [x.untyped_storage() for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in alive}.values())

    def sent(self, buffer: Any, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> Any:
        """A dispatch of the first generation."""
        per_rank, _, per_expert, inside, _ = buffer.get_dispatch_layout(idx, self.arguments.experts)
        return buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank,
            is_token_in_rank=inside, num_tokens_per_expert=per_expert,
        )  # fmt: skip


def measure(rank: int, store: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    here = Rank(rank, arguments)
    if here.cuda:
        torch.cuda.set_device(rank)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(arguments.ranks), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "nccl" if here.cuda else "gloo", store=dist.FileStore(store, arguments.ranks), rank=rank, world_size=arguments.ranks
    )
    if arguments.pool:
        here.pool = switchyard.mem_pool(arguments.pool << 20, dist.group.WORLD, here.device)
    for count in arguments.tokens:
        here.few(count) if count <= 1024 else None
        for float8 in (False, True):
            here.normal(count, float8)
    if arguments.steps:
        here.steps(max(arguments.tokens))
        here.routings(max(arguments.tokens))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[128, 4096])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--pool", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--device", choices=["cuda", "cpu"])
    arguments = parser.parse_args()
    if arguments.device is None:
        arguments.device = "cuda" if torch.cuda.device_count() >= arguments.ranks else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(os.path.join(folder, "store"), arguments), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
