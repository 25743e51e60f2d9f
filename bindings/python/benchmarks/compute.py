"""Exchanges next to matrix products, on GPUs."""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.distributed as dist

import switchyard

from .common import Report, name_of, size_of, slowest
from .gpus import Buffers


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
    report = Report(
        args, rank, op="products beside all_to_all_single", device=torch.cuda.get_device_name(), ranks=ranks,
        symmetric=symmetric, product=args.product,
    )  # fmt: skip
    report.text(
        f"\nproducts of {args.product} x {args.product} bfloat16 next to all_to_all_single, {ranks} ranks on "
        f"{torch.cuda.get_device_name()}{', symmetric outputs' if symmetric else ''}"
        f"{f', at most {args.max_sms} multiprocessors' if args.max_sms else ''}"
        f"{f' and {args.copy_sms} that copy' if args.copy_sms else ''}; microseconds, medians and quartiles"
    )
    columns = " | ".join(f"{name:>38}" for name in ("a product", "an exchange alone", "an exchange next to products"))
    report.text(f"{'bytes a rank':>12} {'':>8} | {columns}")
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
        report.text(f"{name_of(size):>12} {'':>8} | {spread(alone)} | {spread([])} | {spread([])}")
        report.row(alone, None, bytes=size, part="product alone")
        for side in sides:
            name = "ours" if side.module is switchyard else "NCCL"
            report.text(f"{name_of(size):>12} {name:>8} | " + " | ".join(map(spread, times[side])))
        theirs = times[sides[0]] if len(sides) == 2 else (None,) * 3
        for part, mine, other in zip(("product", "exchange alone", "exchange"), times[sides[-1]], theirs):
            report.row(mine, other, bytes=size, part=part, **({"peer": "NCCL"} if other else {}))
        del sides, side, times, counts
        buffers.free()


def spread(times: list[float]) -> str:
    if len(times) < 2:
        return f"{'-':>38}"
    low, middle, high = (q * 1e6 for q in statistics.quantiles(times, n=4))
    return f"{middle:12.1f}   ({low:9.1f} to {high:9.1f})"
