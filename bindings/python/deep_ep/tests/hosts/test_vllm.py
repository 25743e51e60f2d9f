"""vLLM's prepare and finalize over this package, on CPUs: high throughput, low latency and V2, sync and async.

Its managers make the buffers, of which the groups of ranks are given. programs.REPLACED says what is not its own. vLLM itself
leaves out the kernel that numbers experts anew where experts do that.
"""

from __future__ import annotations

import types

import pytest
import torch
import torch.distributed as dist
from programs import put, replaced
from rows import (
    HIDDEN,
    MOST,
    TOP_K,
    by_choice,
    by_expert,
    close,
    disagree,
    plain,
    quantized,
    same,
    same_by_expert,
    tokens,
)

import deep_ep

BLOCKS = [128, 128]


def asked(x, *_, quant_dtype, **__):
    """Tokens as vLLM's kernels make them: as float8 where a type is asked for."""
    return (x, None) if quant_dtype is None else quantized(x)


def manager(name, group):
    """A manager of vLLM's, which finds that all ranks are on one host. A model's ranks would be said by its configuration."""
    from vllm.distributed.device_communicators import all2all

    one = types.SimpleNamespace(rank_in_group=group.rank(), world_size=group.size())
    parallel = types.SimpleNamespace(enable_fault_tolerance=False)
    with replaced(
        "vllm",
        get_dp_group=lambda: one,
        get_tp_group=lambda: one,
        has_deep_ep_v2=lambda: True,
        get_current_vllm_config=lambda: types.SimpleNamespace(parallel_config=parallel),
    ):
        made = getattr(all2all, name)(group)
    assert not made.internode
    return made


def both_ways(of, name, is_async, *arguments):
    """What prepare or finalize gives: with is_async as vLLM's kernel makes it, a hook where there is one and then the rest."""
    if not is_async:
        return getattr(of, name)(*arguments)
    made = getattr(of, name + "_async")(*arguments)
    hook, rest = made if isinstance(made, tuple) else (None, made)
    if hook is not None:
        hook()
    return rest()


def prepared(of, x, idx, weights, size, quant, is_async=False):
    return both_ways(of, "prepare", is_async, x, weights, idx, 4 * size, None, False, quant)


def layer(of, quant, experts, rank, size, step, is_async):
    """A layer of experts around prepare and finalize. Experts get what was sent, too."""
    import vllm.model_executor.layers.fused_moe.topk_weight_and_reduce as reduce

    x, idx, weights = tokens(rank, size, step)
    block = quant.quant_dtype is not None
    rows, scales, meta, row_idx, row_weights = prepared(of, x, idx, weights, size, quant, is_async)
    out, reduced = experts(plain(rows, scales), meta, row_idx, row_weights, (x, idx, weights, rank, size, block))
    how = reduce.TopKWeightAndReduceNoOP() if reduced else reduce.TopKWeightAndReduceDelegate()
    y = torch.full_like(x, 7)
    both_ways(of, "finalize", is_async, y, out, weights, idx, False, how)
    close(y, x, idx, weights, size, block)


def refused(of, quant, rank, size):
    """A step with tokens of two lengths."""
    _, idx, weights = tokens(1, size, 0)
    disagree(lambda x: prepared(of, x, idx, weights, size, quant), rank)


def config(block):
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    return FusedMoEQuantConfig.make(torch.float8_e4m3fn, block_shape=BLOCKS) if block else FusedMoEQuantConfig.make()


def high_throughput(rank, size, is_async, block):
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize

    made = manager("DeepEPHTAll2AllManager", dist.group.WORLD)
    buffer = made.get_handle({})
    assert isinstance(buffer, deep_ep.Buffer)
    assert buffer is made.get_handle({})
    of = DeepEPHTPrepareAndFinalize(buffer, size, size, 4 * rank)
    made.set_num_sms(20)

    def experts(rows, meta, idx, weights, sent):
        # A choice of another rank is an expert that is not here.
        counts = torch.bincount(idx.flatten(), minlength=4 * size)[4 * rank : 4 * rank + 4]
        assert counts.tolist() == meta.expert_num_tokens.tolist() == meta.expert_num_tokens_cpu.tolist()
        same(rows, idx - 4 * rank, weights, sent)
        return by_choice(rows, idx, weights, rank, size), True

    with replaced("vllm", moe_kernel_quantize_input=asked, PIN_MEMORY=False):
        layer(of, config(block), experts, rank, size, 0, is_async)
        refused(of, config(block), rank, size)
        for step in range(3):
            layer(of, config(block), experts, rank, size, step, is_async)
    made.destroy()


