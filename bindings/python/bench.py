"""Switchyard next to torch's own collectives, in one run.

    python bench.py [--op ...] [--ranks 2,4] [--sizes 8K,...] [--seconds 3] [--symmetric [both]]  on the CPU, next to gloo
    python bench.py --busy 4                                                                      where others compute, too
    python bench.py --device cuda [--ranks 8] [--sizes 8K,...] [--symmetric [both]]               on GPUs, next to NCCL
    python bench.py --beside [--ranks 2] [--sizes 8M,...] [--product 8192] [--max-sms 8]          on GPUs, next to compute
    python bench.py --op dispatch [--device cuda] [--ranks 2] [--tokens 128,4096] [--hidden 7168] [--experts 256] [--top-k 8]

Both move the same tensors, in blocks of calls that alternate; a block's time is the slowest rank's. The ratio is the
median over the pairs of blocks, with the quartiles next to it. Every size is checked: on the CPU against gloo's result, on
GPUs every element against what it has to be, on poisoned outputs, before and after the timing.

On GPUs it is all_to_all_single with equal splits, one process a GPU: eager, which is what a call costs from Python back to
back, and replayed in a CUDA graph of 20 calls. "host" is the time until a call returns. Buffers alternate so that a set of
them is larger than a cache. With more ranks than GPUs ranks share them; NCCL refuses that and is left out, and such times
say only that it works. --ranks 1 measures the call itself.

--beside says what exchanges cost the compute that runs at the same time: matrix products on one stream, exchanges on
another, both busy from the beginning of a block to its end. A product alone, next to NCCL's exchanges and next to ours;
and the exchanges alone and next to products. Blocks alternate, every rank does the same, and the exchanges are checked.

--op dispatch sends tokens to experts and back: switchyard.Dispatcher next to the same by hand on torch's calls, with uniform
random routing. The experts return what they get, so every element of the result is checked, before and after. A dispatch and a
combine are measured alone and as a pair; by hand a dispatch is counts, permutation, exchange and the sort by experts. Bytes
over the link are those of tokens that go to other ranks, once for each of these, as ours go.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import switchyard
from switchyard.moe import Dispatched, Dispatcher

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
OPS = ("all_to_all_single", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


def size_of(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def name_of(size: int) -> str:
    for unit in "GMK":
        if size >= UNITS[unit] and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]} {unit}iB"
    return f"{size} B"


def slowest(seconds: float) -> float:
    t = torch.tensor([seconds], dtype=torch.float64)
    switchyard.all_reduce(t, "max")
    return t.item()


def ratio_of(theirs: list[float], ours: list[float]) -> str:
    ratios = [a / b for a, b in zip(theirs, ours)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{statistics.median(ratios):7.2f}   {low:.2f} to {high:.2f}"


# A process that ends when its standard input does.
BUSY_LOOP = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True:
    pass
"""


@contextlib.contextmanager
def busy_loops(n: int):
    """n processes that keep a core busy each. They end with this one, also when it is killed: their standard input does."""
    loops: list[subprocess.Popen] = []
    try:
        loops += (subprocess.Popen([sys.executable, "-c", BUSY_LOOP], stdin=subprocess.PIPE) for _ in range(n))
        yield
    finally:
        for loop in loops:
            loop.communicate()


# On the CPU


