"""Calls in functions that torch compiles: as parts of one graph where lengths are known, else between graphs."""

from __future__ import annotations

import gc
import re
import sys

import pytest
import torch
import torch.distributed as dist
from layers import HIDDEN, routing
from switchyard import errors

import deep_ep
from deep_ep import _tokens
from deep_ep.hybrid_ep_buffer import HybridEPBuffer

TOKENS = 6

#: What fullgraph says of calls that are no operators.
NONE = "switchyard has no operator for this call"
COUNTS = "deep_ep: the host waits for the counts of this call"
STREAMS = "deep_ep: this call is on a stream of its own, or waits for an event"


def functions(rank, size, buffer, elastic, late, hybrid):
    """By name functions of tokens, their experts and their weights, and why they are not one graph, None where they are."""
    experts = 4 * size

    def normal(x, idx, weights, worst=0, capture=False, later=False, again=False, parts=False, bias=None):
        per_rank, _, per_expert, inside, _ = buffer.get_dispatch_layout(idx, experts)
        event = {"async_finish": True} if later or capture else {}
        if capture:
            event["previous_event"] = buffer.capture()
        rows, chosen, beside, counts, handle, done = buffer.dispatch(
            x * 2, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank, is_token_in_rank=inside,
            num_tokens_per_expert=per_expert, num_worst_tokens=worst, **event,
        )  # fmt: skip
        if event:
            done.current_stream_wait()
        if again:
            rows = buffer.dispatch(x * 3, handle=handle)[0]
        y, sums, done = buffer.combine(rows + 1, handle, topk_weights=beside, bias=bias, **event)
        if event:
            done.current_stream_wait()
        if parts:
            y = y + handle[4].sum()
        return y + sums.sum(1, keepdim=True) + sum(counts) + per_expert.sum() + per_rank[0] + chosen.max()

    def worst(x, idx, weights, **how):
        return normal(x, idx, weights, size * TOKENS, **how)

    def by_mask(x, idx, weights):
        _, _, per_expert, inside, _ = buffer.get_dispatch_layout(idx, experts)
        rows, _, _, _, handle, _ = buffer.dispatch(
            x * 2, is_token_in_rank=inside, num_tokens_per_expert=per_expert, num_worst_tokens=size * TOKENS
        )
        return buffer.combine(rows + 1, handle)[0]

    def of_float8(x, idx, weights):
        _, _, per_expert, inside, _ = buffer.get_dispatch_layout(idx, experts)
        q, scales = x.to(torch.float8_e4m3fn), weights[:, :2] + 1
        (rows, beside), _, _, _, handle, _ = buffer.dispatch(
            (q, scales), topk_idx=idx, is_token_in_rank=inside, num_tokens_per_expert=per_expert,
            num_worst_tokens=size * TOKENS,
        )  # fmt: skip
        plain = (rows.float().view(*beside.shape, -1) * beside[..., None]).flatten(1)
        return buffer.combine(plain.bfloat16(), handle)[0].float()

    def second(x, idx, weights, by=elastic, again=False, stats=None, bias=None, beside=True, **how):
        rows, chosen, factors, handle, _ = by.dispatch(x * 2, idx, weights, stats, experts, **how)
        if again:
            rows, _, factors, _, _ = by.dispatch(x * 3, topk_weights=weights, handle=handle)
        y, sums, _ = by.combine(rows + 1, handle, factors if beside else None, bias)
        if beside:
            y = y + sums.sum(1, keepdim=True)
        if chosen is not None:
            y = y + chosen.max()
        if stats is not None:
            y = y + stats.sum()
        y = y + handle.psum_num_recv_tokens_per_expert.sum() + handle.psum_num_recv_tokens_per_scaleup_rank.sum()
        y = y + handle.dst_buffer_slot_idx.sum() + handle.topk_idx.sum() + handle.num_unaligned_recv_tokens_per_expert[0]
        return y + len(handle.num_recv_tokens_per_expert_list) + handle.num_expanded_tokens

    def unsynced(x, idx, weights, **how):
        return second(x, idx, weights, do_cpu_sync=False, num_max_tokens_per_rank=TOKENS, **how)

    def counted(x, idx, weights):
        return unsynced(x, idx, weights, stats=torch.zeros(4, dtype=torch.int64, device=x.device))

    def columns(x, idx, weights):
        q, scales = x.to(torch.float8_e4m3fn), weights[:, :2] + 1
        (rows, beside), _, _, handle, _ = elastic.dispatch(
            (q, scales), idx, num_experts=experts, num_max_tokens_per_rank=TOKENS, do_cpu_sync=False,
            use_tma_aligned_col_major_sf=True,
        )  # fmt: skip
        plain = (rows.float().view(*beside.shape, -1) * beside[..., None]).flatten(1)
        return elastic.combine(plain.bfloat16(), handle)[0].float()

    def deferred(x, idx, weights):
        how = {"async_with_compute_stream": True, "defer_epilogue": True}
        rows, _, beside, handle = late.dispatch(x * 2, idx, weights, num_experts=experts, **how).wait()
        y, sums = late.combine(rows + 1, handle, beside, **how).wait()
        return y + sums.sum(1, keepdim=True)

    def few(x, idx, weights, hooks=False, into=False, stats=None, **how):
        rows, counts, handle, event, hook = buffer.low_latency_dispatch(
            x.bfloat16() * 2, idx, TOKENS, experts, stats, use_fp8=False, return_recv_hook=hooks, **how
        )
        if hooks:
            hook()
        if how.get("async_finish"):
            event.current_stream_wait()
        here = torch.arange(rows.shape[1], device=x.device) < counts[:, None]
        out = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device=x.device) if into else None
        y, _, hook = buffer.low_latency_combine(
            torch.where(here[..., None], rows + 1, 0), idx, weights, handle, return_recv_hook=hooks, out=out
        )
        if hooks:
            hook()
        return (out if into else y).float() + (1 if stats is None else stats.sum())

    def tallied(x, idx, weights):
        return few(x, idx, weights, stats=torch.ones(4, dtype=torch.int32, device=x.device))

    def left_out(x, idx, weights):
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(x.bfloat16(), idx, TOKENS, experts, use_fp8=False)
        rows.mul_((torch.arange(rows.shape[1], device=x.device) < counts[:, None])[..., None])
        fewer = torch.where(idx % 2 == 0, -1, idx)
        return buffer.low_latency_combine(rows, fewer, weights, handle)[0].float()

    def quantized(x, idx, weights, **how):
        (rows, scales), counts, handle, _, _ = buffer.low_latency_dispatch(x.bfloat16(), idx, TOKENS, experts, **how)
        here = torch.arange(rows.shape[1], device=x.device) < counts[:, None]
        if scales.dtype is torch.int32:
            scales = torch.exp2(torch.stack([(scales >> 8 * i) & 255 for i in range(2)], -1).flatten(2).float() - 127)
        plain = rows.float().view(*rows.shape[:2], -1, 128) * scales[..., None]
        plain = torch.where(here[..., None], plain.flatten(2), 0).bfloat16()
        y = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device=x.device)
        buffer.low_latency_combine(plain, idx, weights, handle, out=y)
        return y.float() + 1

    def permuted(x, idx, weights):
        rows, _, _, counts, handle = hybrid.dispatch_with_permute(
            hidden=x.bfloat16() * 2, topk_idx=idx, topk_weights=weights, num_of_experts=experts
        )
        y, _ = hybrid.combine_with_unpermute(hidden=rows + 1, handle=handle)
        return y.float() + counts.sum()

    def having(function, **how):
        return lambda *tensors: function(*tensors, **how)

    return {
        "normal": (normal, COUNTS),
        "normal, again": (having(normal, again=True), COUNTS),
        "events": (having(normal, capture=True), NONE),
        "worst case": (worst, None),
        "worst case, again": (having(worst, again=True), None),
        "worst case, biases": (lambda x, *rest: worst(x, *rest, bias=[x, -x]), None),
        "worst case, events": (having(worst, later=True), STREAMS),
        "worst case, parts of the handle": (having(worst, parts=True), NONE),
        "worst case, by a mask": (by_mask, None),
        "worst case, float8": (of_float8, None),
        "elastic": (second, COUNTS),
        "elastic, expanded": (having(second, do_expand=True), COUNTS),
        "without waits": (unsynced, None),
        "without waits, again": (having(unsynced, again=True), None),
        "without waits, aligned": (having(unsynced, expert_alignment=4), None),
        "without waits, expanded": (having(unsynced, do_expand=True), None),
        "without waits, expanded, again": (having(unsynced, do_expand=True, again=True), None),
        "without waits, the caller's choices": (having(unsynced, do_handle_copy=False), None),
        "without waits, a bias": (lambda x, *rest: unsynced(x, *rest, bias=x, beside=False), None),
        "without waits, statistics": (counted, None),
        "without waits, 2.5": (having(unsynced, by=late, do_handle_copy=False), None),
        "without waits, columns": (columns, None),
        "deferred": (deferred, STREAMS),
        "few": (few, None),
        "few, hooks": (having(few, hooks=True), None),
        "few, into a tensor": (having(few, into=True), None),
        "few, statistics": (tallied, None),
        "few, choices left out": (left_out, None),
        "few, events": (having(few, async_finish=True), STREAMS),
        "few, float8": (quantized, None),
        "few, exponents": (having(quantized, round_scale=True, use_ue8m0=True), None),
        "hybrid": (permuted, NONE),
    }  # fmt: skip


