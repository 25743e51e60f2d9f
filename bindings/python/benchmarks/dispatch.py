"""Tokens to experts and back, next to the same by hand on torch's calls."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

import switchyard
from switchyard.moe import Dispatched, Dispatcher

from .common import GRAPH, Report, slowest, timed

#: Another library's side, in place of torch by hand. Drivers in test/peers set it.
PEER: Any = None

PARTS = ("dispatch", "combine", "pair")


class Batch:
    """Tokens of one rank with their routing, in sets that take turns."""

    def __init__(self, rank: int, ranks: int, tokens: int, args: argparse.Namespace) -> None:
        self.rank, self.ranks, self.tokens, self.args = rank, ranks, tokens, args
        self.hidden, self.experts, self.top_k, self.device = args.hidden, args.experts, args.top_k, args.device
        self.dtype = torch.bfloat16 if args.device == "cuda" or PEER is not None else torch.float32
        size = tokens * args.hidden * self.dtype.itemsize
        self.sets = max(1, min(4, (1 << 27) // size)) if args.device == "cuda" else 1
        g = torch.Generator().manual_seed(rank)
        self.x = [torch.randn(tokens, args.hidden, generator=g).to(args.device, self.dtype) for _ in range(self.sets)]
        self.idx = torch.rand(tokens, args.experts, generator=g).argsort(1)[:, : args.top_k].to(args.device)
        self.weights = torch.full((tokens, args.top_k), 1 / args.top_k, device=args.device)
        there = torch.zeros(tokens, ranks, dtype=torch.bool, device=args.device)
        there.scatter_(1, self.idx * ranks // args.experts, True)
        self.on_ranks = there.sum(1, keepdim=True)
        self.crossing = int(self.on_ranks.sum()) - int(there[:, rank].sum())

    def check(self, y: torch.Tensor, k: int, by_token: bool, float8: bool) -> None:
        """y is what the experts' ranks together make of set k: its tokens, or with rows by token one for each rank."""
        want = self.x[k].float() * (self.on_ranks if by_token else 1)
        wrong = (y.float() - want).abs() > (0.08 if float8 else 0.02) * (want.abs() + 1)
        if int(wrong.sum()) or y.isnan().any():
            raise SystemExit(f"rank {self.rank}: {int(wrong.sum())} of {y.numel()} elements are wrong")


class OurDispatch:
    """switchyard.Dispatcher on a batch."""

    name = "ours"
    parts, captures = PARTS, True

    def __init__(self, batch: Batch, layout: str, float8: bool, low_latency: bool) -> None:
        self.batch, self.float8 = batch, float8
        self.d = Dispatcher(
            batch.experts, batch.top_k, batch.hidden, max_tokens=batch.tokens, dtype=batch.dtype, layout=layout, handles=2,
            quantize=float8, low_latency=low_latency, device=batch.device, max_sms=batch.args.max_sms or 0,
        )  # fmt: skip
        self.weights = None if self.d.by_token else batch.weights
        self.at, self.got, self.y = 0, None, None
        self.out = None  # what the experts made, where they could not work in place
        if float8:
            self.out = switchyard.empty(self.d.max_rows, batch.hidden, dtype=batch.dtype, device=batch.device)

    def dispatch(self) -> None:
        self.at = (self.at + 1) % self.batch.sets
        self.got = None
        self.got = self.d.dispatch(self.batch.x[self.at], self.batch.idx, self.weights)

    def combine(self, release: bool = False) -> None:
        self.y = self.d.combine(self.got.rows if self.out is None else self.out, self.got, release=release)

    def pair(self) -> None:
        self.dispatch()
        self.combine(release=True)

    def check(self) -> None:
        for _ in range(self.batch.sets):
            self.dispatch()
            if self.out is not None:
                self.out.copy_(wide(self.got))
            self.combine()
            self.batch.check(self.y, self.at, self.d.by_token, self.float8)
        self.got = self.y = None

    def close(self) -> None:
        self.got = self.y = None
        if self.out is not None:
            if self.out.is_cuda:
                torch.cuda.synchronize()
            switchyard.free(self.out)
        self.d.close()


