"""SGLang's dispatchers over this package, on CPUs: normal, low latency and V2.

They are made and called as SGLang's layers do, with its own default settings and its own buffers. programs.REPLACED says what
is not its own.
"""

from __future__ import annotations

import types

import pytest
import torch
import torch.distributed as dist
from programs import replaced
from rows import HIDDEN, OTHER, TOP_K, by_expert, close, disagree, factors, plain, quantized, same, same_by_expert, tokens

import deep_ep

ALIGNMENT = 128  # of the rows of an expert, which DeepGEMM wants


def found(rank, size):
    from sglang.srt.layers.moe.token_dispatcher import deepep, deepep_v2

    assert deepep.use_deepep, deepep._deepep_import_error
    assert deepep.Buffer is deep_ep.Buffer
    assert deepep_v2.use_deepep_v2, deepep_v2._deepep_v2_import_error
    assert deepep_v2.ElasticBuffer is deep_ep.ElasticBuffer


def test_sglang_finds_the_package(ranks):
    ranks.run(found)


def asked(x, block, *, column_major_scales, scale_tma_aligned, scale_ue8m0):
    """Tokens as SGLang's kernel makes them for Hopper."""
    assert (block, column_major_scales, scale_tma_aligned, scale_ue8m0) == (128, False, False, False)
    return quantized(x)


def hopper(**more):
    """A GPU with DeepGEMM, and no server's arguments."""
    return replaced(
        "sglang",
        get_device_properties=lambda *_, **__: types.SimpleNamespace(multi_processor_count=132),
        get_server_args=lambda: None,
        ENABLE_JIT_DEEPGEMM=True,
        sglang_per_token_group_quant_fp8=asked,
        **more,
    )


def chosen(idx, weights):
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    return StandardTopKOutput(topk_weights=weights, topk_ids=idx.int(), router_logits=None)


def by_local_choice(rows, idx, weights, rank, size):
    """What this rank's experts make of rows whose choices are numbered on this rank: weighted and added up."""
    mine = factors(size).view(size, -1)[rank]
    scale = torch.where(idx >= 0, weights * mine[idx.clamp(min=0)], 0).sum(1, keepdim=True)
    return (rows * scale).to(torch.bfloat16)


def refused(made, back, rank, size):
    """A step with tokens of two lengths, each by a dispatcher for that. made makes dispatchers, and back what is combined of
    what came. They do not go on after an error: SGLang counts their steps."""
    _, idx, weights = tokens(1, size, 0)
    by_length = {hidden: made(hidden) for hidden in (HIDDEN, OTHER)}

    def step(x):
        of = by_length[x.shape[1]]
        came = of.dispatch(x, chosen(idx, weights))
        of.combine(back(came, plain(came.hidden_states, came.hidden_states_scale).to(torch.bfloat16)))

    disagree(step, rank)


