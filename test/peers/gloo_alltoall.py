"""A worker of `perf hosts`: torch.distributed's all_to_all_single and all_reduce over gloo.

python test/peers/gloo_alltoall.py hosts|hosts-dispatch|hosts-reduce

It reads lines "BYTES CALLS" and makes that many exchanges, checks every byte of the last, and writes its microseconds a
call. An exchange has BYTES for each pair of ranks. With hosts-dispatch it has a row of BYTES for each of 512 tokens and
each rank that has one of its 8 experts of 32, and another exchange takes the rows back; nothing gathers or adds them. With hosts-reduce it makes sums of float32 of BYTES,
in place, and checks every element of one more.
"""

import os
import random
import sys
import time

import torch
import torch.distributed as dist


def message(src: int, dst: int, n: int) -> torch.Tensor:
    i = torch.arange(n, dtype=torch.int64)
    return ((src * 37 + dst * 11 + i * 3 + (i >> 9)) % 256).to(torch.uint8)


def routed(rank: int, size: int, row: int) -> list[int]:
    """The bytes that a rank sends to each rank when a token's row goes once to each rank that it wants."""
    rnd = random.Random(rank)
    rows = [0] * size
    for _ in range(512):
        for p in {e * size // 32 for e in rnd.sample(range(32), 8)}:
            rows[p] += 1
    return [n * row for n in rows]


def exchange(x: torch.Tensor, y: torch.Tensor, back: torch.Tensor | None, put: list[int], got: list[int]) -> None:
    dist.all_to_all_single(y, x, got, put)
    if back is not None:
        dist.all_to_all_single(back, y, put, got)


def reduce(rank: int, size: int, n: int, calls: int) -> float:
    """Microseconds of an all_reduce of n bytes."""
    mine = torch.arange(n // 4) % 1021
    x = torch.zeros(n // 4)
    dist.all_reduce(x)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(x)
    us = (time.perf_counter() - start) / calls * 1e6
    x.copy_(mine * (rank + 1))
    dist.all_reduce(x)
    if not torch.equal(x, (mine * (size * (size + 1) // 2)).float()):
        raise AssertionError(f"rank {rank} has other sums than those of all ranks")
    return us


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo prints lines of its own
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rows = sys.argv[1:] == ["hosts-dispatch"]
    dist.init_process_group("gloo")
    for line in sys.stdin:
        n, calls = map(int, line.split())
        if sys.argv[1:] == ["hosts-reduce"]:
            print(f"{reduce(rank, size, n, calls):.2f}", file=out, flush=True)
            continue
        sends = [routed(r, size, n) if rows else [n] * size for r in range(size)]
        put, got = sends[rank], [sends[p][rank] for p in range(size)]
        x = torch.cat([message(rank, p, put[p]) for p in range(size)])
        y, back = torch.empty(sum(got), dtype=torch.uint8), torch.empty_like(x)
        exchange(x, y, back if rows else None, put, got)
        y.fill_(255)
        back.fill_(255)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            exchange(x, y, back if rows else None, put, got)
        us = (time.perf_counter() - start) / calls * 1e6
        want = torch.cat([message(p, rank, got[p]) for p in range(size)])
        if not torch.equal(y, want) or (rows and not torch.equal(back, x)):
            raise AssertionError(f"rank {rank} has received other bytes than were sent")
        print(f"{us:.2f}", file=out, flush=True)
    dist.destroy_process_group()


main()
