"""Sums of ElasticBuffer to the last bit: biases first, then rows in the order of a token's choices, each rank's alone before
where that is allowed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from layers import HIDDEN, TOP_K, routing

import deep_ep

MOST = 64


def summed(rows, start, dtype):
    """The sums [tokens, hidden] of rows [tokens, top_k, hidden] in their order, rounded once."""
    made = start.clone()
    for k in range(rows.shape[1]):
        made += rows[:, k]
    return made.to(dtype)


def bits(rank, size, expand, multiple, room):
    from deep_ep.buffers import _in_order

    _in_order.ROOM = room
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=MOST, allow_multiple_reduction=multiple)
    for dtype, biases, cpu_sync in (
        (torch.float32, 1, True),
        (torch.float32, 2, False),
        (torch.bfloat16, 0, True),
        (torch.bfloat16, 2, True),
    ):
        x, idx, weights = routing(rank, size, 40 - rank, biases)
        x = x.to(dtype)
        args = {"num_experts": 4 * size, "do_expand": expand, "do_cpu_sync": cpu_sync}
        rows, _, beside, handle, _ = buffer.dispatch(x, idx, weights, **args)
        came = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        # What each choice of each token brings, or each rank for it, on all ranks alike.
        random = torch.Generator().manual_seed(7)
        brings = torch.randn((size * MOST, TOP_K, HIDDEN), generator=random).to(dtype)
        of_ranks = torch.randn((size * MOST, size, HIDDEN), generator=random).to(dtype)
        bias = tuple(torch.randn(x.shape, generator=random).to(dtype) for _ in range(biases))
        out = torch.zeros(rows.shape, dtype=dtype)
        number = handle.recv_src_metadata[:came, 0].long()
        if expand:
            slots = handle.recv_src_metadata[:came, 2:].long()
            out[slots[slots >= 0]] = brings[number][slots >= 0]
        else:
            out[:came] = of_ranks[number, rank]
        y, sums, _ = buffer.combine(out, handle, beside, bias or None)
        assert torch.equal(sums, weights)
        assert torch.equal(buffer.combine(out, handle, None, bias or None)[0], y)

        mine = slice(rank * MOST, rank * MOST + x.shape[0])
        start = torch.zeros(x.shape)
        for b in bias:
            start += b
        of = torch.where(idx < 0, -1, idx // 4)  # the rank of each choice
        parts = torch.zeros((x.shape[0], TOP_K, HIDDEN), dtype=dtype)
        for t in range(x.shape[0]):
            for k in range(TOP_K):
                r = int(of[t, k])
                if r >= 0 and expand and not multiple:
                    parts[t, k] = brings[mine][t, k]
                elif r >= 0 and r not in of[t, :k]:  # the first choice of its rank stands for all
                    there = brings[mine][t, of[t] == r][None]
                    parts[t, k] = summed(there, torch.zeros((1, HIDDEN)), dtype) if expand else of_ranks[mine][t, r]
        assert torch.equal(y, summed(parts, start, dtype))
    buffer.destroy()


@pytest.mark.parametrize("room", [8192, 1], ids=["at once", "by choice"])
@pytest.mark.parametrize(("expand", "multiple"), [(True, False), (True, True), (False, False)])
def test_bits(gloo, expand, multiple, room):
    gloo.run(bits, expand, multiple, room)
