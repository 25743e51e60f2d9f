"""Layers of experts over the buffers, next to the same layer by torch alone. What the tests have in common."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

HIDDEN, TOP_K = 256, 3


def routing(rank: int, size: int, tokens: int, seed: int = 0, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Tokens with their choices, of which some are none, and their weights."""
    g = torch.Generator().manual_seed(1000 * seed + rank)
    experts = 4 * size
    x = torch.randn(tokens, HIDDEN, generator=g)
    idx = torch.rand(tokens, experts, generator=g).argsort(1)[:, :TOP_K]
    idx = torch.where(torch.rand(idx.shape, generator=g) < 0.2, -1, idx)
    weights = torch.rand(tokens, TOP_K, generator=g) * (idx >= 0)
    return x.to(device), idx.to(device), weights.to(device)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with others between them."""
    wide = x.repeat_interleave(2, 1)
    wide[:, 1::2] += 1
    return wide[:, ::2]


def factors(size: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """What each expert multiplies by."""
    return torch.arange(4 * size, dtype=torch.float32, device=device) / 4 + 0.5


def want(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, size: int) -> torch.Tensor:
    return x * (weights * factors(size, x.device)[idx.clamp(min=0)]).sum(1, keepdim=True)


def applied(rows: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """What this rank's experts make of rows by token."""
    mine = factors(size, rows.device).view(size, -1)[rank]
    scale = torch.where(idx >= 0, weights * mine[idx.clamp(min=0)], 0).sum(1, keepdim=True)
    return (rows.float() * scale).to(rows.dtype)


def dispatched(buffer: Any, x: Any, idx: torch.Tensor, weights: torch.Tensor, **arguments: Any) -> tuple[Any, ...]:
    """A dispatch of the first generation as its callers make it."""
    per_rank, _, per_expert, inside, _ = buffer.get_dispatch_layout(idx, 4 * dist.get_world_size())
    return buffer.dispatch(
        x,
        topk_idx=idx,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=inside,
        num_tokens_per_expert=per_expert,
        **arguments,
    )
