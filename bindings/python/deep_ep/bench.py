"""Calls of deep_ep next to the Dispatcher calls under them, in one run.

    python bench.py [--ranks 2] [--tokens 128,4096] [--hidden 7168] [--experts 256] [--top-k 8] [--calls 60]

A pair is a dispatch and a combine of the same rows, by random uniform routing. Each call of deep_ep alternates with the same by
switchyard.Dispatcher, and figures are medians of the slowest rank: "end" from the common start to the end of the pair on the
GPU, "host" until the calls have returned. In graphs 10 pairs follow each other. Without a GPU for each rank all is on the host,
where "end" is "host"; one rank there measures what Python costs.
"""

from __future__ import annotations

import argparse
import os
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


class Rank:
    """One rank's tokens, and its clock."""

    def __init__(self, rank: int, arguments: argparse.Namespace) -> None:
        self.rank, self.arguments = rank, arguments
        self.cuda = torch.cuda.device_count() >= arguments.ranks
        self.device = torch.device("cuda", rank) if self.cuda else torch.device("cpu")
        self.type = torch.bfloat16

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

    def compare(self, what: str, theirs: Callable[[], Any], ours: Callable[[], Any], part: int = 1) -> None:
        """Print the times of two calls that alternate."""
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

    def graphs(self, what: str, theirs: Callable[[], Any], ours: Callable[[], Any]) -> None:
        """The same in graphs."""
        if not self.cuda:
            return
        made = []
        for call in (theirs, ours):
            for _ in range(3):
                call()
            self.settle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(IN_A_GRAPH):
                    call()
            made.append(graph)
        self.compare(f"{what}, in a graph", made[0].replay, made[1].replay, IN_A_GRAPH)

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
        )  # fmt: skip
        back = torch.randn(dispatcher.max_rows, a.hidden, device=self.device).to(self.type)
        name = f"{count} tokens {'fp8' if float8 else 'bf16'}"

        def theirs(worst: int = 0) -> Any:
            rows, _, _, _, handle, _ = buffer.dispatch(
                (sent, scales) if float8 else sent, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank,
                is_token_in_rank=inside, num_tokens_per_expert=per_expert, num_worst_tokens=worst,
            )  # fmt: skip
            rows = rows[0] if float8 else rows
            return buffer.combine(back[: rows.shape[0]], handle)[0]

        def ours(waits: bool = True) -> Any:
            got = dispatcher.dispatch(sent, idx, weights, scales=scales)
            n = got.host_counts().rows if waits or not self.cuda else dispatcher.max_rows
            made = dispatcher.combine(back[:n], got)
            got.release()
            return made

        worst = count * a.ranks
        self.compare(f"{name}, V1", theirs, ours)
        self.compare(f"{name}, V1 worst-case", lambda: theirs(worst), lambda: ours(False))
        self.graphs(f"{name}, V1 worst-case", lambda: theirs(worst), lambda: ours(False))
        elastic = deep_ep.ElasticBuffer(dist.group.WORLD)

        def second() -> Any:
            rows, _, _, handle, _ = elastic.dispatch(
                (sent, scales) if float8 else sent, idx, weights, num_experts=a.experts, num_max_tokens_per_rank=count
            )
            rows = rows[0] if float8 else rows
            return elastic.combine(back[: rows.shape[0]], handle)[0]

        self.compare(f"{name}, V2", second, ours)
        dispatcher.close()
        elastic.destroy()
        buffer.destroy()

    def few(self, count: int) -> None:
        """Pairs of low latency of float8, with weights at the combine; the Dispatcher has them beside the dispatch."""
        a = self.arguments
        x, idx, weights = self.tokens(count)
        buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
        dispatcher = switchyard.Dispatcher(
            a.experts, a.top_k, a.hidden, max_tokens=count, dtype=self.type, layout="slab", low_latency=True, quantize=True,
            scale_columns=True, row_weights=True, sources=True, handles=2, group=dist.group.WORLD, device=self.device,
        )  # fmt: skip
        shape = (a.experts // a.ranks, a.ranks * count, a.hidden)
        back = torch.randn(shape, device=self.device).to(self.type)

        def theirs() -> Any:
            handle = buffer.low_latency_dispatch(x, idx, count, a.experts)[2]
            return buffer.low_latency_combine(back, idx, weights, handle)[0]

        def ours() -> Any:
            got = dispatcher.dispatch(x, idx, weights)
            made = dispatcher.combine(back.view(-1, a.hidden), got)
            got.release()
            return made

        self.compare(f"{count} tokens fp8, low latency", theirs, ours)
        self.graphs(f"{count} tokens fp8, low latency", theirs, ours)
        dispatcher.close()
        buffer.destroy()


def measure(rank: int, store: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    here = Rank(rank, arguments)
    if here.cuda:
        torch.cuda.set_device(rank)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(arguments.ranks), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "nccl" if here.cuda else "gloo", store=dist.FileStore(store, arguments.ranks), rank=rank, world_size=arguments.ranks
    )
    for count in arguments.tokens:
        here.few(count) if count <= 1024 else None
        for float8 in (False, True):
            here.normal(count, float8)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[128, 4096])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--calls", type=int, default=60)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(os.path.join(folder, "store"), arguments), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
