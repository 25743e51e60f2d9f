"""A rank of a job whose reductions go to gloo in part: Switchyard does not reduce integers by this operator."""

import sys

import torch
import torch.distributed as dist

import switchyard.torch  # noqa: F401, I001: the backend

dist.init_process_group("switchyard")
floats, bits = torch.ones(1024), torch.ones(2, dtype=torch.int64)
for _ in range(200):
    dist.all_reduce(floats)
    dist.all_reduce(bits, dist.ReduceOp.BXOR)
print("begins", flush=True)
sys.stdin.readline()  # the job is looked at then