def compiled(function, fullgraph=False):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=fullgraph)


def same_bits(rank, size, device="cpu"):
    group = dist.group.WORLD
    buffers = deep_ep.Buffer(group), deep_ep.ElasticBuffer(group), deep_ep.EPBuffer(group)
    buffers += (HybridEPBuffer(group, HIDDEN, TOKENS, 4),)
    tensors = routing(rank, size, TOKENS, device=device)
    ignored = []  # errors of what the compiler leaves half made
    sys.unraisablehook = ignored.append
    for name, (function, why) in functions(rank, size, *buffers).items():
        want = function(*tensors)
        fast = compiled(function)
        for _ in range(2):
            assert torch.equal(fast(*tensors), want), name
        fast = compiled(function, fullgraph=True)
        if why is None:
            assert torch.equal(fast(*tensors), want), name
        else:
            with pytest.raises(torch._dynamo.exc.Unsupported, match=why):
                fast(*tensors)
    sys.unraisablehook = sys.__unraisablehook__
    assert not ignored
    torch._dynamo.reset()
    gc.collect()
    assert not _tokens._memories  # of no handle anything is left
    for buffer in buffers:
        buffer.destroy()


def test_compiled_calls_have_the_bits_of_others(pair):
    pair.run(same_bits)


def passed(rank, size):
    """Handles go from graph to graph, and between graphs and calls outside of them."""
    buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD)
    x, idx, weights = routing(rank, size, TOKENS)
    few, experts, worst = x.bfloat16(), 4 * size, size * TOKENS
    _, _, per_expert, inside, _ = buffer.get_dispatch_layout(idx, experts)

    def normal(x):
        rows, _, _, _, handle, _ = buffer.dispatch(
            x, topk_idx=idx, is_token_in_rank=inside, num_tokens_per_expert=per_expert, num_worst_tokens=worst
        )
        return rows * 2, handle

    def second(x):
        how = {"num_experts": experts, "num_max_tokens_per_rank": TOKENS, "do_cpu_sync": False}
        rows, _, _, handle, _ = elastic.dispatch(x, idx, **how)
        return rows * 2, handle

    def slab(x):
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, TOKENS, experts, use_fp8=False)
        return rows * 2, handle

    def after_few(rows, handle):
        return buffer.low_latency_combine(rows + 1, idx, weights, handle)[0]

    # Without what is undefined behind the last row.
    names = "topk_idx", "num_recv_tokens", "dst_buffer_slot_idx", "psum_num_recv_tokens_per_expert"
    for send, back, tokens, parts in (
        (normal, lambda rows, handle: buffer.combine(rows + 1, handle)[0], x, lambda h: [h[i] for i in (0, 1, 2, 4, 5)]),
        (second, lambda rows, handle: elastic.combine(rows + 1, handle)[0], x, lambda h: [getattr(h, n) for n in names]),
        (slab, after_few, few, lambda h: h[1:]),
    ):
        rows, handle = send(tokens)
        want, about = back(rows, handle), parts(handle)
        one, other = (torch.compile(f, backend="aot_eager", fullgraph=True) for f in (send, back))
        rows, handle = one(tokens)
        for call in (other, back):
            assert torch.equal(call(rows, handle), want)
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(parts(handle), about))
        assert isinstance(handle, type(send(tokens)[1]))
        assert torch.equal(torch.compile(back, backend="aot_eager")(*send(tokens)), want)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=NONE):
            torch.compile(back, backend="aot_eager", fullgraph=True)(*send(tokens))
        torch._dynamo.reset()
    elastic.destroy()
    buffer.destroy()


