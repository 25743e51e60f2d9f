"""Switchyard next to torch's own collectives, in one run.

    python bench.py [--op ...] [--ranks 2,4] [--sizes 8K,...] [--seconds 3] [--symmetric [both]]  on the CPU, next to gloo
    python bench.py --busy 4                                                                      where others compute, too
    python bench.py --device cuda [--ranks 8] [--sizes 8K,...] [--symmetric [both]]               on GPUs, next to NCCL
    python bench.py --beside [--ranks 2] [--sizes 8M,...] [--product 8192] [--max-sms 8]          on GPUs, next to compute
    python bench.py --op dispatch [--device cuda] [--ranks 2] [--tokens 128,4096] [--hidden 7168] [--experts 256] [--top-k 8]
    python bench.py --host [--ranks 2] [--tokens 128,4096]                                        the host's time, on GPUs

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

--host is how long the host takes for calls: as operators of torch, by Python, which makes what is unusual, and torch's own.
"in a row" is 100 calls, "alone" is one behind a barrier.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import switchyard
from benchmarks import compute, cpu, dispatch, gpus, host
from benchmarks.common import busy_loops


def worker(rank: int, ranks: int, store: str, args: argparse.Namespace) -> None:
    backend, where = "gloo", cpu.on_cpu
    if args.device == "cuda":
        where = compute.beside_compute if args.beside else gpus.on_gpus
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if ranks <= torch.cuda.device_count():
            backend = "nccl"
    dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    if args.op == "dispatch":
        where = dispatch.dispatching
    if args.host:
        where = host.host_time
    for symmetric in {"no": [False], "yes": [True], "both": [False, True]}[args.symmetric]:
        where(rank, ranks, args, symmetric)
    switchyard.barrier()
    dist.destroy_process_group()


def main(of_rank: Callable[..., None] = worker, peer: str | None = None) -> None:
    """Measure. Drivers of other libraries give their own of_rank, and the name of what it measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--op", default="all_to_all_single", choices=(*cpu.OPS, "dispatch"), help="on GPUs this one or dispatch"
    )
    parser.add_argument("--ranks", help="2,4 on the CPU, the number of GPUs on those")
    parser.add_argument("--sizes", help="8K to 32M on the CPU, to 8M on GPUs")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each size, on the CPU")
    parser.add_argument("--busy", type=int, default=0, help="processes that keep a core busy each, for as long as it runs")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each library for each size, on GPUs")
    parser.add_argument(
        "--symmetric", nargs="?", choices=("no", "yes", "both"), const="yes", default="no", help="outputs in the symmetric heap"
    )
    parser.add_argument("--host", action="store_true", help="the host's time in calls, on GPUs")
    parser.add_argument("--beside", action="store_true", help="exchanges next to matrix products, on GPUs")
    parser.add_argument("--product", type=int, default=8192, help="rows and columns of those matrices")
    parser.add_argument("--products", type=int, default=20, help="products in a block")
    parser.add_argument("--max-sms", type=int, help="the most multiprocessors for an exchange next to products, or a dispatch")
    parser.add_argument("--copy-sms", type=int, help="and the most that copy out of staging, for an exchange")
    parser.add_argument("--tokens", help="of a rank, for dispatch: 4096,128 on GPUs, 16,128,1024 on the CPU")
    parser.add_argument("--hidden", type=int, help="elements of a token: 7168 on GPUs, 1024 on the CPU")
    parser.add_argument("--experts", type=int, help="of all ranks: 256 on GPUs, 64 on the CPU")
    parser.add_argument("--top-k", type=int, default=8, help="experts of a token")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each row in place of tables")
    args = parser.parse_args()
    args.peer = peer
    if args.beside:
        args.device, args.sizes = "cuda", args.sizes or "8M,32M,128M"
    if args.host:
        args.device = "cuda"
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
            mp.spawn(of_rank, (ranks, os.path.join(folder, "store"), args), ranks)


if __name__ == "__main__":
    main()