def wide(got: Dispatched) -> torch.Tensor:
    """Rows of float8 with their scales."""
    rows = got.rows.float().unflatten(1, (-1, 128)) * got.scales[..., None]
    return rows.flatten(1).nan_to_num_()  # behind the last row anything may be


class ByHand:
    """The same on torch's calls, with rows by expert."""

    name = "by hand"
    float8 = False
    parts, captures = PARTS, False

    def __init__(self, batch: Batch) -> None:
        self.batch, self.at, self.y = batch, 0, None
        self.local = batch.experts // batch.ranks
        self.which = torch.arange(self.local, device=batch.device).repeat(batch.ranks)

    def dispatch(self) -> None:
        b = self.batch
        self.at = (self.at + 1) % b.sets
        flat = b.idx.flatten()
        self.order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=b.experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        both = torch.stack([counts, theirs]).view(2, b.ranks, self.local).sum(2).tolist()  # the host waits
        self.send, self.recv = both
        self.rows = b.x[self.at].new_empty(sum(self.recv), b.hidden)
        dist.all_to_all_single(self.rows, b.x[self.at][self.order // b.top_k], self.recv, self.send)
        self.sorted = self.which.repeat_interleave(theirs).argsort(stable=True)
        self.rows = self.rows[self.sorted]

    def combine(self) -> None:
        b = self.batch
        back = torch.empty_like(self.rows).index_copy_(0, self.sorted, self.rows)
        rows = self.rows.new_empty(len(self.order), b.hidden)
        dist.all_to_all_single(rows, back, self.send, self.recv)
        self.y = torch.zeros_like(b.x[0], dtype=torch.float32)
        self.y.index_add_(0, self.order // b.top_k, rows * b.weights.flatten()[self.order, None])

    def pair(self) -> None:
        self.dispatch()
        self.combine()

    def check(self) -> None:
        for _ in range(self.batch.sets):
            self.pair()
            self.batch.check(self.y, self.at, False, False)

    def close(self) -> None:
        self.rows = self.y = self.order = self.sorted = None


def repeated(call, n: int) -> None:
    for _ in range(n):
        call()


def prepare(side) -> None:
    """Have a dispatch whose rows are there, for calls that begin with one."""
    if "combine" in side.parts:
        side.dispatch()


def graphs_of(side) -> dict[str, torch.cuda.CUDAGraph]:
    """A graph of GRAPH calls for each part."""
    graphs = {}
    for part in side.parts:
        prepare(side)
        graphs[part] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[part], capture_error_mode="thread_local"):
            repeated(getattr(side, part), GRAPH)
    side.got = None
    return graphs


def parts_on_gpu(side, times: dict[str, list[float]], n: int, graphs) -> None:
    """Adds microseconds of every part to times: eager, on the host, and in a graph."""
    for part in side.parts:
        call = getattr(side, part)
        prepare(side)
        repeated(call, 3)
        gpu, host = timed(lambda n, call=call: repeated(call, n), n)
        times.setdefault(part, []).append(gpu * 1e6)
        times.setdefault("host", []).append(host * 1e6)  # the last one, the pair's, is printed
        if graphs:
            graphs[part].replay()
            replayed = timed(lambda n, graph=graphs[part]: repeated(graph.replay, n), max(n // GRAPH, 1))[0]
            times.setdefault("graph " + part, []).append(replayed / GRAPH * 1e6)


def parts_on_cpu(side, times: dict[str, list[float]], n: int, graphs) -> None:
    for part in side.parts:
        prepare(side)
        dist.barrier()
        began = time.perf_counter()
        repeated(getattr(side, part), n)
        times.setdefault(part, []).append(slowest((time.perf_counter() - began) / n) * 1e6)


def dispatching(rank: int, ranks: int, args: argparse.Namespace, symmetric: bool) -> None:
    cuda = args.device == "cuda"
    by_hand = not cuda or dist.get_backend() == "nccl"
    if not cuda:
        torch.set_num_threads(1)
    where = f"{min(ranks, torch.cuda.device_count())} x {torch.cuda.get_device_name()}" if cuda else "the CPU"
    report = Report(
        args, rank, op="dispatch", device=torch.cuda.get_device_name() if cuda else "host", ranks=ranks, hidden=args.hidden,
        top_k=args.top_k, experts=args.experts,
    )  # fmt: skip
    report.text(
        f"\ndispatch and combine, {ranks} ranks on {where}, torch {torch.__version__}, hidden {args.hidden}, "
        f"top-{args.top_k} of {args.experts} experts; microseconds, medians of {args.rounds} rounds"
    )
    graph = f" | {'in a graph':^26}" if cuda else ""
    report.text(f"{'':>40} | {'eager':^35}{graph} | MB over the link")
    names = f"{'dispatch':>8} {'combine':>8} {'pair':>8}"
    again = f" | {names}" if cuda else ""
    report.text(f"{'':>40} | {names} {'host':>8}{again} | dispatch combine")
    for tokens in map(int, args.tokens.split(",")):
        batch = Batch(rank, ranks, tokens, args)
        few = tokens <= 256
        kinds = [("flat", False, False), ("token_major", False, False)]
        if cuda:
            kinds = [("flat", True, False), ("token_major", True, False), *kinds]
        if cuda and few:
            kinds = [(layout, float8, True) for layout in ("slab", "rank_padded") for float8 in (True, False)]
        if PEER is not None:
            kinds = PEER.kinds(few)
        for layout, float8, low_latency in kinds:
            sides = [OurDispatch(batch, layout, float8, low_latency)]
            if PEER is not None:
                sides.append(PEER(batch, layout, float8))
            elif by_hand and layout in ("flat", "slab") and not float8:
                sides.append(ByHand(batch))
            times: dict[str, dict[str, list[float]]] = {side.name: {} for side in sides}
            for side in sides:
                side.check()
            graphs = {side.name: graphs_of(side) for side in sides if cuda and side.captures}
            measure_parts, n = (parts_on_gpu, 200 if few else 40) if cuda else (parts_on_cpu, max(1, 2000 // tokens))
            if ranks > max(torch.cuda.device_count(), 1) and cuda:
                n = 5
            for i in range(args.rounds):
                for side in sides if i % 2 == 0 else reversed(sides):
                    measure_parts(side, times[side.name], n, graphs.get(side.name))
            graphs.clear()
            for side in sides:
                side.check()
                side.close()
            moved = slowest(batch.crossing * batch.hidden / 1e6)
            dtype = "float8" if float8 else str(batch.dtype)[6:]
            for side in sides:
                kind = f"{tokens} tokens, {layout}, {dtype}"
                row = times[side.name]
                middle = {what: statistics.median(values) for what, values in row.items()}
                eager = " ".join(f"{middle.get(part, float('nan')):8.1f}" for part in PARTS)
                last = len(side.parts)  # of the parts, the pair
                host = f"{statistics.median(row['host'][last - 1 :: last]):8.1f}" if "host" in row else f"{'-':>8}"
                graph = ""
                if cuda:
                    graph = " | " + " ".join(f"{middle.get('graph ' + part, float('nan')):8.1f}" for part in PARTS)
                width = batch.dtype.itemsize
                sent = moved * (1 if float8 else width)
                report.text(f"{kind:>31} {side.name:>8} | {eager} {host}{graph} | {sent:8.1f} {moved * width:7.1f}")
            ours, *others = (times[side.name] for side in sides)
            for part in PARTS:
                shape = {"tokens": tokens, "layout": layout, "dtype": dtype, "part": part}
                for mode, what in (("eager", part), ("graph", "graph " + part)):
                    pair = [[us / 1e6 for us in side[what]] for side in (ours, *others) if what in side]
                    if what in ours:
                        peer = {"peer": sides[1].name} if len(pair) > 1 else {}
                        report.row(pair[0], pair[1] if len(pair) > 1 else None, **shape, **peer, mode=mode)
        del batch
    report.text("every element was checked, before and after")