def test_handles_are_passed(pair):
    pair.run(passed)


def held(rank, size):
    """Rows of low latency that a graph returns hold their memory, for two dispatches at a time."""
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
    x, idx, _ = routing(rank, size, TOKENS)

    def send(x):
        rows, counts, _, _, _ = buffer.low_latency_dispatch(x.bfloat16(), idx, TOKENS, 4 * size, use_fp8=False)
        return rows, counts

    fast = compiled(send, fullgraph=True)
    kept = [fast(x + i) for i in range(2)]
    first = kept[0][0].view(torch.int16).clone()  # padding may be no number
    with pytest.raises(errors.NoHandle):
        fast(x + 2)
    with pytest.raises(errors.NoHandle):
        send(x + 2)
    assert torch.equal(kept[0][0].view(torch.int16), first)
    kept.clear()
    gc.collect()
    for i in range(6):
        assert torch.equal(fast(x + i)[1], send(x + i)[1])
    torch._dynamo.reset()
    buffer.destroy()


def test_rows_of_a_graph_hold_their_memory(pair):
    pair.run(held)


def refused(rank, size):
    """Errors are those of other calls, and nothing is sent."""
    buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD)
    x, idx, weights = routing(rank, size, TOKENS)
    few, experts = x.bfloat16(), 4 * size

    def many(x, idx, weights):
        return buffer.low_latency_dispatch(x.bfloat16(), idx, TOKENS - 1, experts, use_fp8=False)[1]

    def tallied(x, idx, weights):
        stats = torch.zeros(3, dtype=torch.int32)
        return buffer.low_latency_dispatch(x.bfloat16(), idx, TOKENS, experts, stats, use_fp8=False)[1]

    def exponents(x, idx, weights):
        return buffer.low_latency_dispatch(x.bfloat16(), idx, TOKENS, experts, use_ue8m0=True)[1]

    def wide(x, idx, weights):
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x.bfloat16(), idx, TOKENS, experts, use_fp8=False)
        return buffer.low_latency_combine(rows[:, :3], idx, weights, handle)[0]

    def unbound(x, idx, weights):
        return elastic.dispatch(x, idx, weights, num_experts=experts, do_cpu_sync=False)[0]

    def above(x, idx, weights):
        return elastic.dispatch(x, idx + experts, None, None, experts, TOKENS, do_cpu_sync=False)[0]

    def uneven(x, idx, weights):
        return elastic.dispatch(x, idx, None, None, experts + 1, TOKENS, do_cpu_sync=False)[0]

    def unknown(x, idx, weights):
        return buffer.get_dispatch_layout(idx + experts, experts)[0]

    for function in (many, tallied, exponents, wide, unbound, above, uneven, unknown):
        said = []
        for call in (function, compiled(function)):
            with pytest.raises((AssertionError, errors.Error)) as caught:
                call(x, idx, weights)
            said.append((type(caught.value), re.sub(r"call \d+", "call", str(caught.value))))
            del caught
        assert said[0] == said[1], said
    rows, _, handle, _, _ = buffer.low_latency_dispatch(few, idx, TOKENS, experts, use_fp8=False)
    buffer.low_latency_combine(rows, idx, weights, handle)  # the ranks are in step
    torch._dynamo.reset()
    elastic.destroy()
    buffer.destroy()


def test_wrong_arguments_in_graphs(pair):
    pair.run(refused)
