"""Runs the all-gather of all_gather.cu on GPUs, a rank each, in a CUDA graph.

    nvcc -std=c++17 -O3 -cubin -arch=sm_90 -I kernels/cuda/include -o all_gather.cubin examples/kernels/all_gather.cu
    torchrun --nproc-per-node 2 examples/kernels/all_gather.py all_gather.cubin
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import switchyard

dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)

world = switchyard.DeviceCommunicator()
kernel = world.load(Path(sys.argv[1]).read_bytes(), "all_gather")
out = switchyard.empty(size, 1 << 16, dtype=torch.int64, device="cuda")  # symmetric memory
x = torch.full((1 << 16,), rank, device="cuda")
dist.barrier()

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    kernel(16, 512, world, out, x, x.numel())
for step in range(1000):
    x.fill_(step * size + rank)
    graph.replay()
switchyard.synchronize()  # and raises what went wrong
assert out[:, -1].tolist() == [999 * size + r for r in range(size)]
print(f"rank {rank} has the parts of all {size}")
del graph
dist.barrier()
dist.destroy_process_group()
