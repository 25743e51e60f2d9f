"""HybridEPBuffer: rows by expert."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from layers import HIDDEN, factors, routing, want

import deep_ep
from deep_ep.hybrid_ep_buffer import indices_to_map


def applied(rows, counts, rank, size):
    """What this rank's experts make of rows that lie expert after expert."""
    mine = factors(size, rows.device).view(size, -1)[rank]
    scale = torch.repeat_interleave(mine, counts.to(rows.device))
    return rows[: scale.shape[0]] * scale[:, None]


def both_ways(rank, size, by_map, pad, device="cpu"):
    """There and back, with probabilities, again with other tokens, and gradients of probabilities."""
    buffer, experts = deep_ep.HybridEPBuffer(dist.group.WORLD, HIDDEN, 64, 4), 4 * size
    for seed, tokens in enumerate((6 + rank, 0 if rank == 0 else 100, 9)):
        x, idx, weights = routing(rank, size, tokens, seed, device)
        chosen, probs = indices_to_map(idx, weights, tokens, experts)
        if by_map:
            ways = {"routing_map": chosen, "probs": probs}
        else:
            ways = {"topk_idx": idx, "topk_weights": weights, "num_of_experts": experts}
        rows, beside, scales, counts, handle = buffer.dispatch_with_permute(
            hidden=x, num_of_experts_per_rank=4, pad_multiple=pad, **ways
        )
        assert scales is None
        assert len(handle) == 11
        assert not handle[-1].any()
        assert handle[8] == tokens
        assert (counts % (pad or 1) == 0).all()
        assert rows.shape[0] == int(counts.sum()) == beside.shape[0]
        assert (handle[7].cpu() <= counts).all()
        assert (counts - handle[7].cpu() < (pad or 1)).all()
        out = applied(rows, counts, rank, size) * beside[:, None]
        y, sums = buffer.combine_with_unpermute(hidden=out, probs=beside, handle=handle, pad_multiple=pad)
        torch.testing.assert_close(y, want(x, idx, weights, size), rtol=1e-4, atol=1e-5)
        assert torch.equal(sums, probs)
        again = buffer.dispatch_with_permute(hidden=2 * x, handle=handle, pad_multiple=pad)
        assert torch.equal(again[0], 2 * rows)
        assert again[1] is None
    buffer.destroy()


@pytest.mark.parametrize(("by_map", "pad"), [(True, None), (True, 16), (False, 8)])
def test_there_and_back(gloo, by_map, pad):
    gloo.run(both_ways, by_map, pad)


