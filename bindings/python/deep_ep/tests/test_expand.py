"""Rows one for each choice, and back."""

from __future__ import annotations

import pytest
import torch

from deep_ep.buffers import _expand


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize(
    ("rows", "hidden", "top_k", "chosen"), [(64, 256, 8, 0.6), (5, 24, 1, 0.5), (300, 40, 16, 1), (7, 8, 3, 0)]
)
@pytest.mark.parametrize("at_once", [_expand.AT_ONCE, 5000])
def test_sums_are_made_in_float32_in_the_order_of_choices(monkeypatch, at_once, dtype, alignment, rows, hidden, top_k, chosen):
    monkeypatch.setattr(_expand, "AT_ONCE", at_once)
    torch.manual_seed(rows)
    experts = 16
    idx = torch.rand(rows, experts).argsort(1)[:, :top_k]
    idx = torch.where(torch.rand(rows, top_k) < chosen, idx, -1)
    counts = torch.bincount(idx[idx >= 0], minlength=experts).to(torch.int32)
    slots = _expand.slots_of(idx, counts, alignment)
    _, ends = _expand.starts_of(counts, alignment)
    x = (torch.randn(int(ends.max()) + alignment, hidden) * 100).to(dtype)
    used = torch.zeros(x.shape[0], dtype=torch.bool)
    used[slots[slots >= 0].long()] = True
    x[~used] = torch.nan
    want = torch.zeros(rows, hidden)
    for token in range(rows):
        for slot in slots[token].tolist():
            if slot >= 0:
                want[token] += x[slot].float()
    assert torch.equal(_expand.fold(x, slots), want.to(dtype))
    nothing = _expand.fold(x[:0], torch.full_like(slots, -1))
    assert torch.equal(nothing, torch.zeros(rows, hidden, dtype=dtype))