def first(rank, size, mode, hooks, block):
    """A layer of experts around the dispatcher of the first generation: prefill goes the normal way and decode that of low
    latency, both of one buffer where the mode is auto."""
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch
    from sglang.srt.layers.moe.token_dispatcher import deepep

    def made(hidden=HIDDEN):
        of = deepep.DeepEPDispatcher(
            group=dist.group.WORLD,
            router_topk=TOP_K,
            permute_fusion=True,
            num_experts=4 * size,
            num_local_experts=4,
            hidden_size=hidden,
            params_dtype=torch.bfloat16,
            deepep_mode=deepep.DeepEPMode(mode),
            async_finish=not hooks,
            return_recv_hook=hooks,
        )
        kind = "fp8" if block else "bf16"
        of.set_quant_config({"normal_dispatcher_output_dtype": kind, "low_latency_dispatcher_output_dtype": kind})
        return of

    def back(came, out):
        normal = isinstance(came, deepep.DeepEPNormalDispatchOutput)
        of = deepep.DeepEPNormalCombineInput if normal else deepep.DeepEPLLCombineInput
        return of(out, came.topk_ids, came.topk_weights)

    with hopper():
        of = made()
        ways = {"auto": (True, False), "normal": (True,), "low_latency": (False,)}[mode]
        for step in (0, None, 0, 1, 2):
            x, idx, weights = tokens(rank, size, step or 0)
            sent = (x, idx, weights, rank, size, block)
            for prefill in ways:
                set_is_extend_in_batch(prefill)
                if step is None:
                    refused(made, back, rank, size)
                    continue
                came = of.dispatch(x, chosen(idx, weights))
                rows = plain(came.hidden_states, came.hidden_states_scale)
                if prefill:
                    assert isinstance(came, deepep.DeepEPNormalDispatchOutput)
                    here = came.topk_ids[came.topk_ids >= 0].bincount(minlength=4)
                    padded = -(-here // ALIGNMENT) * ALIGNMENT
                    assert came.num_recv_tokens_per_expert == padded.tolist()
                    same(rows, came.topk_ids, came.topk_weights, sent)
                    out = by_local_choice(rows, came.topk_ids, came.topk_weights, rank, size)
                else:
                    assert isinstance(came, deepep.DeepEPLLDispatchOutput)
                    room = rows.shape[1]
                    same_by_expert(rows.flatten(0, 1), range(0, 4 * room, room), came.masked_m.tolist(), sent)
                    out = by_expert(rows, came.masked_m, rank, size)
                close(of.combine(back(came, out)), x, idx, weights, size, block)
        state = deepep.get_resources().buffers.pop("deepep_ep_state")
        assert isinstance(state.buffer, deep_ep.Buffer)
        state.buffer.destroy()


def second(rank, size, block, expand):
    """The same of V2: prefill with or without rows by expert, and decode with rows by expert in room for the worst case."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch
    from sglang.srt.layers.moe.token_dispatcher import deepep_v2

    mine, scales = factors(size).view(size, -1)[rank], deepep_v2.DeepEPv2Fp8ScaleFormat(False, False)

    def made():
        return deepep_v2.DeepEPv2Dispatcher(dist.group.WORLD, TOP_K, 4 * size, 4, HIDDEN, torch.bfloat16, block)

    def back(_, out):
        return deepep_v2.DeepEPv2CombineInput(out, None)

    parallel = types.SimpleNamespace(attn_dp_size=size, attn_cp_size=1, tp_size=size, tp_group=None)
    with (
        envs.SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND.override(expand),
        hopper(
            _get_allow_hybrid_mode=lambda *_, **__: False,
            get_deepep_v2_fp8_scale_format=lambda *_, **__: scales,
            get_parallel=lambda: parallel,
        ),
    ):
        of = made()
        of.prebuild()
        for step in (0, None, 0, 1, 2):
            x, idx, weights = tokens(rank, size, step or 0)
            if step is None:
                # A dispatcher of V2 checks the length itself, so ranks cannot differ in it.
                with pytest.raises(ValueError, match=f"expected {HIDDEN}, got {OTHER}"):
                    of.dispatch(x.new_zeros(8, OTHER), chosen(idx, weights))
                continue
            for prefill in (True, False):
                set_is_extend_in_batch(prefill)
                # A prefill without tokens sends a row of zeros.
                what = (x, idx, weights)
                if prefill and len(x) == 0:
                    what = (x.new_zeros(1, HIDDEN), torch.arange(TOP_K)[None], torch.zeros(1, TOP_K))
                sent = (*what, rank, size, block)
                came = of.dispatch(x, chosen(idx, weights))
                rows = plain(came.hidden_states, came.hidden_states_scale)
                if came.is_expanded:
                    ends = came.psum_num_recv_tokens_per_expert.tolist()
                    starts = [0, *(-(-end // ALIGNMENT) * ALIGNMENT for end in ends[:-1])]
                    same_by_expert(rows, starts, [end - start for start, end in zip(starts, ends)], sent)
                    out = torch.zeros(rows.shape, dtype=torch.bfloat16)
                    for expert, (start, end) in enumerate(zip(starts, ends)):
                        scale = mine[expert] * came.topk_weights[start:end, None]
                        out[start:end] = rows[start:end] * scale
                    assert came.use_masked_gemm == (not prefill)
                else:
                    same(rows, came.topk_ids, came.topk_weights, sent)
                    out = by_local_choice(rows, came.topk_ids, came.topk_weights, rank, size)
                close(of.combine(back(came, out)), x, idx, weights, size, block)
        buffer = deepep_v2.DeepEPv2Buffer._state().buffer
        assert isinstance(buffer, deep_ep.ElasticBuffer)
        deepep_v2.DeepEPv2Buffer.destroy()
        buffer.destroy()


kind = pytest.mark.parametrize("block", [False, True], ids=["bfloat16", "float8"])


@kind
@pytest.mark.parametrize("hooks", [False, True], ids=["events", "hooks"])
@pytest.mark.parametrize("mode", ["auto", "normal", "low_latency"])
def test_first_generation(ranks, mode, hooks, block):
    ranks.run(first, mode, hooks, block)


@kind
@pytest.mark.parametrize("expand", [False, True], ids=["by token", "by expert"])
def test_second_generation(ranks, block, expand):
    ranks.run(second, block, expand)
