"""Persistent buffers in symmetric memory, with other memory that comes and goes: PyTorch's issue 178138.

    torchrun --nproc-per-node 2 examples/symmetric/persistent.py [--device cuda] [--order same|other]

Each rank keeps 8 buffers of 256 Ki floats and reduces all of them, twice. Between the reductions it allocates and frees other tensors, with
--order other in an order of its own. A library that finds a peer's buffer by the order of allocations then sums the wrong memory. Here a
buffer has one place on all ranks: on the host that of `switchyard.empty`, on a GPU one that its rank tells in the call, in a MemPool.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random

import torch
import torch.distributed as dist

import switchyard

BUFFERS, ELEMENTS, ROUNDS = 8, 256 << 10, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--order", choices=("same", "other"), default="same", help="in which ranks free what they do not keep")
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("switchyard")
    rank, size = dist.get_rank(), dist.get_world_size()

    pool = contextlib.nullcontext()
    if args.device == "cuda":
        pool = torch.cuda.use_mem_pool(switchyard.mem_pool(256 << 20))
    chance = random.Random(rank if args.order == "other" else 0)
    rows = []
    with pool:
        buffers, others = [], []
        for _ in range(BUFFERS):
            others.append(torch.empty(chance.randrange(1, ELEMENTS), device=args.device))
            if args.device == "cuda":
                buffers.append(torch.empty(ELEMENTS, device="cuda"))
            else:
                buffers.append(switchyard.empty(ELEMENTS, dtype=torch.float32))
        for turn in range(ROUNDS):
            for i, x in enumerate(buffers):
                x.fill_(100 * turn + 10 * i + rank)
                switchyard.all_reduce(x)
                want = float(size * (100 * turn + 10 * i) + size * (size - 1) // 2)
                rows.append((turn, i, want, x.min().item(), x.max().item()))
                del others[chance.randrange(len(others))]
                others.append(torch.empty(chance.randrange(1, ELEMENTS), device=args.device))
    switchyard.verify()

    wrong = sum(low != want or high != want for _, _, want, low, high in rows)
    if rank == 0:
        print("round  buffer     want      min      max")
        for turn, i, want, low, high in rows:
            print(f"{turn:5}  {i:6}  {want:7.0f}  {low:7.0f}  {high:7.0f}  {'ok' if low == high == want else 'WRONG'}")
    print(f"rank {rank}: {len(rows) - wrong} of {len(rows)} reductions are right", flush=True)
    dist.destroy_process_group()
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
