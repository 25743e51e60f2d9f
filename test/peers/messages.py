"""Messages of torch.distributed between two ranks, in turn with Switchyard's: NCCL's on GPUs, gloo's on CPUs.

    python test/peers/messages.py [--device cuda] [--sizes 8K,64K,1M,8M,64M,512M] [--rounds 15] [--json]

One way is half of a message and its answer: a rank sends when it has received. Both ways is a batch of a send and a receive. Ours
are measured in memory that the peer maps (switchyard.empty) and in torch's own; the peer's in torch's own. Blocks of calls
alternate, eager and, on GPUs, in a CUDA graph, and a time is the slower rank's. Every byte is checked before and after.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings" / "python"))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.common import GRAPH, Report, Side, name_of, ratio_of, size_of

import switchyard

RANKS = 2


class Messages(Side):
    """Messages between two ranks by one library: torch.distributed or switchyard, whose calls have the same names."""

    def __init__(self, name: str, library: Any, out: torch.Tensor, into: torch.Tensor, both: bool) -> None:
        self.library, self.out, self.into, self.both = library, out, into, both
        self.rank = dist.get_rank()
        self.peer = 1 - self.rank
        super().__init__(name, out)

    def calls(self, n: int) -> None:
        """n messages one after the other, or n pairs of messages."""
        library = self.library
        for i in range(n):
            if self.both:
                ops = [library.P2POp(library.isend, self.out, self.peer), library.P2POp(library.irecv, self.into, self.peer)]
                for work in library.batch_isend_irecv(ops):
                    work.wait()
            elif i % 2 == self.rank:
                library.send(self.out, self.peer)
            else:
                library.recv(self.into, self.peer)

    def check(self) -> None:
        """Rank r sends 1 + (i + r) % 250 in place i."""
        places = torch.arange(self.out.numel(), device=self.out.device)
        self.out.copy_(1 + (places + self.rank) % 250)
        self.into.zero_()
        self.calls(2)
        wrong = int((self.into != 1 + (places + self.peer) % 250).sum())
        switchyard.barrier()  # the peer may have ended later
        if wrong:
            raise SystemExit(f"rank {self.rank}: {self.name}: {wrong} of {self.into.numel()} bytes are wrong")


def sides_of(n: int, both: bool, device: str, theirs: str) -> list[Messages]:
    """Ours from memory that the peer maps, ours from torch's, and the peer library's."""
    ours = [switchyard.empty(n, dtype=torch.uint8, device=device) for _ in range(2)]
    own = [torch.empty(n, dtype=torch.uint8, device=device) for _ in range(2)]
    return [
        Messages("symmetric", switchyard, *ours, both),
        Messages("ordinary", switchyard, *own, both),
        Messages(theirs, dist, *own, both),
    ]


def measure(args: argparse.Namespace, device: str) -> None:
    """Measure all sizes and print a table or rows."""
    rank, theirs = dist.get_rank(), "NCCL" if device == "cuda" else "gloo"
    peer = f"{theirs} of torch {torch.__version__}"
    name = torch.cuda.get_device_name() if device == "cuda" else "host"
    report = Report(args, rank, device=name, ranks=RANKS, peer=peer)
    report.text(f"\nmessages between two ranks on {name}, next to {peer}; microseconds")
    report.text(f"{'bytes':>10} {'ways':>5} {'mode':>6} {'memory':>10} {theirs:>8} {'ours':>8} {'ratio':>7}   quartiles")
    for size in map(size_of, args.sizes.split(",")):
        for both in (False, True):
            sides = sides_of(size, both, device, theirs)
            calls = 2 * GRAPH if size > 32 << 20 else 100 if size > 1 << 20 else 200
            for i in range(args.rounds):
                for side in sides if i % 2 == 0 else reversed(sides):
                    side.time(calls)
            for side in sides:
                side.check()
            *ours, last = sides
            for mode, times in (("eager", "eager"), ("graph", "replayed")):
                for side in ours:
                    a, b = getattr(last, times), getattr(side, times)
                    if not a:
                        continue
                    report.text(
                        f"{name_of(size):>10} {'both' if both else 'one':>5} {mode:>6} {side.name:>10} "
                        f"{statistics.median(a) * 1e6:8.1f} {statistics.median(b) * 1e6:8.1f} {ratio_of(a, b)}"
                    )
                    report.row(b, a, op="messages both ways" if both else "message", bytes=size, mode=mode, memory=side.name)
            for x in (ours[0].out, ours[0].into):
                switchyard.free(x)
            del sides, ours, last, side, x
    report.text("every byte was checked, before and after")


def worker(rank: int, store: str, args: argparse.Namespace) -> None:
    on_gpus = args.device == "cuda"
    if on_gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpus else "gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    if on_gpus:
        switchyard.communicator(device="cuda")
    measure(args, args.device)
    switchyard.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sizes", default="8K,64K,1M,8M,64M,512M")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each library for each size")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each row in place of tables")
    args = parser.parse_args()
    args.busy = 0
    if args.device == "cuda" and torch.cuda.device_count() < RANKS:
        parser.error(f"2 ranks on {torch.cuda.device_count()} GPUs, want a GPU for each")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (os.path.join(folder, "store"), args), RANKS)


if __name__ == "__main__":
    main()
