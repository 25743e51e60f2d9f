"""all_to_all_single on GPUs, next to NCCL."""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.distributed as dist

import switchyard

from .common import GRAPH, Report, name_of, ratio_of, size_of, timed


class Buffers:
    """Sets of tensors of size bytes a rank that take turns, with values that tell who sent which element to whom."""

    def __init__(self, size: int, rank: int, ranks: int, symmetric: bool) -> None:
        n = max(size // 4 // ranks, 1)
        self.sets = max(1, min(8, (1 << 27) // size))
        mine = torch.arange(ranks * n, device="cuda", dtype=torch.int32).view(ranks, n)
        self.x = [mine + (rank << 24) + (k << 27) for k in range(self.sets)]
        make = switchyard.empty if symmetric else torch.empty
        self.y = [make(ranks, n, dtype=torch.int32, device="cuda") for _ in range(self.sets)]
        part = torch.arange(rank * n, rank * n + n, device="cuda", dtype=torch.int32)
        sender = torch.arange(ranks, device="cuda", dtype=torch.int32)[:, None]
        self.want = [part + (sender << 24) + (k << 27) for k in range(self.sets)]
        self.symmetric = symmetric

    def free(self) -> None:
        torch.cuda.synchronize()
        if self.symmetric:
            for y in self.y:
                switchyard.free(y)


class Side:
    """One library on some buffers."""

    def __init__(self, module, buffers: Buffers) -> None:
        self.module, self.buffers = module, buffers
        self.eager, self.host, self.replayed = [], [], []
        self.check(lambda: self.calls(max(GRAPH, buffers.sets)))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.calls(GRAPH)
        self.check(self.graph.replay)

    def calls(self, n: int) -> None:
        b, call = self.buffers, self.module.all_to_all_single
        for k in range(n):
            call(b.y[k % b.sets], b.x[k % b.sets])

    def replays(self, n: int) -> None:
        for _ in range(n):
            self.graph.replay()

    def check(self, run) -> None:
        for y in self.buffers.y:
            y.fill_(-1)
        switchyard.barrier()  # a peer may write a symmetric output as soon as it can
        run()
        torch.cuda.synchronize()
        for k, (y, want) in enumerate(zip(self.buffers.y, self.buffers.want)):
            wrong = int((y != want).sum())
            if wrong:
                raise SystemExit(f"{self.module.__name__}: {wrong} of {y.numel()} elements of buffer {k} are wrong")

    def time(self, n: int) -> None:
        self.calls(5)
        gpu, host = timed(self.calls, n)
        self.eager.append(gpu)
        self.host.append(host)
        self.replays(1)
        self.replayed.append(timed(self.replays, max(n // 10, 1))[0] / GRAPH)


def us(side: Side | None, what: str) -> str:
    return f"{statistics.median(getattr(side, what)) * 1e6:.1f}" if side else "-"


def compared(sides: list[Side], what: str) -> str:
    return ratio_of(*(getattr(side, what) for side in sides)) if len(sides) == 2 else f"{'-':>7}"


def on_gpus(rank: int, ranks: int, args: argparse.Namespace, symmetric: bool) -> None:
    modules = [dist, switchyard] if dist.get_backend() == "nccl" else [switchyard]
    switchyard.communicator(device="cuda")
    lines = []
    gpus, nccl = min(ranks, torch.cuda.device_count()), ".".join(map(str, torch.cuda.nccl.version()))
    report = Report(
        args, rank, op=args.op, device=torch.cuda.get_device_name(), ranks=ranks, gpus=gpus, symmetric=symmetric,
        peer=f"NCCL {nccl}",
    )  # fmt: skip
    report.text(
        f"\nall_to_all_single, {ranks} ranks on {gpus} x {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"NCCL {nccl}{', symmetric outputs' if symmetric else ''}; microseconds"
    )
    report.text(f"{'':>12} | eager{'':42} | host{'':11} | in a graph")
    columns = f"{'NCCL':>7} {'ours':>7} {'ratio':>7}   quartiles"
    report.text(f"{'bytes a rank':>12} | {columns:47} | {'NCCL':>7} {'ours':>7} | {columns}")
    for size in map(size_of, args.sizes.split(",")):
        buffers = Buffers(size, rank, ranks, symmetric)
        sides = [Side(module, buffers) for module in modules]
        for i in range(args.rounds):
            for side in sides if i % 2 == 0 else reversed(sides):
                side.time(10 if ranks > torch.cuda.device_count() else 100)
        for side in sides:
            side.check(lambda side=side: side.calls(side.buffers.sets))
            side.check(side.graph.replay)
        ours, theirs = sides[-1], sides[0] if len(sides) == 2 else None
        eager = f"{us(theirs, 'eager'):>7} {us(ours, 'eager'):>7} {compared(sides, 'eager')}"
        host = f"{us(theirs, 'host'):>7} {us(ours, 'host'):>7}"
        graph = f"{us(theirs, 'replayed'):>7} {us(ours, 'replayed'):>7} {compared(sides, 'replayed')}"
        report.text(f"{name_of(size):>12} | {eager:47} | {host} | {graph}")
        lines.append(switchyard.explain(buffers.y[0], buffers.x[0]).splitlines()[0])
        for mode in ("eager", "host", "replayed"):
            report.row(
                getattr(ours, mode), theirs and getattr(theirs, mode), bytes=size, mode="graph" if mode == "replayed" else mode,
                algorithm=lines[-1],
            )  # fmt: skip
        del sides, ours, theirs, side
        buffers.free()
    report.text("every element was checked, before and after, eager and in the graph; ours went")
    for size, line in zip(args.sizes.split(","), lines):
        report.text(f"{name_of(size_of(size)):>12}   {line}")
