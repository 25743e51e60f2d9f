"""Collectives on the CPU, next to gloo."""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

import switchyard

from .common import Report, name_of, ratio_of, size_of, slowest

OPS = ("all_to_all_single", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


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
    report = Report(args, rank, op=args.op, device="host", ranks=ranks, symmetric=symmetric, peer="gloo")
    busy = f", next to {args.busy} busy loops" if args.busy else ""
    report.text(f"\n{args.op}, {ranks} ranks{', symmetric outputs' if symmetric else ''}{busy}")
    report.text(f"{'bytes a rank':>12} {'gloo us':>10} {'ours us':>10} {'ratio':>7}   quartiles")
    for size in map(size_of, args.sizes.split(",")):
        theirs, ours = measure(args.op, size, ranks, rank, args.seconds, symmetric)
        report.text(
            f"{name_of(size):>12} {statistics.median(theirs) * 1e6:10.0f} {statistics.median(ours) * 1e6:10.0f} "
            f"{ratio_of(theirs, ours)}"
        )
        report.row(ours, theirs, bytes=size)
