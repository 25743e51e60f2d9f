"""Exchanges rows of different numbers among its ranks: rank r sends r+1 rows to each."""

import torch
import torch.distributed as dist

import switchyard
import switchyard.torch

on_gpus = torch.cuda.device_count() >= 2
device = "cuda" if on_gpus else "cpu"
dist.init_process_group("nccl" if on_gpus else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
if on_gpus:
    torch.cuda.set_device(rank)

send = [rank + 1] * size  # rows for each rank
recv = [peer + 1 for peer in range(size)]  # rows from each
x = torch.full((sum(send), 4), float(rank), device=device)
y = torch.empty(sum(recv), 4, device=device)

switchyard.all_to_all_single(y, x, recv, send)  # was: dist.all_to_all_single(y, x, recv, send)
print(f"rank {rank} got", y[:, 0].tolist())

x.requires_grad_()  # and with a gradient
z = switchyard.torch.all_to_all_single(x, recv, send)
z.square().sum().backward()
assert torch.equal(x.grad, 2 * x)

dist.destroy_process_group()
