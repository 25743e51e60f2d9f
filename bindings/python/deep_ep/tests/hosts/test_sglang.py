"""SGLang's dispatchers over this package, on CPUs: normal, low latency and V2.

They are made and called as SGLang's layers do, with its own default settings and its own buffers. What exists for GPUs alone is
replaced: the properties of the GPU, whether DeepGEMM is there, the check for memory across hosts, and the quantization of
tokens before they are sent.
"""

from __future__ import annotations

import contextlib
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rows import HIDDEN, TOP_K, by_expert, close, factors, plain, quantized, tokens

import deep_ep

pytest.importorskip("sglang", exc_type=ImportError)

ALIGNMENT = 128  # of the rows of an expert, which DeepGEMM wants


def test_the_first_generation_is_found():
    from sglang.srt.layers.moe.token_dispatcher import deepep

    assert deepep.use_deepep, deepep._deepep_import_error
    assert deepep.Buffer is deep_ep.Buffer


def test_the_second_generation_is_found():
    from sglang.srt.layers.moe.token_dispatcher import deepep_v2

    assert deepep_v2.use_deepep_v2, deepep_v2._deepep_v2_import_error
    assert deepep_v2.ElasticBuffer is deep_ep.ElasticBuffer


def asked(x, block, *, column_major_scales, scale_tma_aligned, scale_ue8m0):
    """Tokens as SGLang's kernel makes them for Hopper."""
    assert (block, column_major_scales, scale_tma_aligned, scale_ue8m0) == (128, False, False, False)
    return quantized(x)


@contextlib.contextmanager
def hopper(module):
    """A module of dispatchers finds a GPU with DeepGEMM, no fabric between hosts, and no server's arguments."""
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.moe import utils

    gpu = types.SimpleNamespace(multi_processor_count=132)
    with (
        mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu),
        mock.patch.object(utils, "get_server_args", return_value=None),
        mock.patch.object(deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True),
        mock.patch.object(module, "get_cuda_version", return_value=(13, 0), create=True),
        mock.patch.object(module, "_is_mnnvl_fabric_supported", return_value=False, create=True),
        mock.patch.object(module, "sglang_per_token_group_quant_fp8", asked),
    ):
        yield


def chosen(idx, weights):
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    return StandardTopKOutput(topk_weights=weights, topk_ids=idx.int(), router_logits=None)


def by_local_choice(rows, idx, weights, rank, size):
    """What this rank's experts make of rows whose choices are numbered on this rank: weighted and added up."""
    mine = factors(size).view(size, -1)[rank]
    scale = torch.where(idx >= 0, weights * mine[idx.clamp(min=0)], 0).sum(1, keepdim=True)
    return (rows * scale).to(torch.bfloat16)