def budgeted(rank, size, device="cpu"):
    """A number of rows that the caller says. Those behind it are dropped, and the handle says so."""
    buffer, experts = deep_ep.HybridEPBuffer(dist.group.WORLD, HIDDEN, 20, 4), 4 * size
    x, idx, weights = routing(rank, size, 20, device=device)
    chosen, probs = indices_to_map(idx, weights, 20, experts)
    given = {"hidden": x, "routing_map": chosen, "probs": probs, "pad_multiple": 4}
    whole, _, _, counts, _ = buffer.dispatch_with_permute(**given)
    for budget in (4 * (whole.shape[0] // 4 + 3), 8):
        rows, beside, _, kept, handle = buffer.dispatch_with_permute(num_permuted_tokens=budget, non_blocking=True, **given)
        n = min(budget, whole.shape[0])
        assert rows.shape[0] == beside.shape[0] == budget
        assert int(kept.sum()) == n
        assert torch.equal(rows[:n], whole[:n])
        if device == "cpu":  # on a GPU they are as they come
            assert not rows[n:].any()
        assert bool(handle[-1] != 0) == (budget < whole.shape[0])
        ends = counts.cumsum(0).clamp(max=budget)
        assert torch.equal(kept.cumsum(0).cpu(), ends)
        y, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle, pad_multiple=4)
        assert y.shape == x.shape
        assert (budget == 8 or torch.equal(y, x * chosen.sum(1, keepdim=True)))
    buffer.destroy()


def test_rows_that_a_budget_has_no_room_for(pair):
    pair.run(budgeted)


def scaled(rank, size):
    """Tokens of float8 come with their scales."""
    buffer = deep_ep.HybridEPBuffer(dist.group.WORLD, HIDDEN, 20, 4)
    x, idx, _ = routing(rank, size, 20)
    scales = torch.rand(20, HIDDEN // 128)
    q = (x / 8).to(torch.float8_e4m3fn)
    rows, _, beside, counts, handle = buffer.dispatch_with_permute(
        hidden=q, scaling_factor=scales, topk_idx=idx, num_of_experts=4 * size
    )
    assert rows.dtype is q.dtype
    assert beside.shape == (int(counts.sum()), HIDDEN // 128)
    plain = rows.float() * beside.repeat_interleave(128, 1)
    y, _ = buffer.combine_with_unpermute(hidden=plain, handle=handle)
    want = q.float() * scales.repeat_interleave(128, 1) * (idx >= 0).sum(1, keepdim=True)
    torch.testing.assert_close(y, want)
    buffer.destroy()


def test_float8(pair):
    pair.run(scaled)


def refused(rank, size):
    buffer = deep_ep.HybridEPBuffer(dist.group.WORLD, HIDDEN, 20, 4)
    x, idx, weights = routing(rank, size, 20)
    chosen, probs = indices_to_map(idx, weights, 20, 4 * size)
    handle = buffer.dispatch_with_permute(hidden=x, routing_map=chosen)[-1]

    def send(hidden=x, routing_map=chosen, **arguments):
        return buffer.dispatch_with_permute(hidden=hidden, routing_map=routing_map, **arguments)

    def back(hidden, **arguments):
        return buffer.combine_with_unpermute(hidden=hidden, **arguments)

    def again(hidden=x, **arguments):
        return buffer.dispatch_with_permute(hidden=hidden, handle=handle, **arguments)

    rows = torch.zeros(handle.rows, HIDDEN)
    for kind, text, call in (
        (TypeError, "routing_map is torch.int64", lambda: send(routing_map=chosen.long())),
        (ValueError, r"routing_map has shape \(19, 8\)", lambda: send(routing_map=chosen[:19])),
        (ValueError, r"probs has shape \(20, 7\)", lambda: again(probs=probs[:, :7])),
        (ValueError, "neither routing_map nor topk_idx", lambda: send(routing_map=None, topk_idx=idx)),
        (ValueError, "19 tokens, those of the handle are 20", lambda: again(x[:19])),
        (TypeError, "handle is tuple", lambda: back(rows, handle=())),
        (ValueError, "rows, the dispatch brought", lambda: back(rows[1:], handle=handle)),
        (ValueError, "probs has shape", lambda: back(rows, handle=handle, probs=torch.zeros(1))),
        (NotImplementedError, "use dispatch_with_permute", lambda: buffer.dispatch(hidden=x)),
        (NotImplementedError, "use combine_with_unpermute", lambda: buffer.combine(hidden=x)),
        (NotImplementedError, "no templates", lambda: buffer.update_template_config(hidden_dim=8)),
    ):
        with pytest.raises(kind, match=text):
            call()
    both = {"topk_idx": idx, "num_of_experts": 4 * size, "routing_map": None, "non_blocking": True, "pad_multiple": 16}
    for budget in (None, 30):
        with pytest.raises(ValueError, match=f"num_permuted_tokens is {budget}, want a multiple of 16"):
            send(num_permuted_tokens=budget, **both)
    more = torch.zeros(21, HIDDEN)
    with pytest.raises(ValueError, match="21 tokens, max_num_of_tokens_per_rank is 20"):
        send(more, num_permuted_tokens=32, **{**both, "topk_idx": torch.zeros(21, 3, dtype=torch.int64)})
    assert not back(rows, handle=handle)[0].any()
    buffer.destroy()


def test_wrong_arguments(pair):
    pair.run(refused)
