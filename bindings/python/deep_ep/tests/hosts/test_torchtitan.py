"""torchtitan's dispatcher over this package, on CPUs, for which its operators of CUDA tensors are registered here."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from programs import REPLACED
from rows import in_order
from switchyard import errors

HIDDEN, TOP_K, MOST = 64, 3, 48


def module():
    """The module, whose operators take tensors on the CPU."""
    from torchtitan.distributed.deepep import deepep

    if not hasattr(deepep, "on_host"):
        for name in REPLACED["torchtitan"]:
            name = name.removeprefix("deepep::")
            deepep._lib.impl(name, getattr(deepep, f"_{name}_op_impl"), "CPU")
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


def dispatcher(size, cudagraphable):
    """torchtitan's own dispatcher, wired as its models do."""
    module()
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.models.common.token_dispatcher import DeepEPTokenDispatcher

    of = DeepEPTokenDispatcher(
        DeepEPTokenDispatcher.Config(
            num_experts=4 * size, top_k=TOP_K, cudagraphable=cudagraphable, num_max_tokens_per_rank=MOST, hidden_dim=HIDDEN
        )
    )
    of.wire_meshes(ep_mesh=init_device_mesh("cpu", (size,)))
    return of


def through(of, x, idx, scores, rank, size):
    """A layer of experts around the dispatcher, whose rows are compared with those of an all_gather."""
    everyone = [None] * size
    dist.all_gather_object(everyone, (x.detach(), idx))
    everything, choices = (torch.cat(parts) for parts in zip(*everyone))
    rows, counts, sent = of.dispatch(x, scores, idx, idx.flatten().bincount(minlength=4 * size))
    assert counts.tolist() == choices.flatten().bincount(minlength=4 * size)[4 * rank :][:4].tolist()
    ends = counts.cumsum(0).tolist()
    for expert, (start, end) in enumerate(zip([0, *ends], ends), 4 * rank):
        want = everything[(choices == expert).any(1)]
        assert torch.equal(in_order(rows[start:end].detach()), in_order(want))
    scale = torch.zeros(rows.shape[0])
    scale[: ends[-1]] = torch.repeat_interleave(factors(size).view(size, -1)[rank], counts)
    return of.combine(torch.tanh(rows * scale[:, None]), sent, x)


def dispatched(rank, size, cudagraphable, training):
    """Steps of the dispatcher, forward and backward or without gradients, and one in which ranks disagree."""
    of = dispatcher(size, cudagraphable)
    for step in (0, None, 0, 1, 2):
        torch.manual_seed(100 * (step or 0) + rank)
        count = (7, 40, MOST)[step or 0]
        idx, s0 = torch.rand(count, 4 * size).argsort(1)[:, :TOP_K], torch.rand(count, TOP_K) + 0.1
        with torch.set_grad_enabled(training and step is not None):
            if step is None:
                longer = torch.zeros(count, 2 * HIDDEN)
                rows, _, sent = of.dispatch(longer, s0, idx, None)
                of.combine(rows, sent, longer)
                with pytest.raises(errors.Mismatch, match=f"Hidden {HIDDEN}.*Hidden {2 * HIDDEN}"):
                    of.dispatch(torch.zeros(count, HIDDEN * (1 + rank)), s0, idx, None)
                continue
            x0, answers = torch.randn(count, HIDDEN), []
            for ours in (True, False):
                x, scores = x0.clone().requires_grad_(training), s0.clone().requires_grad_(training)
                y = through(of, x, idx, scores, rank, size) if ours else by_hand(x, idx, scores, size)
                if training:
                    y.backward(x0)
                answers.append([y.detach(), x.grad, scores.grad])
            for a, b in zip(*answers):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 4], ids="{} ranks".format, indirect=True)
@pytest.mark.parametrize("cudagraphable", [False, True], ids=["by token", "worst case"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_dispatcher(ranks, cudagraphable, training):
    ranks.run(dispatched, cudagraphable, training)


def test_training(ranks):
    ranks.run(trained)


def test_inference(ranks):
    ranks.run(served)
