"""Tokens, experts that multiply by a number, and rows of float8, for layers around a program's dispatchers."""

from __future__ import annotations

import torch

HIDDEN, TOP_K, MOST = 2048, 3, 64


def quantized(x):
    """Tokens as float8 with a scale for each 128 elements."""
    blocks = x.float().view(x.shape[0], x.shape[1] // 128, 128)
    scales = blocks.abs().amax(2).clamp(min=1e-10) / 448
    return (blocks / scales[:, :, None]).view(x.shape).to(torch.float8_e4m3fn), scales


def plain(x, scales):
    """Rows of float32, from those of float8 with scales too."""
    return x.float() if scales is None else (x.float().view(*scales.shape, 128) * scales[..., None]).view(x.shape)


def tokens(rank, size, step):
    torch.manual_seed(100 * step + rank)
    count = (7 + rank, 0 if rank == 0 else 40, MOST)[step]
    x = torch.randn(count, HIDDEN).to(torch.bfloat16)
    idx = torch.rand(count, 4 * size).argsort(1)[:, :TOP_K]
    return x, idx, torch.rand(count, TOP_K)


def factors(size):
    return torch.arange(4 * size, dtype=torch.float32) / 4 + 0.5


def want(x, idx, weights, size):
    return x * (weights * factors(size)[idx]).sum(1, keepdim=True)


def close(y, x, idx, weights, size, block):
    rtol = 0.07 if block else 0.02  # a number of float8 is off by one part in 16 at most
    torch.testing.assert_close(y.float(), want(x, idx, weights, size), rtol=rtol, atol=0.02)


def by_choice(rows, idx, weights, rank, size):
    """What this rank's experts make of rows whose choices are experts of all ranks: weighted and added up."""
    mine = (idx >= 4 * rank) & (idx < 4 * rank + 4)
    scale = torch.where(mine, weights * factors(size)[idx.clamp(min=0)], 0).sum(1, keepdim=True)
    return (rows * scale).to(torch.bfloat16)


def by_expert(rows, counts, rank, size):
    """The same of rows by expert, with room behind the last of each."""
    mine = factors(size).view(size, -1)[rank]
    here = torch.arange(rows.shape[1]) < counts[:, None]
    return torch.where(here[:, :, None], rows * mine[:, None, None], 0).to(torch.bfloat16)