def calls(op: str, size: int, ranks: int, rank: int, symmetric: bool):
    """The call of both libraries on fresh tensors of size bytes a rank, and its output."""
    n = size // 4 // ranks * ranks
    x = torch.arange(n, dtype=torch.float32) % 1021 + rank
    shape = {"all_gather_into_tensor": n * ranks, "reduce_scatter_tensor": n // ranks}.get(op, n)
    if op == "all_gather_into_tensor":  # size is what a rank ends with
        x, shape = x[: n // ranks].clone(), n
    y = switchyard.empty(shape) if symmetric else torch.empty(shape)
    y.fill_(-1)
    if op == "all_reduce":

        def call(module):
            module.all_reduce(x)

        return call, x
    args = (y, x)

    def call(module):
        getattr(module, op)(*args)

    return call, y


def block(call, module, n: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(n):
        call(module)
    return slowest((time.perf_counter() - began) / n)


def measure(op: str, size: int, ranks: int, rank: int, seconds: float, symmetric: bool):
    call, out = calls(op, size, ranks, rank, symmetric)
    before = out.clone()
    call(dist)
    expected = out.clone()
    out.copy_(before)
    call(switchyard)
    torch.testing.assert_close(out, expected)
    if op == "all_reduce":
        out.zero_()
    for module in (dist, switchyard):
        block(call, module, 3)
    one = max(block(call, dist, 3), block(call, switchyard, 3))
    n = max(1, min(200, int(0.02 / one)))
    pairs = max(5, min(60, int(seconds / (2 * n * one))))
    pairs = int(slowest(pairs))
    theirs, ours = [], []
    for i in range(pairs):
        for module in (dist, switchyard) if i % 2 == 0 else (switchyard, dist):
            (theirs if module is dist else ours).append(block(call, module, n))
    if symmetric and op != "all_reduce":
        switchyard.free(out)
    return theirs, ours


def on_cpu(rank: int, ranks: int, args: argparse.Namespace, symmetric: bool) -> None:
    torch.set_num_threads(1)
    switchyard.barrier()
    if rank == 0:
        busy = f", beside {args.busy} busy loops" if args.busy else ""
        print(f"\n{args.op}, {ranks} ranks{', symmetric outputs' if symmetric else ''}{busy}", flush=True)
        print(f"{'bytes a rank':>12} {'gloo us':>10} {'ours us':>10} {'ratio':>7}   quartiles", flush=True)
    for size in map(size_of, args.sizes.split(",")):
        theirs, ours = measure(args.op, size, ranks, rank, args.seconds, symmetric)
        if rank == 0:
            print(
                f"{name_of(size):>12} {statistics.median(theirs) * 1e6:10.0f} {statistics.median(ours) * 1e6:10.0f} "
                f"{ratio_of(theirs, ours)}",
                flush=True,
            )


# On GPUs

GRAPH = 20  # calls in a graph


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


def timed(run, n: int) -> tuple[float, float]:
    """Seconds that one of n takes on the GPU and on the host; the slowest rank's."""
    torch.cuda.synchronize()
    switchyard.barrier()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    began = time.perf_counter()
    run(n)
    host = time.perf_counter() - began
    last.record()
    torch.cuda.synchronize()
    return slowest(first.elapsed_time(last) / 1e3 / n), slowest(host / n)


def us(side: Side | None, what: str) -> str:
    return f"{statistics.median(getattr(side, what)) * 1e6:.1f}" if side else "-"


def compared(sides: list[Side], what: str) -> str:
    return ratio_of(*(getattr(side, what) for side in sides)) if len(sides) == 2 else f"{'-':>7}"


def on_gpus(rank: int, ranks: int, args: argparse.Namespace, symmetric: bool) -> None:
    modules = [dist, switchyard] if dist.get_backend() == "nccl" else [switchyard]
    switchyard.communicator(device="cuda")
    lines = []
    if rank == 0:
        gpus, nccl = min(ranks, torch.cuda.device_count()), ".".join(map(str, torch.cuda.nccl.version()))
        print(
            f"\nall_to_all_single, {ranks} ranks on {gpus} x {torch.cuda.get_device_name()}, torch {torch.__version__}, "
            f"NCCL {nccl}{', symmetric outputs' if symmetric else ''}; microseconds",
            flush=True,
        )
        print(f"{'':>12} | eager{'':42} | host{'':11} | in a graph", flush=True)
        columns = f"{'NCCL':>7} {'ours':>7} {'ratio':>7}   quartiles"
        print(f"{'bytes a rank':>12} | {columns:47} | {'NCCL':>7} {'ours':>7} | {columns}", flush=True)
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
        if rank == 0:
            eager = f"{us(theirs, 'eager'):>7} {us(ours, 'eager'):>7} {compared(sides, 'eager')}"
            host = f"{us(theirs, 'host'):>7} {us(ours, 'host'):>7}"
            graph = f"{us(theirs, 'replayed'):>7} {us(ours, 'replayed'):>7} {compared(sides, 'replayed')}"
            print(f"{name_of(size):>12} | {eager:47} | {host} | {graph}", flush=True)
            lines.append(switchyard.explain(buffers.y[0], buffers.x[0]).splitlines()[0])
        del sides, ours, theirs, side
        buffers.free()
    if rank == 0:
        print("every element was checked, before and after, eager and in the graph; ours went", flush=True)
        for size, line in zip(args.sizes.split(","), lines):
            print(f"{name_of(size_of(size)):>12}   {line}", flush=True)


# Next to compute


class Beside:
    """Matrix products and exchanges that keep a stream busy each."""

    def __init__(self, n: int) -> None:
        self.a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
        self.b, self.c = torch.randn_like(self.a), torch.empty_like(self.a)
        self.products, self.exchanges = torch.cuda.Stream(), torch.cuda.Stream()

    def product(self) -> None:
        torch.mm(self.a, self.b, out=self.c)

    def block(self, products: int, exchange, exchanges: int) -> tuple[float, float]:
        """Seconds that a product and an exchange take when these numbers of them run; the slowest rank's. 0 for none."""
        torch.cuda.synchronize()
        switchyard.barrier()
        took = []
        pairs = [(self.products, self.product, products), (self.exchanges, exchange, exchanges)]
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in pairs]
        for (stream, _, _), (first, _) in zip(pairs, events):
            first.record(stream)
        # Enqueued in turns, so that neither waits for the host.
        most = max(products, exchanges)
        done = [0, 0]
        for k in range(1, most + 1):
            for side, (stream, call, n) in enumerate(pairs):
                with torch.cuda.stream(stream):
                    while done[side] < n * k // most:
                        call()
                        done[side] += 1
        for (stream, _, n), (first, last) in zip(pairs, events):
            last.record(stream)
            last.synchronize()
            took.append(slowest(first.elapsed_time(last) / 1e3 / n if n else 0.0))
        return took[0], took[1]


class Exchanges:
    """One library's exchanges, of buffers that take turns."""

    def __init__(self, module, buffers: Buffers) -> None:
        self.module, self.buffers, self.at = module, buffers, 0
        self.check()

    def __call__(self) -> None:
        self.at = (self.at + 1) % self.buffers.sets
        self.module.all_to_all_single(self.buffers.y[self.at], self.buffers.x[self.at], async_op=True).wait()

    def check(self) -> None:
        for y in self.buffers.y:
            y.fill_(-1)
        torch.cuda.synchronize()
        switchyard.barrier()  # a peer may write a symmetric output as soon as it can
        for _ in self.buffers.y:
            self()
        torch.cuda.synchronize()
        for k, (y, want) in enumerate(zip(self.buffers.y, self.buffers.want)):
            if wrong := int((y != want).sum()):
                raise SystemExit(f"{self.module.__name__}: {wrong} of {y.numel()} elements of buffer {k} are wrong")


def beside_compute(rank: int, ranks: int, args: argparse.Namespace, symmetric: bool) -> None:
    modules = [dist, switchyard] if dist.get_backend() == "nccl" else [switchyard]
    options = {name: getattr(args, name) for name in ("max_sms", "copy_sms") if getattr(args, name)}
    switchyard.communicator(device="cuda", **options)
    compute = Beside(args.product)
    for _ in range(5):
        compute.product()
    if rank == 0:
        print(
            f"\nproducts of {args.product} x {args.product} bfloat16 beside all_to_all_single, {ranks} ranks on "
            f"{torch.cuda.get_device_name()}{', symmetric outputs' if symmetric else ''}"
            f"{f', at most {args.max_sms} multiprocessors' if args.max_sms else ''}"
            f"{f' and {args.copy_sms} that copy' if args.copy_sms else ''}; microseconds, medians and quartiles",
            flush=True,
        )
        columns = " | ".join(f"{name:>38}" for name in ("a product", "an exchange alone", "an exchange beside products"))
        print(f"{'bytes a rank':>12} {'':>8} | {columns}", flush=True)
    for size in map(size_of, args.sizes.split(",")):
        buffers = Buffers(size, rank, ranks, symmetric)
        sides = [Exchanges(module, buffers) for module in modules]
        alone: list[float] = []
        times = {side: ([], [], []) for side in sides}
        # So many exchanges that they last as long as the products.
        one = compute.block(10, None, 0)[0]
        counts = {side: max(int(args.products * one / compute.block(0, side, 20)[1]), 1) for side in sides}
        for i in range(args.rounds):
            alone.append(compute.block(args.products, None, 0)[0])
            for side in sides if i % 2 == 0 else reversed(sides):
                product, exchange, beside = times[side]
                exchange.append(compute.block(0, side, counts[side])[1])
                both = compute.block(args.products, side, counts[side])
                product.append(both[0])
                beside.append(both[1])
        for side in sides:
            side.check()
        if rank == 0:
            print(f"{name_of(size):>12} {'':>8} | {spread(alone)} | {spread([])} | {spread([])}", flush=True)
            for side in sides:
                name = "ours" if side.module is switchyard else "NCCL"
                print(f"{name_of(size):>12} {name:>8} | " + " | ".join(map(spread, times[side])), flush=True)
        del sides, side, times, counts
        buffers.free()


def spread(times: list[float]) -> str:
    if len(times) < 2:
        return f"{'-':>38}"
    low, middle, high = (q * 1e6 for q in statistics.quantiles(times, n=4))
    return f"{middle:12.1f}   ({low:9.1f} to {high:9.1f})"


# Tokens to experts


class Batch:
    """Tokens of one rank with their routing, in sets that take turns."""

    def __init__(self, rank: int, ranks: int, tokens: int, args: argparse.Namespace) -> None:
        self.rank, self.ranks, self.tokens, self.args = rank, ranks, tokens, args
        self.hidden, self.experts, self.top_k, self.device = args.hidden, args.experts, args.top_k, args.device
        self.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
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


PARTS = ("dispatch", "combine", "pair")


def repeated(call, n: int) -> None:
    for _ in range(n):
        call()


def graphs_of(side: OurDispatch) -> dict[str, torch.cuda.CUDAGraph]:
    """A graph of GRAPH calls for each part."""
    graphs = {}
    for part in PARTS:
        side.dispatch()
        graphs[part] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[part], capture_error_mode="thread_local"):
            repeated(getattr(side, part), GRAPH)
    side.got = None
    return graphs


def parts_on_gpu(side, times: dict[str, list[float]], n: int, graphs) -> None:
    """Adds microseconds of every part to times: eager, on the host, and in a graph."""
    for part in PARTS:
        call = getattr(side, part)
        side.dispatch()
        repeated(call, 3)
        gpu, host = timed(lambda n, call=call: repeated(call, n), n)
        times.setdefault(part, []).append(gpu * 1e6)
        times.setdefault("host", []).append(host * 1e6)  # the last one, the pair's, is printed
        if graphs:
            graphs[part].replay()
            replayed = timed(lambda n, graph=graphs[part]: repeated(graph.replay, n), max(n // GRAPH, 1))[0]
            times.setdefault("graph " + part, []).append(replayed / GRAPH * 1e6)


def parts_on_cpu(side, times: dict[str, list[float]], n: int, graphs) -> None:
    for part in PARTS:
        side.dispatch()
        dist.barrier()
        began = time.perf_counter()
        repeated(getattr(side, part), n)
        times.setdefault(part, []).append(slowest((time.perf_counter() - began) / n) * 1e6)


def dispatching(rank: int, ranks: int, args: argparse.Namespace, symmetric: bool) -> None:
    cuda = args.device == "cuda"
    by_hand = not cuda or dist.get_backend() == "nccl"
    if not cuda:
        torch.set_num_threads(1)
    if rank == 0:
        where = f"{min(ranks, torch.cuda.device_count())} x {torch.cuda.get_device_name()}" if cuda else "the CPU"
        print(
            f"\ndispatch and combine, {ranks} ranks on {where}, torch {torch.__version__}, hidden {args.hidden}, "
            f"top-{args.top_k} of {args.experts} experts; microseconds, medians of {args.rounds} rounds",
            flush=True,
        )
        graph = f" | {'in a graph':^26}" if cuda else ""
        print(f"{'':>40} | {'eager':^35}{graph} | MB over the link", flush=True)
        names = f"{'dispatch':>8} {'combine':>8} {'pair':>8}"
        again = f" | {names}" if cuda else ""
        print(f"{'':>40} | {names} {'host':>8}{again} | dispatch combine", flush=True)
    for tokens in map(int, args.tokens.split(",")):
        batch = Batch(rank, ranks, tokens, args)
        few = tokens <= 256
        kinds = [("flat", False, False), ("token_major", False, False)]
        if cuda:
            kinds = [("flat", True, False), ("token_major", True, False), *kinds]
        if cuda and few:
            kinds = [(layout, float8, True) for layout in ("slab", "rank_padded") for float8 in (True, False)]
        for layout, float8, low_latency in kinds:
            sides = [OurDispatch(batch, layout, float8, low_latency)]
            if by_hand and layout in ("flat", "slab") and not float8:
                sides.append(ByHand(batch))
            times: dict[str, dict[str, list[float]]] = {side.name: {} for side in sides}
            for side in sides:
                side.check()
            graphs = graphs_of(sides[0]) if cuda else None
            measure_parts, n = (parts_on_gpu, 200 if few else 40) if cuda else (parts_on_cpu, max(1, 2000 // tokens))
            if ranks > max(torch.cuda.device_count(), 1) and cuda:
                n = 5
            for i in range(args.rounds):
                for side in sides if i % 2 == 0 else reversed(sides):
                    measure_parts(side, times[side.name], n, graphs if side is sides[0] else None)
            graphs = None
            for side in sides:
                side.check()
                side.close()
            moved = slowest(batch.crossing * batch.hidden / 1e6)
            if rank == 0:
                for side in sides:
                    kind = f"{tokens} tokens, {layout}, {'float8' if float8 else str(batch.dtype)[6:]}"
                    row = times[side.name]
                    middle = {what: statistics.median(values) for what, values in row.items()}
                    eager = " ".join(f"{middle[part]:8.1f}" for part in PARTS)
                    host = f"{statistics.median(row['host'][2::3]):8.1f}" if "host" in row else f"{'-':>8}"
                    graph = ""
                    if cuda:
                        graph = " | " + " ".join(f"{middle.get('graph ' + part, float('nan')):8.1f}" for part in PARTS)
                    width = batch.dtype.itemsize
                    sent = moved * (1 if float8 else width)
                    print(f"{kind:>31} {side.name:>8} | {eager} {host}{graph} | {sent:8.1f} {moved * width:7.1f}", flush=True)
        del batch
    if rank == 0:
        print("every element was checked, before and after", flush=True)


def worker(rank: int, ranks: int, store: str, args: argparse.Namespace) -> None:
    backend, where = "gloo", on_cpu
    if args.device == "cuda":
        where = beside_compute if args.beside else on_gpus
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if ranks <= torch.cuda.device_count():
            backend = "nccl"
    dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    if args.op == "dispatch":
        where = dispatching
    for symmetric in {"no": [False], "yes": [True], "both": [False, True]}[args.symmetric]:
        where(rank, ranks, args, symmetric)
    switchyard.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--op", default="all_to_all_single", choices=(*OPS, "dispatch"), help="on GPUs this one or dispatch")
    parser.add_argument("--ranks", help="2,4 on the CPU, the number of GPUs on those")
    parser.add_argument("--sizes", help="8K to 32M on the CPU, to 8M on GPUs")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each size, on the CPU")
    parser.add_argument("--busy", type=int, default=0, help="processes that keep a core busy each, for as long as it runs")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each library for each size, on GPUs")
    parser.add_argument(
        "--symmetric", nargs="?", choices=("no", "yes", "both"), const="yes", default="no", help="outputs in the symmetric heap"
    )
    parser.add_argument("--beside", action="store_true", help="exchanges beside matrix products, on GPUs")
    parser.add_argument("--product", type=int, default=8192, help="rows and columns of those matrices")
    parser.add_argument("--products", type=int, default=20, help="products in a block")
    parser.add_argument("--max-sms", type=int, help="the most multiprocessors for an exchange beside products, or a dispatch")
    parser.add_argument("--copy-sms", type=int, help="and the most that copy out of staging, for an exchange")
    parser.add_argument("--tokens", help="of a rank, for dispatch: 4096,128 on GPUs, 16,128,1024 on the CPU")
    parser.add_argument("--hidden", type=int, help="elements of a token: 7168 on GPUs, 1024 on the CPU")
    parser.add_argument("--experts", type=int, help="of all ranks: 256 on GPUs, 64 on the CPU")
    parser.add_argument("--top-k", type=int, default=8, help="experts of a token")
    args = parser.parse_args()
    if args.beside:
        args.device, args.sizes = "cuda", args.sizes or "8M,32M,128M"
    cuda = args.device == "cuda"
    args.tokens = args.tokens or ("4096,128" if cuda else "16,128,1024")
    args.hidden, args.experts = args.hidden or (7168 if cuda else 1024), args.experts or (256 if cuda else 64)
    if cuda:
        if args.op not in ("all_to_all_single", "dispatch"):
            parser.error(f"--op {args.op} is for the CPU")
        args.ranks = args.ranks or str(torch.cuda.device_count())
        args.sizes = args.sizes or "8K,32K,128K,512K,1M,2M,8M"
    args.ranks, args.sizes = args.ranks or "2,4", args.sizes or "8K,32K,128K,512K,1M,2M,8M,32M"
    for ranks in map(int, args.ranks.split(",")):
        with busy_loops(args.busy), tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, (ranks, os.path.join(folder, "store"), args), ranks)


if __name__ == "__main__":
    main()
