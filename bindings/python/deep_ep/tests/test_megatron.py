"""Megatron-Core's flex dispatcher, which asks this package for its Buffer, next to the same layer by hand."""

from __future__ import annotations

import types
import warnings
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from layers import factors
from torch.utils.checkpoint import checkpoint

pytest.importorskip("megatron.core")

HIDDEN, TOP_K = 32, 2


def flex(size, backend):
    """A token dispatcher of Megatron's for experts on all ranks."""
    warnings.simplefilter("ignore")
    torch._dynamo.config.disable = True  # Megatron compiles small functions, for a minute
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    assert fused_a2a.HAVE_DEEP_EP
    assert fused_a2a.HAVE_HYBRIDEP
    fused_a2a.reset_hybrid_ep_buffer()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=4 * size,
        expert_model_parallel_size=size,
        moe_router_topk=TOP_K,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend=backend,
    )
    rank, world = dist.get_rank(), dist.group.WORLD
    one = [dist.new_group([r]) for r in range(size)][rank]
    groups = types.SimpleNamespace(ep=world, expt_tp=one, tp_ep=world)
    zeros = torch.zeros
    with mock.patch.object(torch, "zeros", lambda *sizes, device=None, **of: zeros(*sizes, **of)):  # it makes a flag on "cuda"
        return token_dispatcher.MoEFlexTokenDispatcher(4, list(range(4 * rank, 4 * rank + 4)), config, groups)


def layer(dispatcher, x, probs, mine):
    """Experts that multiply by mine, as MoELayer calls a dispatcher."""
    rows, sent = dispatcher.dispatch_preprocess(x, probs > 0, probs)
    rows, came = dispatcher.token_dispatch(rows, sent)
    rows, counts, weights = dispatcher.dispatch_postprocess(rows, came)
    scale = torch.repeat_interleave(mine, counts)
    out = torch.tanh(rows * scale[:, None]) * weights[:, None].to(rows.dtype)
    return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(out)))


def by_hand(x, probs, size):
    return (torch.tanh(x[:, None] * factors(size)[:, None]) * probs[:, :, None]).sum(1)


def trained(rank, size, recompute, layers, backend):
    """Several layers one after the other with all gradients, each layer with its own routing."""
    dispatcher = flex(size, backend)
    mine = factors(size).view(size, -1)[rank]
    for step, tokens in enumerate((6 + rank, 0 if rank == 0 else 40, 9)):
        torch.manual_seed(100 * step + rank)
        x0 = torch.randn(tokens, HIDDEN)
        picked = [torch.rand(tokens, 4 * size).topk(TOP_K)[1] for _ in range(layers)]
        p0 = [torch.zeros(tokens, 4 * size).scatter(1, i, torch.rand(tokens, TOP_K) + 0.1) for i in picked]
        g = torch.randn(tokens, HIDDEN)
        answers = []
        for ours in (True, False):
            x = x0.clone().requires_grad_()
            ps = [p.clone().requires_grad_() for p in p0]
            y = x
            for p in ps:
                if not ours:
                    y = by_hand(y, p, size)
                elif recompute:
                    y = checkpoint(layer, dispatcher, y, p, mine, use_reentrant=recompute == "reentrant")
                else:
                    y = layer(dispatcher, y, p, mine)
            y.backward(g)
            # Megatron has gradients of the probabilities that were chosen.
            answers.append([y.detach(), x.grad, *(p.grad.gather(1, i) for p, i in zip(ps, picked))])
        for a, b in zip(*answers):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recompute", ["", "reentrant", "not reentrant"])
def test_flex_layers(gloo, recompute):
    gloo.run(trained, recompute, 4, "deepep")


def test_flex_layers_by_expert(gloo):
    gloo.run(trained, "", 2, "hybridep")
