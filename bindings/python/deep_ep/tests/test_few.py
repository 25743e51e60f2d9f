"""The low-latency calls of Buffer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from layers import HIDDEN, TOP_K, factors, routing, strided, want
from switchyard import errors

import deep_ep

MOST = 12


def served(rank, size, use_fp8, scales, way, most):
    """Several layers; weights are given at the combine. Two results are alive at a time."""
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, num_qps_per_rank=4)
    stats = torch.zeros(4, dtype=torch.int32)
    came, waiting = 0, []
    hooked, later = way == "hook", way == "async"
    for seed in range(6):
        x, idx, weights = routing(rank, size, min(most, 3 * seed), seed)
        x = x.bfloat16()
        if way == "strided":
            x, idx, weights = strided(x), strided(idx), strided(weights)
        rows, counts, handle, event, hook = buffer.low_latency_dispatch(
            x, idx, most, 4 * size, cumulative_local_expert_recv_stats=stats, use_fp8=use_fp8, async_finish=later,
            return_recv_hook=hooked, round_scale=scales != "float32", use_ue8m0=scales == "ue8m0",
        )  # fmt: skip
        assert (event.event is not None, hook is not None) == (later, hooked)
        waiting.append((x, idx, weights, rows, counts, handle, event, hook))
        if len(waiting) < 2 and seed < 5:
            continue
        for x, idx, weights, rows, counts, handle, event, hook in waiting:
            hook() if hooked else event.current_stream_wait() if later else None
            came += int(counts.sum())
            if use_fp8:
                rows = plain(*rows)
            assert rows.shape == (4, size * most, HIDDEN)
            info, ranges, *about = handle
            assert about == [most, HIDDEN, 4 * size]
            assert (ranges & 0xFFFFFFFF).sum(1).tolist() == counts.tolist()
            for e in range(4):
                first, n = int(ranges[e, rank]) >> 32, int(ranges[e, rank]) & 0xFFFFFFFF
                mine = x[info[e, first : first + n].long()]
                torch.testing.assert_close(rows[e, first : first + n].float(), mine.float(), rtol=0.1, atol=0.02)
            y = torch.empty(x.shape, dtype=torch.bfloat16)
            if way == "strided":
                y = torch.empty((2 * x.shape[0], HIDDEN), dtype=torch.bfloat16)[::2]
            out = rows * factors(size).view(size, 4)[rank].bfloat16()[:, None, None]
            if way == "zero copy":
                buffer.get_next_low_latency_combine_buffer(handle).copy_(out)
            got, event, hook = buffer.low_latency_combine(
                out, idx, weights, handle, async_finish=later, return_recv_hook=hooked, out=y, zero_copy=way == "zero copy"
            )
            assert got is y
            hook() if hooked else event.current_stream_wait() if later else None
            torch.testing.assert_close(y.float(), want(x.float(), idx, weights, size), rtol=0.1, atol=0.1)
        waiting = []
    assert int(stats.sum()) == came
    buffer.clean_low_latency_buffer(most, HIDDEN, 4 * size)
    buffer.destroy()


def plain(q, scales):
    """Rows of float8 as bfloat16."""
    if scales.dtype is torch.int32:
        parts = torch.stack([(scales >> shift) & 255 for shift in (0, 8, 16, 24)], -1).flatten(2)[:, :, : HIDDEN // 128]
        scales = torch.exp2(parts.float() - 127)
    return (q.float().unflatten(2, (-1, 128)) * scales[..., None]).flatten(2).bfloat16()


@pytest.mark.parametrize("way", ["plain", "hook", "async", "zero copy", "strided"])
@pytest.mark.parametrize(("use_fp8", "scales"), [(False, "float32"), (True, "float32"), (True, "round"), (True, "ue8m0")])
def test_layers(pair, use_fp8, scales, way):
    pair.run(served, use_fp8, scales, way, MOST)


def test_layers_of_1024_tokens_at_most(gloo):
    gloo.run(served, True, "float32", "hook", 1024)


def refused(rank, size):
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
    x, idx, weights = routing(rank, size, MOST)
    x = x.bfloat16()
    _, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, MOST, 4 * size, use_fp8=False)
    rows = torch.zeros(4, size * MOST, HIDDEN, dtype=torch.bfloat16)

    def send(x=x, most=MOST, **arguments):
        return buffer.low_latency_dispatch(x, idx, most, 4 * size, **arguments)

    def back(rows=rows, idx=idx, weights=weights, **arguments):
        return buffer.low_latency_combine(rows, idx, weights, handle, **arguments)

    for kind, text, call in (
        (NotImplementedError, "use_nvfp4", lambda: send(use_nvfp4=True)),
        (NotImplementedError, "topk_weights: weights go with", lambda: send(topk_weights=weights)),
        (NotImplementedError, "dispatch serves hosts with PCIe", lambda: buffer.dispatch_pcie(x)),
        (NotImplementedError, "dispatch_wait_recv_cost_stats", lambda: send(dispatch_wait_recv_cost_stats=idx)),
        (NotImplementedError, "comp_signal, overlap", lambda: back(overlap=True, comp_signal=idx)),
        (NotImplementedError, "enable_shrink", lambda: buffer.low_latency_query_mask_buffer(idx)),
        (AssertionError, "use_ue8m0 needs", lambda: send(use_ue8m0=True)),
        (AssertionError, "exclude each other", lambda: send(async_finish=True, return_recv_hook=True)),
        (ValueError, "12 tokens, num_max_dispatch_tokens_per_rank is 11", lambda: send(most=11)),
        (ValueError, r"x has shape \(4, 3, 256\), want", lambda: back(rows[:, :3])),
        (ValueError, r"topk_idx has shape \(12, 2\)", lambda: back(idx=idx[:, :2], weights=weights[:, :2])),
        (ValueError, "topk_weights has shape", lambda: back(weights=weights[:, : TOP_K - 1])),
        (ValueError, "out is", lambda: back(out=rows[0])),
        (TypeError, "handle is tuple", lambda: buffer.low_latency_combine(rows, idx, weights, ())),
    ):
        with pytest.raises(kind, match=text):
            call()
    assert not back()[0].any()
    buffer.destroy()


def test_wrong_arguments(pair):
    pair.run(refused)


def masked(rank, size):
    """A combine leaves choices out that are -1: in another tensor, or in that of the dispatch after it was changed."""
    group = dist.new_group(list(range(size)))
    buffer = deep_ep.Buffer(group, low_latency_mode=True)
    x, idx, weights = routing(rank, size, MOST)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x.bfloat16(), idx, MOST, 4 * size, use_fp8=False)
    out = rows * factors(size).view(size, 4)[rank].bfloat16()[:, None, None]
    other = idx.clone()
    other[:, 0] = -1
    close = {"rtol": 0.1, "atol": 0.1}
    y = buffer.low_latency_combine(out, idx, weights, handle)[0]
    torch.testing.assert_close(y.float(), want(x, idx, weights, size), **close)
    y = buffer.low_latency_combine(out, other, weights, handle)[0]
    torch.testing.assert_close(y.float(), want(x, idx, weights * (other >= 0), size), **close)
    idx[:, 0] = -1
    assert torch.equal(buffer.low_latency_combine(out, idx, weights, handle)[0], y)
    buffer.destroy()  # gives the memory of the group back
    with pytest.raises(errors.Closed, match="this buffer was destroyed"):
        buffer.low_latency_combine(out, idx, weights, handle)
    buffer = deep_ep.Buffer(group)
    with pytest.raises(ValueError, match="topk_idx was changed since the dispatch"):
        buffer.low_latency_combine(out, idx, weights, handle)
    buffer.destroy()
    dist.destroy_process_group(group)


def test_masked_choices(pair):
    pair.run(masked)


def taken(rank, size):
    """Parts of a handle that nobody has read go with the rows, and combines go on."""
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
    x, idx, weights = routing(rank, size, MOST)
    read, unread = [buffer.low_latency_dispatch(x.bfloat16(), idx, MOST, 4 * size, use_fp8=False) for _ in range(2)]
    info, out = read[2][0].clone(), read[0] + 1
    want = buffer.low_latency_combine(out, idx, weights, read[2])[0]
    for seed in (1, 2):
        x, other, _ = routing(rank, size, MOST, seed)
        buffer.low_latency_dispatch(x.bfloat16(), other, MOST, 4 * size, use_fp8=False)
    assert torch.equal(read[2][0], info)
    for i in range(2):
        with pytest.raises(errors.Freed, match="src_info and layout_range of this handle went with its rows"):
            unread[2][i]
    assert list(unread[2][2:]) == [MOST, HIDDEN, 4 * size]
    assert torch.equal(buffer.low_latency_combine(out, idx, weights, unread[2])[0], want)
    buffer.destroy()


def test_handles_of_taken_results(pair):
    pair.run(taken)


def inferred(rank, size):
    """Results in inference mode and then outside of it, of one dispatcher, may be written to."""
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
    for inference in (True, False):
        with torch.inference_mode(inference):
            for seed in range(2):
                x, idx, weights = routing(rank, size, MOST, seed)
                rows, _, handle, _, _ = buffer.low_latency_dispatch(x.bfloat16(), idx, MOST, 4 * size, use_fp8=False)
                rows.mul_(factors(size).view(size, 4)[rank].bfloat16()[:, None, None])
                y = buffer.low_latency_combine(rows, idx, weights, handle)[0]
                torch.testing.assert_close(y.float(), want(x, idx, weights, size), rtol=0.1, atol=0.1)
    buffer.destroy()


def test_inference_mode(pair):
    pair.run(inferred)


def operated(rank, size):
    """A pair without hooks is made by operators of torch, its counts too."""
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
    x, idx, weights = routing(rank, size, MOST, 1)
    x, served = x.bfloat16(), []
    _, counts, handle, _, _ = buffer.low_latency_dispatch(x, idx, MOST, 4 * size, use_fp8=False)
    made = handle.routing.made.dispatcher._operated

    def noted(method):
        def call(*arguments):
            answer = method(*arguments)
            served.append((method.__name__, answer is not None))
            return answer

        return call

    made.lease, made.bring = noted(made.lease), noted(made.bring)
    rows, again, handle, _, _ = buffer.low_latency_dispatch(x, idx, MOST, 4 * size, use_fp8=False)
    rows.mul_(factors(size).view(size, 4)[rank].bfloat16()[:, None, None])
    y = buffer.low_latency_combine(rows, idx, weights, handle)[0]
    assert served == [("lease", True), ("bring", True)]
    assert torch.equal(again, counts)
    torch.testing.assert_close(y.float(), want(x.float(), idx, weights, size), rtol=0.1, atol=0.1)
    out = torch.empty_like(y)
    assert buffer.low_latency_combine(rows, idx, weights, handle, out=out)[0] is out
    assert torch.equal(out, y)
    assert served[2:] == [("bring", True)]
    # Of other choices than those of the dispatch, and of a tensor that cannot be written, Python looks at what is wanted.
    served.clear()
    assert torch.equal(buffer.low_latency_combine(rows, idx.clone(), weights, handle)[0], y)
    apart = torch.empty(len(y), 2 * y.shape[1], dtype=y.dtype)[:, ::2]
    assert torch.equal(buffer.low_latency_combine(rows, idx, weights, handle, out=apart)[0], y)
    assert torch.equal(apart, y)
    assert served == [("bring", True), ("bring", False), ("bring", True)]
    served.clear()
    for sent in (x.requires_grad_(), x.detach().t().contiguous().t()):
        again = buffer.low_latency_dispatch(sent, idx, MOST, 4 * size, use_fp8=False)[1]
        assert torch.equal(again, counts)
    # Without gradients, and of one without gaps, that is an operator, too, and so are choices of 32 bits.
    assert served == [("lease", True), ("lease", False), ("lease", True)]
    served.clear()
    for chosen, how in ((idx.int(), {}), (idx, {"async_finish": True})):
        again = buffer.low_latency_dispatch(x.detach(), chosen, MOST, 4 * size, use_fp8=False, **how)[1]
        assert torch.equal(again, counts)
    assert served == [("lease", False), ("lease", True), ("lease", True)]
    buffer.destroy()


@pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11), reason="operators need torch 2.11")
def test_pairs_are_operators(pair):
    pair.run(operated)
