"""vLLM's prepare and finalize over this package, on CPUs: high throughput, low latency and V2, sync and async.

Its managers make the buffers, of which the groups of ranks are given. What exists for GPUs alone is replaced: the
quantization of tokens before they are sent, pinned memory, the checks of NCCL, and for V2 without CPU sync the Triton kernel
that numbers experts anew, which vLLM itself leaves out where experts do that.
"""

from __future__ import annotations

import importlib
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rows import HIDDEN, MOST, TOP_K, by_choice, by_expert, close, plain, quantized, tokens

pytest.importorskip("vllm", exc_type=ImportError)

PARTS = "vllm.model_executor.layers.fused_moe"
BLOCKS = [128, 128]


def prepared(name):
    """One of vLLM's modules of prepare and finalize, without pinned memory."""
    from vllm.model_executor.layers.fused_moe import modular_kernel

    modular_kernel.PIN_MEMORY = False
    return importlib.import_module(f"{PARTS}.prepare_finalize.{name}")


def asked(x, *_, quant_dtype, **__):
    """Tokens as vLLM's kernels make them: as float8 where a type is asked for."""
    return (x, None) if quant_dtype is None else quantized(x)


def manager(name, group):
    """A manager of vLLM's, which finds that all ranks are on one host. A model's ranks would be said by its configuration."""
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import all2all

    one = types.SimpleNamespace(rank_in_group=group.rank(), world_size=group.size())
    parallel = types.SimpleNamespace(enable_fault_tolerance=False)
    with (
        mock.patch.object(parallel_state, "get_dp_group", return_value=one),
        mock.patch.object(parallel_state, "get_tp_group", return_value=one),
        mock.patch.object(all2all, "has_deep_ep_v2", return_value=True),
        mock.patch.object(all2all, "get_current_vllm_config", return_value=types.SimpleNamespace(parallel_config=parallel)),
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


def layer(of, quant, experts, rank, size, step, is_async):
    """A layer of experts around prepare and finalize."""
    import vllm.model_executor.layers.fused_moe.topk_weight_and_reduce as reduce

    x, idx, weights = tokens(rank, size, step)
    rows, scales, meta, row_idx, row_weights = both_ways(
        of, "prepare", is_async, x, weights, idx, 4 * size, None, False, quant
    )
    out, reduced = experts(plain(rows, scales), meta, row_idx, row_weights)
    how = reduce.TopKWeightAndReduceNoOP() if reduced else reduce.TopKWeightAndReduceDelegate()
    y = torch.full_like(x, 7)
    both_ways(of, "finalize", is_async, y, out, weights, idx, False, how)
    close(y, x, idx, weights, size, quant.quant_dtype is not None)


def config(block):
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    return FusedMoEQuantConfig.make(torch.float8_e4m3fn, block_shape=BLOCKS) if block else FusedMoEQuantConfig.make()


def high_throughput(rank, size, is_async, block):
    made = manager("DeepEPHTAll2AllManager", dist.group.WORLD)
    module = prepared("deepep_ht")
    buffer = made.get_handle({})
    assert buffer is made.get_handle({})
    of = module.DeepEPHTPrepareAndFinalize(buffer, size, size, 4 * rank)
    made.set_num_sms(20)

    def experts(rows, meta, idx, weights):
        # A choice of another rank is an expert that is not here.
        counts = torch.bincount(idx.flatten(), minlength=4 * size)[4 * rank : 4 * rank + 4]
        assert counts.tolist() == meta.expert_num_tokens.tolist() == meta.expert_num_tokens_cpu.tolist()
        return by_choice(rows, idx, weights, rank, size), True

    with mock.patch.object(module, "moe_kernel_quantize_input", asked):
        for step in range(3):
            layer(of, config(block), experts, rank, size, step, is_async)
    made.destroy()


def low_latency(rank, size, is_async, block):
    made = manager("DeepEPLLAll2AllManager", dist.group.WORLD)
    arguments = {
        "max_num_tokens_per_dp_rank": MOST,
        "token_hidden_size": HIDDEN,
        "num_ep_ranks": size,
        "num_global_experts": 4 * size,
        "num_local_experts": 4,
    }
    buffer = made.get_handle(arguments)
    of = prepared("deepep_ll").DeepEPLLPrepareAndFinalize(buffer, MOST, size, use_fp8_dispatch=block)

    def experts(rows, meta, idx, weights):
        assert idx is None
        assert weights is None
        return by_expert(rows, meta.expert_num_tokens, rank, size), False

    for step in range(3):
        layer(of, config(block), experts, rank, size, step, is_async)
    made.destroy()


def second(rank, size, is_async, block, use_cudagraph):
    """V2: with use_cudagraph rows of worst-case lengths by token, else rows by expert."""
    from vllm import forward_context

    made = manager("DeepEPV2All2AllManager", dist.group.WORLD)
    made._gin_checked = True  # which asks a GPU
    sizes = {"num_max_tokens_per_rank": MOST, "hidden": HIDDEN, "num_topk": TOP_K, "num_experts": 4 * size}
    buffer = made.get_handle({**sizes, "use_fp8_dispatch": block})
    module = prepared("deepep_v2")
    of = module.DeepEPV2PrepareAndFinalize(
        buffer, size, size, 4 * rank, 4 * size, TOP_K, use_fp8_dispatch=block, use_cudagraph=use_cudagraph
    )
    of.defer_globalize = True
    assert made.max_sms_used() == 0

    def experts(rows, meta, idx, weights):
        if use_cudagraph:
            came = int(meta.psum_recv_per_rank[-1])
            assert bool((idx[came:] == -1).all())
            assert meta.rank_expert_offset == 4 * rank
            assert rows.shape[0] == size * most
            idx = torch.where(idx >= 0, idx + meta.rank_expert_offset, -1)
            return torch.where(torch.arange(len(rows))[:, None] < came, by_choice(rows, idx, weights, rank, size), 0), True
        assert idx.flatten().bincount(minlength=4 * size)[4 * rank :][:4].tolist() == meta.expert_num_tokens.tolist()
        return by_choice(rows, idx, weights, rank, size), True

    with mock.patch.object(module, "moe_kernel_quantize_input", asked):
        for step in range(3):
            counts = torch.tensor([tokens(r, size, step)[0].shape[0] for r in range(size)])
            most = 1 << (int(counts.max()) - 1).bit_length()
            context = types.SimpleNamespace(dp_metadata=types.SimpleNamespace(num_tokens_across_dp_cpu=counts))
            with forward_context.override_forward_context(context):
                layer(of, config(block), experts, rank, size, step, is_async)
    made.destroy()


way = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
kind = pytest.mark.parametrize("block", [False, True], ids=["bfloat16", "float8"])


def test_vllm_finds_the_package():
    from vllm.utils.import_utils import has_deep_ep

    assert has_deep_ep()


@way
@kind
def test_high_throughput(gloo, is_async, block):
    gloo.run(high_throughput, is_async, block, timeout=600)


@way
@kind
def test_low_latency(gloo, is_async, block):
    gloo.run(low_latency, is_async, block, timeout=600)


@way
@kind
@pytest.mark.parametrize("use_cudagraph", [True, False], ids=["worst case", "by expert"])
def test_second_generation(gloo, is_async, block, use_cudagraph):
    gloo.run(second, is_async, block, use_cudagraph, timeout=600)