def low_latency(rank, size, is_async, block):
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import DeepEPLLPrepareAndFinalize

    made = manager("DeepEPLLAll2AllManager", dist.group.WORLD)
    arguments = {
        "max_num_tokens_per_dp_rank": MOST,
        "token_hidden_size": HIDDEN,
        "num_ep_ranks": size,
        "num_global_experts": 4 * size,
        "num_local_experts": 4,
    }
    buffer = made.get_handle(arguments)
    assert isinstance(buffer, deep_ep.Buffer)
    of = DeepEPLLPrepareAndFinalize(buffer, MOST, size, use_fp8_dispatch=block)

    def experts(rows, meta, idx, weights, sent):
        assert idx is None
        assert weights is None
        room = rows.shape[1]
        same_by_expert(rows.flatten(0, 1), range(0, 4 * room, room), meta.expert_num_tokens.tolist(), sent)
        return by_expert(rows, meta.expert_num_tokens, rank, size), False

    layer(of, config(block), experts, rank, size, 0, is_async)
    refused(of, config(block), rank, size)
    for step in range(3):
        layer(of, config(block), experts, rank, size, step, is_async)
    made.destroy()


def second(rank, size, is_async, block, use_cudagraph):
    """V2: with use_cudagraph rows of worst-case lengths by token, else rows by expert."""
    from vllm import forward_context
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_v2 import DeepEPV2PrepareAndFinalize

    made = manager("DeepEPV2All2AllManager", dist.group.WORLD)
    put("vllm", made, "_gin_checked", True)
    sizes = {"num_max_tokens_per_rank": MOST, "hidden": HIDDEN, "num_topk": TOP_K, "num_experts": 4 * size}
    buffer = made.get_handle({**sizes, "use_fp8_dispatch": block})
    assert isinstance(buffer, deep_ep.ElasticBuffer)
    of = DeepEPV2PrepareAndFinalize(
        buffer, size, size, 4 * rank, 4 * size, TOP_K, use_fp8_dispatch=block, use_cudagraph=use_cudagraph
    )
    put("vllm", of, "defer_globalize", True)
    assert made.max_sms_used() == 0

    def experts(rows, meta, idx, weights, sent):
        if use_cudagraph:
            came = int(meta.psum_recv_per_rank[-1])
            assert bool((idx[came:] == -1).all())
            assert meta.rank_expert_offset == 4 * rank
            assert rows.shape[0] == size * most
            same(rows[:came], idx[:came], weights[:came], sent)
            idx = torch.where(idx >= 0, idx + meta.rank_expert_offset, -1)
            return torch.where(torch.arange(len(rows))[:, None] < came, by_choice(rows, idx, weights, rank, size), 0), True
        counts = meta.expert_num_tokens.tolist()
        assert idx.flatten().bincount(minlength=4 * size)[4 * rank :][:4].tolist() == counts
        same_by_expert(rows, [sum(counts[:expert]) for expert in range(4)], counts, sent)
        return by_choice(rows, idx, weights, rank, size), True

    with replaced("vllm", moe_kernel_quantize_input=asked, PIN_MEMORY=False):
        for step in (0, None, 0, 1, 2):
            counts = torch.tensor([tokens(r, size, step)[0].shape[0] if step is not None else 8 for r in range(size)])
            most = 1 << (int(counts.max()) - 1).bit_length()
            context = types.SimpleNamespace(dp_metadata=types.SimpleNamespace(num_tokens_across_dp_cpu=counts))
            with forward_context.override_forward_context(context):
                if step is None:
                    refused(of, config(block), rank, size)
                else:
                    layer(of, config(block), experts, rank, size, step, is_async)
    made.destroy()


def found(rank, size):
    from vllm.utils.import_utils import has_deep_ep

    assert has_deep_ep()


way = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
kind = pytest.mark.parametrize("block", [False, True], ids=["bfloat16", "float8"])


def test_vllm_finds_the_package(ranks):
    ranks.run(found)


@way
@kind
def test_high_throughput(ranks, is_async, block):
    ranks.run(high_throughput, is_async, block)


@way
@kind
def test_low_latency(ranks, is_async, block):
    ranks.run(low_latency, is_async, block)


@way
@kind
@pytest.mark.parametrize("use_cudagraph", [True, False], ids=["worst case", "by expert"])
def test_second_generation(ranks, is_async, block, use_cudagraph):
    ranks.run(second, is_async, block, use_cudagraph)
