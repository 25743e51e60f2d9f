"""Calls in functions that torch compiles: they run between graphs."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from layers import HIDDEN, routing

import deep_ep
from deep_ep.hybrid_ep_buffer import HybridEPBuffer

TOKENS = 6


def functions(rank, size, buffer, elastic, late, hybrid):
    """By name functions of tokens, their experts and their weights."""
    experts = 4 * size

    def normal(x, idx, weights, worst=0, wait=False, again=False):
        per_rank, _, per_expert, inside, _ = buffer.get_dispatch_layout(idx, experts)
        event = {"previous_event": buffer.capture(), "async_finish": True} if wait else {}
        rows, _, beside, counts, handle, done = buffer.dispatch(
            x * 2, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank, is_token_in_rank=inside,
            num_tokens_per_expert=per_expert, num_worst_tokens=worst, **event,
        )  # fmt: skip
        if wait:
            done.current_stream_wait()
        if again:
            rows = buffer.dispatch(x * 3, handle=handle)[0]
        y, sums, done = buffer.combine(rows + 1, handle, topk_weights=beside, **event)
        if wait:
            done.current_stream_wait()
        return y + sums.sum(1, keepdim=True) + sum(counts) + handle[4].sum()

    def worst(x, idx, weights):
        return normal(x, idx, weights, size * TOKENS)

    def waiting(x, idx, weights):
        return normal(x, idx, weights, wait=True)

    def again(x, idx, weights):
        return normal(x, idx, weights, again=True)

    def second(x, idx, weights, by=elastic, **how):
        rows, _, beside, handle, _ = by.dispatch(x * 2, idx, weights, num_experts=experts, **how)
        y, _, _ = by.combine(rows + 1, handle, None if how.get("do_expand") else beside)
        return y + handle.psum_num_recv_tokens_per_expert.sum() + len(handle.num_recv_tokens_per_expert_list)

    def expanded(x, idx, weights):
        return second(x, idx, weights, do_expand=True)

    def unsynced(x, idx, weights):
        return second(x, idx, weights, do_cpu_sync=False, num_max_tokens_per_rank=TOKENS)

    def deferred(x, idx, weights):
        how = {"async_with_compute_stream": True, "defer_epilogue": True}
        rows, _, beside, handle = late.dispatch(x * 2, idx, weights, num_experts=experts, **how).wait()
        y, sums = late.combine(rows + 1, handle, beside, **how).wait()
        return y + sums.sum(1, keepdim=True)

    def few(x, idx, weights, hooks=False, **how):
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            x.bfloat16() * 2, idx, TOKENS, experts, use_fp8=False, return_recv_hook=hooks, **how
        )
        if hooks:
            hook()
        here = torch.arange(rows.shape[1]) < counts[:, None]
        y, _, hook = buffer.low_latency_combine(
            torch.where(here[..., None], rows + 1, 0), idx, weights, handle, return_recv_hook=hooks
        )
        if hooks:
            hook()
        return y.float() + 1

    def hooked(x, idx, weights):
        return few(x, idx, weights, True)

    def quantized(x, idx, weights):
        (rows, scales), counts, handle, _, _ = buffer.low_latency_dispatch(x.bfloat16(), idx, TOKENS, experts)
        here = torch.arange(rows.shape[1]) < counts[:, None]
        plain = rows.float().view(*rows.shape[:2], -1, 128) * scales[..., None]
        plain = torch.where(here[..., None], plain.flatten(2), 0).bfloat16()
        y = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
        buffer.low_latency_combine(plain, idx, weights, handle, out=y)
        return y.float() + 1

    def permuted(x, idx, weights):
        rows, _, _, counts, handle = hybrid.dispatch_with_permute(
            hidden=x.bfloat16() * 2, topk_idx=idx, topk_weights=weights, num_of_experts=experts
        )
        y, _ = hybrid.combine_with_unpermute(hidden=rows + 1, handle=handle)
        return y.float() + counts.sum()

    return {
        "normal": normal, "worst case": worst, "waiting": waiting, "again": again, "elastic": second, "expanded": expanded,
        "without waits": unsynced, "deferred": deferred, "few": few, "hooks": hooked, "float8": quantized, "hybrid": permuted,
    }  # fmt: skip


def compiled(rank, size):
    group = dist.group.WORLD
    buffers = deep_ep.Buffer(group), deep_ep.ElasticBuffer(group), deep_ep.EPBuffer(group)
    buffers += (HybridEPBuffer(group, HIDDEN, TOKENS, 4),)
    x, idx, weights = routing(rank, size, TOKENS)
    ignored = []  # errors of what the compiler leaves half made
    sys.unraisablehook = ignored.append
    for name, function in functions(rank, size, *buffers).items():
        want = function(x, idx, weights)
        torch._dynamo.reset()
        fast = torch.compile(function, backend="aot_eager")
        for _ in range(2):
            assert torch.equal(fast(x, idx, weights), want), name
    sys.unraisablehook = sys.__unraisablehook__
    assert not ignored
    for buffer in buffers:
        buffer.destroy()


def test_compiled_calls_have_the_bits_of_others(pair):
    pair.run(compiled)
