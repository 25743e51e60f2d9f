"""Tokens, experts that multiply by a number, and what a plain all_gather brings, for layers around a program's dispatchers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from switchyard import errors

HIDDEN, OTHER, TOP_K, MOST = 2048, 2560, 3, 64  # lengths that all of them know


def quantized(x):
    """Tokens as float8 with a scale for each 128 elements, as DeepEP's low latency makes them."""
    blocks = x.float().view(x.shape[0], x.shape[1] // 128, 128)
    most = blocks.abs().amax(2).clamp(min=1e-4)
    factor = torch.tensor(448.0) / most  # 448 / most is a product with the reciprocal
    return (blocks * factor[:, :, None]).view(x.shape).to(torch.float8_e4m3fn), most / 448


def plain(x, scales):
    """Rows of float32, from those of float8 with scales too."""
    return x.float() if scales is None else (x.float().view(*scales.shape, 128) * scales[..., None]).view(x.shape)


def arrived(x, block):
    """Tokens as experts see them: of float32, with what float8 has lost."""
    return plain(*quantized(x)) if block else x.float()


def tokens(rank, size, step):
    torch.manual_seed(100 * step + rank)
    count = (7 + rank, 0 if rank == 0 else 40, MOST)[step]
    x = torch.randn(count, HIDDEN).to(torch.bfloat16)
    idx = torch.rand(count, 4 * size).argsort(1)[:, :TOP_K]
    return x, idx, torch.rand(count, TOP_K)


def factors(size):
    return torch.arange(4 * size, dtype=torch.float32) / 4 + 0.5


def close(y, x, idx, weights, size, block):
    """A layer's result is that of the same layer here, but for three roundings to bfloat16 of one part in 256 each."""
    want = arrived(x, block) * (weights * factors(size)[idx]).sum(1, keepdim=True)
    torch.testing.assert_close(y.float(), want, rtol=3 / 256, atol=1e-6)


def gathered(x, idx, weights, rank, size, block=False):
    """Tokens for this rank by rank and token, by an all_gather, with choices that are here, else -1, and weights."""
    everyone = [None] * size
    dist.all_gather_object(everyone, (x, idx, weights))
    x, idx, weights = (torch.cat(parts) for parts in zip(*everyone))
    mine = (idx >= 4 * rank) & (idx < 4 * rank + 4)
    here = mine.any(1)
    return arrived(x, block)[here], torch.where(mine, idx - 4 * rank, -1)[here], torch.where(mine, weights, 0)[here]


def same(rows, idx, weights, sent):
    """Rows by token are those of sent, to the bit, with their choices, numbered here, and weights."""
    want, choices, scales = gathered(*sent)
    assert torch.equal(rows, want)
    assert torch.equal(torch.where(choices >= 0, idx, -1), choices)
    assert torch.equal(torch.where(choices >= 0, weights, 0), scales)


def in_order(rows):
    """Rows in an order that does not depend on how they came."""
    return rows[sorted(range(len(rows)), key=lambda i: rows[i, :8].tolist())]


def same_by_expert(rows, starts, counts, sent):
    """The same of rows by expert, of which those of each begin at starts: in any order for an expert."""
    want, choices, _ = gathered(*sent)
    assert list(counts) == choices[choices >= 0].bincount(minlength=4).tolist()
    for expert, (start, count) in enumerate(zip(starts, counts)):
        assert torch.equal(in_order(rows[start : start + count]), in_order(want[(choices == expert).any(1)]))


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


def disagree(call, rank):
    """Ranks that send tokens of two lengths, both of which all have sent before: the error of each has both."""
    call(torch.zeros(8, OTHER, dtype=torch.bfloat16))
    with pytest.raises(errors.Mismatch, match=f"Hidden {HIDDEN}.*Hidden {OTHER}"):
        call(torch.zeros(8, OTHER if rank else HIDDEN, dtype=torch.bfloat16))
