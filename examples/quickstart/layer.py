"""A step of training of one MoE layer, whose experts are divided among the ranks."""

import os

import torch
import torch.distributed as dist

import switchyard
from switchyard import layers

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 256, 128, 8, 2, 512

on_gpus = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
device = "cuda" if on_gpus else "cpu"
if on_gpus:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if on_gpus else "gloo")

tokens = switchyard.Dispatcher(
    EXPERTS, TOP_K, HIDDEN, max_tokens=TOKENS, dtype="bfloat16", layout="token_major", device=device, host_counts=True
)
router = layers.Router(HIDDEN, EXPERTS, TOP_K, device=device)
layer = layers.MoE(tokens, INNER, router=router, shared=INNER)

x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
y = layer(x)  # or layer(x, experts, weights), where the caller routes
y.float().square().mean().backward()
print(f"rank {dist.get_rank()}:", *(f"{name} {p.grad.norm().item():.3f}" for name, p in layer.named_parameters()))

del y
layer.close()
tokens.close()
dist.destroy_process_group()
