"""torchtitan's DeepEP module over this package, on CPUs, for which its operators of CUDA tensors are registered here."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchtitan", exc_type=ImportError)

HIDDEN, TOP_K, MOST = 64, 3, 48


def module():
    """The module, whose operators take tensors on the CPU."""
    from torchtitan.distributed.deepep import deepep

    if not hasattr(deepep, "on_host"):
        deepep._lib.impl("dispatch", deepep._dispatch_op_impl, "CPU")
        deepep._lib.impl("combine", deepep._combine_op_impl, "CPU")
        deepep.on_host = True
    return deepep


def factors(size):
    return torch.arange(4 * size, dtype=torch.float32) / 4 + 0.5


def by_hand(x, idx, scores, size):
    return (torch.tanh(x[:, None] * factors(size)[idx][:, :, None]) * scores[:, :, None]).sum(1)


def layer(of, x, idx, scores, rank, size, most):
    """Experts around the module's two functions, as torchtitan's dispatcher calls them: with gradients it takes no rows by
    expert."""
    of.get_buffer(dist.group.WORLD, hidden=HIDDEN, num_max_tokens_per_rank=MOST, num_topk=TOP_K)
    rows, counts, state = of.dispatch_tokens(x, idx, scores, 4, 4 * size, num_tokens_per_rank=most, cudagraphable=True)
    mine = factors(size).view(size, -1)[rank]
    scale = torch.zeros(rows.shape[0])
    scale[: int(counts.sum())] = torch.repeat_interleave(mine, counts)
    y = of.combine_tokens(torch.tanh(rows * scale[:, None]), state)
    of.sync_combine()
    return y


def tokens(rank, size, step):
    torch.manual_seed(100 * step + rank)
    count = (6 + rank, 0 if rank == 0 else 40, MOST)[step]
    idx = torch.rand(count, 4 * size).argsort(1)[:, :TOP_K]
    return torch.randn(count, HIDDEN), idx, torch.rand(count, TOP_K) + 0.1


def trained(rank, size):
    """Forward and both gradients, with exact numbers of rows."""
    of = module()
    for step in range(3):
        x0, idx, s0 = tokens(rank, size, step)
        g, most = torch.randn_like(x0), max(tokens(r, size, step)[0].shape[0] for r in range(size))
        answers = []
        for ours in (True, False):
            x, scores = x0.clone().requires_grad_(), s0.clone().requires_grad_()
            y = layer(of, x, idx, scores, rank, size, most) if ours else by_hand(x, idx, scores, size)
            y.backward(g)
            answers.append([y.detach(), x.grad, scores.grad])
        for a, b in zip(*answers):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert not of._handle_cache


def served(rank, size):
    """Without gradients, and rows by expert in room for the worst case."""
    of = module()
    with torch.no_grad():
        for step in range(3):
            x, idx, scores = tokens(rank, size, step)
            most = max(tokens(r, size, step)[0].shape[0] for r in range(size))
            y = layer(of, x, idx, scores, rank, size, most)
            torch.testing.assert_close(y, by_hand(x, idx, scores, size), rtol=1e-4, atol=1e-5)
    assert not of._handle_cache


def test_training(gloo):
    gloo.run(trained)


def test_inference(gloo):
    gloo.run(served)
