"""Switchyard against gloo on the CPU, side by side: python bench.py [--ranks 2,4] [--sizes 8K,...] [--seconds 20]

Both move the same tensors in one run, in blocks that alternate; a block's time is the slowest rank's. The ratio is the
median over the pairs of blocks, with the quartiles beside it. Every size is checked against gloo's result first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import switchyard

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
OPS = ("all_to_all_single", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


def size_of(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def name_of(size: int) -> str:
    for unit in "GMK":
        if size >= UNITS[unit] and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]} {unit}iB"
    return f"{size} B"


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


def slowest(seconds: float) -> float:
    t = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return t.item()


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


def worker(rank: int, ranks: int, store: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    switchyard.barrier()
    if rank == 0:
        print(f"\n{args.op}, {ranks} ranks{', symmetric outputs' if args.symmetric else ''}", flush=True)
        print(f"{'bytes a rank':>12} {'gloo us':>10} {'ours us':>10} {'ratio':>7}   quartiles", flush=True)
    for size in map(size_of, args.sizes.split(",")):
        theirs, ours = measure(args.op, size, ranks, rank, args.seconds, args.symmetric)
        if rank == 0:
            ratios = [a / b for a, b in zip(theirs, ours)]
            low, _, high = statistics.quantiles(ratios, n=4)
            print(
                f"{name_of(size):>12} {statistics.median(theirs) * 1e6:10.0f} {statistics.median(ours) * 1e6:10.0f} "
                f"{statistics.median(ratios):7.2f}   {low:.2f} to {high:.2f}",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", default="all_to_all_single", choices=OPS)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--sizes", default="8K,32K,128K,512K,1M,2M,8M,32M")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each size")
    parser.add_argument("--symmetric", action="store_true", help="outputs in the symmetric heap")
    args = parser.parse_args()
    for ranks in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, (ranks, os.path.join(folder, "store"), args), ranks)


if __name__ == "__main__":
    main()
