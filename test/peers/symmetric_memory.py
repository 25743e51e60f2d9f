"""All-reduces of torch's symmetric memory, in turn with Switchyard's, on GPUs of one host.

    python test/peers/symmetric_memory.py [--ranks 2] [--sizes 8K,128K,1M,8M,32M,128M] [--rounds 15] [--json]

Both add bfloat16 in place, in memory that peers map, without NVLink multicast. torch's is the faster of one_shot_all_reduce and
two_shot_all_reduce_ at each size; the former is not called above 8 MiB, where every rank reads all of every other's. Blocks of
calls alternate, eager and in a CUDA graph, and a time is the slowest rank's. Every element is checked before and after.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings" / "python"))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.common import Report, Side, name_of, ratio_of, size_of

import switchyard

#: The largest all-reduce that is made in one shot.
ONE_SHOT = 8 << 20


class Sums(Side):
    """All-reduces of a tensor by one way of a library."""

    def __init__(self, name: str, x: torch.Tensor, call: Callable[[], Any]) -> None:
        self.x, self.call = x, call
        super().__init__(name, x)

    def calls(self, n: int) -> None:
        for _ in range(n):
            self.call()

    def check(self) -> None:
        """Rank r has 1 + (i + r) % 3 in place i."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        places = torch.arange(self.x.numel(), device=self.x.device)
        self.x.copy_(1 + (places + rank) % 3)
        want = sum(1 + (places + r) % 3 for r in range(ranks))
        synchronize(self.x)
        switchyard.barrier()  # peers read it
        out = self.call()
        synchronize(self.x)
        wrong = int(((self.x if out is None else out) != want).sum())
        switchyard.barrier()
        if wrong:
            raise SystemExit(f"rank {rank}: {self.name}: {wrong} of {self.x.numel()} elements are wrong")
        self.x.zero_()  # sums of sums stay what they are


def synchronize(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def torchs(n: int, device: str) -> list[Sums]:
    """The ways of torch's symmetric memory."""
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD.group_name
    x = symmetric.empty(n, dtype=torch.bfloat16, device=device)
    symmetric.rendezvous(x, group)
    one, two = torch.ops.symm_mem.one_shot_all_reduce, torch.ops.symm_mem.two_shot_all_reduce_

    def in_place() -> None:
        two(x, "sum", group)

    sides = [Sums("two-shot", x, in_place)]
    if x.nbytes <= ONE_SHOT:
        sides.append(Sums("one-shot", x, lambda: one(x, "sum", group)))
    return sides


def ours(n: int, device: str) -> Sums:
    x = switchyard.empty(n, dtype=torch.bfloat16, device=device)

    def in_place() -> None:
        switchyard.all_reduce(x)

    return Sums("Switchyard", x, in_place)


def measure(args: argparse.Namespace, device: str) -> None:
    """Measure all sizes and print a table or rows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    peer = f"symmetric memory of torch {torch.__version__}"
    name = torch.cuda.get_device_name() if device == "cuda" else "host"
    report = Report(args, rank, op="all_reduce", device=name, ranks=ranks, dtype="bfloat16", symmetric=True, peer=peer)
    report.text(f"\nall_reduce of bfloat16, {ranks} ranks on {name}, next to the {peer}; microseconds")
    report.text(f"{'bytes':>10} {'mode':>6} {'torch':>8} {'ours':>8} {'ratio':>7}   quartiles")
    for size in map(size_of, args.sizes.split(",")):
        n = size // 2
        sides = [ours(n, device), *torchs(n, device)]
        for i in range(args.rounds):
            for side in sides if i % 2 == 0 else reversed(sides):
                side.time(100 if size <= 1 << 20 else 20)
        for side in sides:
            side.check()
        mine, *theirs = sides
        for mode, times in (("eager", "eager"), ("graph", "replayed")):
            if not getattr(mine, times):
                continue
            best = min(theirs, key=lambda side, times=times: statistics.median(getattr(side, times)))
            a, b = getattr(best, times), getattr(mine, times)
            report.text(
                f"{name_of(size):>10} {mode:>6} {statistics.median(a) * 1e6:8.1f} {statistics.median(b) * 1e6:8.1f} "
                f"{ratio_of(a, b)}   {best.name}"
            )
            report.row(b, a, bytes=size, mode=mode, peer_way=best.name)
        switchyard.free(mine.x)
        del sides, mine, theirs, best, side
    report.text("every element was checked, before and after")


def worker(rank: int, ranks: int, store: str, args: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    switchyard.communicator(device="cuda")
    measure(args, "cuda")
    switchyard.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="the number of GPUs")
    parser.add_argument("--sizes", default="8K,128K,1M,8M,32M,128M")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each library for each size")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each row in place of tables")
    args = parser.parse_args()
    args.busy = 0
    ranks = args.ranks or torch.cuda.device_count()
    if not 2 <= ranks <= torch.cuda.device_count():
        parser.error(f"{ranks} ranks on {torch.cuda.device_count()} GPUs, want at least 2 ranks and a GPU for each")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (ranks, os.path.join(folder, "store"), args), ranks)


if __name__ == "__main__":
    main()
