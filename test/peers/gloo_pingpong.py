"""Time of one way of a message between two ranks by gloo, as test/perf p2p measures it, for its -peer.

python test/peers/gloo_pingpong.py SIZE... | grep -v Gloo

gloo prints lines of its own, which begin with [Gloo].
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank(me: int, sizes: list[int]) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    dist.init_process_group("gloo", rank=me, world_size=2)
    for n in sizes:
        out, into = torch.zeros(n, dtype=torch.uint8), torch.zeros(n, dtype=torch.uint8)
        us = []
        for turn in range(-10, 300 if n <= 1 << 20 else 30):
            start = time.perf_counter()
            if me == 0:
                dist.send(out, 1)
            dist.recv(into, 1 - me)
            if me == 1:
                dist.send(out, 0)
            if turn >= 0:
                us.append((time.perf_counter() - start) * 1e6 / 2)
        if me == 0:
            print(n, f"{sorted(us)[len(us) // 2]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank, ([int(word) for word in sys.argv[1:]],), nprocs=2)