def first(rank, size, mode, hooks, block):
    """A layer of experts around the dispatcher of the first generation: prefill goes the normal way and decode that of low
    latency, both of one buffer where the mode is auto."""
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch
    from sglang.srt.layers.moe.token_dispatcher import deepep

    kind = "fp8" if block else "bf16"
    with hopper(deepep):
        of = deepep.DeepEPDispatcher(
            group=dist.group.WORLD,
            router_topk=TOP_K,
            permute_fusion=True,
            num_experts=4 * size,
            num_local_experts=4,
            hidden_size=HIDDEN,
            params_dtype=torch.bfloat16,
            deepep_mode=deepep.DeepEPMode(mode),
            async_finish=not hooks,
            return_recv_hook=hooks,
        )
        of.set_quant_config({"normal_dispatcher_output_dtype": kind, "low_latency_dispatcher_output_dtype": kind})
        ways = {"auto": (True, False), "normal": (True,), "low_latency": (False,)}[mode]
        for step in range(3):
            x, idx, weights = tokens(rank, size, step)
            for prefill in ways:
                set_is_extend_in_batch(prefill)
                came = of.dispatch(x, chosen(idx, weights))
                rows = plain(came.hidden_states, came.hidden_states_scale)
                if prefill:
                    assert isinstance(came, deepep.DeepEPNormalDispatchOutput)
                    here = came.topk_ids[came.topk_ids >= 0].bincount(minlength=4)
                    padded = -(-here // ALIGNMENT) * ALIGNMENT
                    assert came.num_recv_tokens_per_expert == padded.tolist()
                    out = by_local_choice(rows, came.topk_ids, came.topk_weights, rank, size)
                    back = deepep.DeepEPNormalCombineInput(out, came.topk_ids, came.topk_weights)
                else:
                    assert isinstance(came, deepep.DeepEPLLDispatchOutput)
                    out = by_expert(rows, came.masked_m, rank, size)
                    back = deepep.DeepEPLLCombineInput(out, came.topk_ids, came.topk_weights)
                close(of.combine(back), x, idx, weights, size, block)
        state = deepep.get_resources().buffers.pop("deepep_ep_state")
        assert isinstance(state.buffer, deep_ep.Buffer)
        state.buffer.destroy()


def second(rank, size, block, expand):
    """The same of V2: prefill with or without rows by expert, and decode with rows by expert in room for the worst case."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch
    from sglang.srt.layers.moe.token_dispatcher import deepep_v2

    mine, scales = factors(size).view(size, -1)[rank], deepep_v2.DeepEPv2Fp8ScaleFormat(False, False)
    parallel = types.SimpleNamespace(attn_dp_size=size, attn_cp_size=1, tp_size=size, tp_group=None)
    with (
        hopper(deepep_v2),
        envs.SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND.override(expand),
        mock.patch.object(deepep_v2, "_get_allow_hybrid_mode", return_value=False),
        mock.patch.object(deepep_v2, "get_deepep_v2_fp8_scale_format", return_value=scales),
        mock.patch.object(deepep_v2, "get_parallel", return_value=parallel),
    ):
        of = deepep_v2.DeepEPv2Dispatcher(dist.group.WORLD, TOP_K, 4 * size, 4, HIDDEN, torch.bfloat16, block)
        of.prebuild()
        for step in range(3):
            x, idx, weights = tokens(rank, size, step)
            for prefill in (True, False):
                set_is_extend_in_batch(prefill)
                came = of.dispatch(x, chosen(idx, weights))
                rows = plain(came.hidden_states, came.hidden_states_scale)
                if came.is_expanded:
                    ends = came.psum_num_recv_tokens_per_expert.tolist()
                    out, start = torch.zeros(rows.shape, dtype=torch.bfloat16), 0
                    for expert, end in enumerate(ends):
                        scale = mine[expert] * came.topk_weights[start:end, None]
                        out[start:end] = rows[start:end] * scale
                        start = -(-end // ALIGNMENT) * ALIGNMENT
                    assert came.use_masked_gemm == (not prefill)
                else:
                    out = by_local_choice(rows, came.topk_ids, came.topk_weights, rank, size)
                close(of.combine(deepep_v2.DeepEPv2CombineInput(out, None)), x, idx, weights, size, block)
        buffer = deepep_v2.DeepEPv2Buffer._state().buffer
        assert isinstance(buffer, deep_ep.ElasticBuffer)
        deepep_v2.DeepEPv2Buffer.destroy()
        buffer.destroy()


kind = pytest.mark.parametrize("block", [False, True], ids=["bfloat16", "float8"])


@kind
@pytest.mark.parametrize("hooks", [False, True], ids=["events", "hooks"])
@pytest.mark.parametrize("mode", ["auto", "normal", "low_latency"])
def test_first_generation(gloo, mode, hooks, block):
    gloo.run(first, mode, hooks, block, timeout=600)


@kind
@pytest.mark.parametrize("expand", [False, True], ids=["by token", "by expert"])
def test_second_generation(gloo, block, expand):
    gloo.run(second, block, expand, timeout=600)
