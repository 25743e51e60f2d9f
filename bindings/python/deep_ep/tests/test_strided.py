"""Tensors whose numbers do not lie one after the other mean what their copies do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from layers import HIDDEN, dispatched, routing, strided

import deep_ep


def normal(x, idx, weights, size):
    buffer = deep_ep.Buffer(dist.group.WORLD)
    rows, chosen, beside, counts, handle, _ = dispatched(buffer, x, idx, weights)
    again = buffer.dispatch(2 * x, handle)[0]
    y, sums, _ = buffer.combine(rows, handle, beside)
    worst = dispatched(buffer, x, idx, weights, num_worst_tokens=64)[:3]
    buffer.destroy()
    return rows, chosen, beside, counts, again, y, sums, *(w[: rows.shape[0]] for w in worst)


def elastic(x, idx, weights, size, expand):
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD)
    rows, chosen, beside, handle, _ = buffer.dispatch(x, idx, weights, num_experts=4 * size, do_expand=expand)
    y, sums, _ = buffer.combine(rows, handle, beside)
    buffer.destroy()
    return rows, chosen, beside, y, sums


def hybrid(x, idx, weights, size):
    buffer = deep_ep.HybridEPBuffer(dist.group.WORLD, HIDDEN, 64, 4)
    rows, beside, _, counts, handle = buffer.dispatch_with_permute(
        hidden=x, topk_idx=idx, topk_weights=weights, num_of_experts=4 * size, num_of_experts_per_rank=4
    )
    y, sums = buffer.combine_with_unpermute(hidden=rows, probs=beside, handle=handle)
    buffer.destroy()
    return rows, beside, counts, y, sums


CALLS = {
    "V1": normal,
    "V2": lambda *given: elastic(*given, False),
    "V2 expanded": lambda *given: elastic(*given, True),
    "hybrid": hybrid,
}


def same(rank, size, name):
    for seed in range(3):  # the second and third time what checks have found is known
        given = routing(rank, size, 12 + rank, seed)
        want, got = (CALLS[name](*tensors, size) for tensors in (given, [strided(x) for x in given]))
        for a, b in zip(want, got):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", CALLS)
def test_strided_tensors(pair, name):
    pair.run(same, name)
