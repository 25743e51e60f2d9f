"""Rows one for each choice, and back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import world

from deep_ep import ElasticBuffer
from deep_ep.buffers import _expand

HIDDEN, TOP_K, LOCAL = 256, 6, 8


def expanded(rank, size, device="cpu"):
    """Rows, scales and weights are those of the choices, and sums are made in float32, in the order of choices."""
    torch.manual_seed(rank)
    experts, buffer = LOCAL * size, ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=64, hidden=HIDDEN)
    for tokens, chosen in ((64, 0.7), (5 + rank, 1), (7, 0), (0 if rank else 3, 0.5)):
        idx = torch.rand(tokens, experts).argsort(1)[:, :TOP_K]
        idx = torch.where(torch.rand(tokens, TOP_K) < chosen, idx, -1).to(device)
        weights = torch.rand(tokens, TOP_K, device=device)
        x = torch.randn(tokens, HIDDEN).to(device, torch.bfloat16)
        f8, scales = x.to(torch.float8_e4m3fn), torch.rand(tokens, HIDDEN // 128, device=device)
        for sent, alignment, cpu_sync in ((x, 1, True), (x, 16, False), ((f8, scales), 16, True), ((f8, scales), 1, False)):
            how = {"num_experts": experts, "expert_alignment": alignment, "do_cpu_sync": cpu_sync}
            plain = buffer.dispatch(sent, idx, weights, **how)
            made = buffer.dispatch(sent, idx, weights, **how, do_expand=True)
            check(plain, made, alignment)
            again = buffer.dispatch(sent, handle=made[3])
            check((*plain[:2], None), (again[0], None, None, made[3]), alignment)
            back(buffer, made)
    buffer.destroy()


def check(plain, made, alignment):
    """A dispatch by expert beside the same one by token."""
    rows, indices, weights = plain[:3]
    got, _, given, handle = made[:4]
    counts = handle.num_unaligned_recv_tokens_per_expert.tolist()
    first = [sum(-(-n // alignment) * alignment for n in counts[:e]) for e in range(len(counts))]
    places, padding, ends = [], set(range(first[-1] + -(-counts[-1] // alignment) * alignment)), list(first)
    slots = handle.slots.flatten().tolist()
    for choice, expert in enumerate(indices.flatten().tolist()):
        if expert < 0:
            assert slots[choice] == -1
            continue
        assert slots[choice] == ends[expert]
        padding.discard(ends[expert])
        places.append((choice, ends[expert]))
        ends[expert] += 1
    assert ends == [a + n for a, n in zip(first, counts)]
    choices = torch.tensor([c for c, _ in places], dtype=torch.int64)
    at = torch.tensor([r for _, r in places], dtype=torch.int64)
    parts = [(rows, got)] if isinstance(rows, torch.Tensor) else list(zip(rows, got))
    pairs = [(a.cpu().view(torch.uint8)[choices // TOP_K], b.cpu().view(torch.uint8)) for a, b in parts]
    if weights is not None:
        pairs.append((weights.cpu().flatten()[choices], given.cpu()))
    for want, came in pairs:
        assert torch.equal(came[at], want)
        assert not came[sorted(padding)].any()


def back(buffer, made):
    """Sums of rows of experts, and weights of choices. Rows of padding are not read."""
    handle, weights = made[3], made[2]
    slots = handle.slots.cpu().to(torch.int64)
    used = slots[slots >= 0]
    rows = torch.full((handle.num_expanded_tokens, HIDDEN), torch.nan, dtype=torch.bfloat16)
    rows[used] = (torch.randn(used.shape[0], HIDDEN) * 100).bfloat16()
    want = torch.zeros(slots.shape[0], HIDDEN)
    for k in range(TOP_K):
        there = slots[:, k] >= 0
        want[there] += rows[slots[there, k]].float()
    x = rows.to(weights.device)
    sums, beside = _expand.fold(x, weights, handle.slots, handle._routing)
    assert torch.equal(sums.cpu(), want.bfloat16())
    entries = torch.cat((weights.cpu(), torch.zeros(1)))  # -1 is the last
    assert torch.equal(beside.cpu(), torch.where(slots < 0, 0, entries[slots]))
    buffer.combine(x, handle, weights)


@pytest.mark.parametrize("size", [1, 2])
def test_rows_of_choices_are_those_of_tokens(worlds, size):
    worlds.get(size, world.gloo).run(expanded)
