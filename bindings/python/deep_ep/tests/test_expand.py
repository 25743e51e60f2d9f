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
def test_sums_are_made_in_float32_in_the_order_of_choices(dtype, alignment, rows, hidden, top_k, chosen):
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize(
    ("rows", "hidden", "top_k", "chosen"),
    [(64, 256, 8, 0.6), (5, 128, 1, 0.5), (300, 384, 16, 1), (7, 128, 3, 0), (0, 128, 3, 0)],
)
@pytest.mark.parametrize("room", ["exact", "more", "less"])
def test_rows_on_the_host_are_those_of_a_gpu(dtype, alignment, rows, hidden, top_k, chosen, room):
    """By one call of the library, and by operators of torch."""
    torch.manual_seed(rows)
    experts = 16
    idx = torch.rand(rows, experts).argsort(1)[:, :top_k]
    idx = torch.where(torch.rand(rows, top_k) < chosen, idx, -1)
    counts = torch.bincount(idx[idx >= 0], minlength=experts).to(torch.int32)
    length = int((-(-counts // alignment) * alignment).sum())
    length = {"exact": length, "more": length + 3 * alignment, "less": max(length - alignment, 0)}[room]
    x, scales = torch.randn(rows, hidden).to(dtype), torch.rand(rows, hidden // 128)
    weights = torch.rand(rows, top_k)
    slots = _expand.slots_of(idx, counts, alignment)
    slots = torch.where(slots >= length, -1, slots)
    found = _expand.tokens_of(slots, length)
    want = _expand.spread(x, found, top_k), _expand.spread(scales, found, top_k), _expand.weights_of(weights, found), slots
    made = _expand.on_host(x, scales, weights, idx, experts, alignment, length)
    for a, b in zip(made, want):
        assert a.dtype is b.dtype
        assert a.shape == b.shape
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    bare = _expand.on_host(x, None, None, idx, experts, alignment, length)
    assert torch.equal(bare[0].view(torch.uint8), want[0].view(torch.uint8))
    assert bare[1] is bare[2] is None
    assert torch.equal(bare[3], slots)
