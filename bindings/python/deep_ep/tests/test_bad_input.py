"""What is refused, by kind: wrong devices, indices, bounds and groups, lost ranks, and buffers destroyed early."""

from __future__ import annotations

import gc
import os
import re
import time

import pytest
import switchyard
import torch
import torch.distributed as dist
import world
from layers import HIDDEN, applied, dispatched, routing, want
from switchyard import errors
from switchyard._core.native import library

import deep_ep
from deep_ep._leases import taken_up
from deep_ep.hybrid_ep_buffer import indices_to_map

MOST = 12
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def works(buffer, rank, size):
    """A right call after wrong ones."""
    x, idx, weights = routing(rank, size, 6, 1)
    rows, indices, beside, _, handle, _ = dispatched(buffer, x, idx, weights)
    y = buffer.combine(applied(rows, indices, beside, rank, size), handle)[0]
    torch.testing.assert_close(y, want(x, idx, weights, size), **CLOSE)


def few_works(buffer, rank, size):
    x, idx, weights = routing(rank, size, MOST, 1)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x.bfloat16(), idx, MOST, 4 * size, use_fp8=False)
    y = buffer.low_latency_combine(rows, idx, weights, handle)[0]
    torch.testing.assert_close(y.float(), x * weights.sum(1, keepdim=True), rtol=0.05, atol=0.05)


def elastic_works(buffer, rank, size):
    x, idx, weights = routing(rank, size, 6, 1)
    rows, indices, beside, handle, _ = buffer.dispatch(x, idx, weights, num_experts=4 * size)
    y, sums, _ = buffer.combine(applied(rows, indices, beside, rank, size), handle, beside)
    torch.testing.assert_close(y, want(x, idx, weights, size), **CLOSE)
    assert torch.equal(sums, weights)


def devices(rank, size):
    """Tensors of another device than the tokens, and tokens that are nowhere."""
    buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD)
    x, idx, weights = routing(rank, size, 6)
    per_rank, _, per_expert, inside, _ = buffer.get_dispatch_layout(idx, 4 * size)
    about = {"num_tokens_per_rank": per_rank, "is_token_in_rank": inside, "num_tokens_per_expert": per_expert}
    bf16 = x.bfloat16()
    for kind, text, call in (
        (ValueError, "x is on meta, want", lambda: buffer.dispatch(x.to("meta"), topk_idx=idx, **about)),
        (ValueError, "topk_idx is on meta, x on cpu", lambda: buffer.dispatch(x, topk_idx=idx.to("meta"), **about)),
        (ValueError, "topk_weights is on meta",
         lambda: buffer.dispatch(x, topk_idx=idx, topk_weights=weights.to("meta"), **about)),
        (ValueError, "scales is on meta",
         lambda: buffer.dispatch((x.to(torch.float8_e4m3fn), torch.ones(6, 2, device="meta")), topk_idx=idx, **about)),
        (TypeError, "x is list, want a tensor", lambda: buffer.combine([1], None)),
        (ValueError, "topk_idx is on meta", lambda: buffer.get_dispatch_layout(idx.to("meta"), 4 * size)),
        (ValueError, "x is on meta", lambda: buffer.low_latency_dispatch(bf16.to("meta"), idx.to("meta"), 6, 4 * size)),
        (ValueError, "topk_idx is on meta", lambda: buffer.low_latency_dispatch(bf16, idx.to("meta"), 6, 4 * size)),
        (ValueError, "topk_idx is on meta", lambda: elastic.dispatch(x, idx.to("meta"), num_experts=4 * size)),
        (ValueError, "x is on meta", lambda: elastic.dispatch(x.to("meta"), idx, num_experts=4 * size)),
    ):  # fmt: skip
        with pytest.raises(kind, match=text):
            call()
    works(buffer, rank, size)
    elastic_works(elastic, rank, size)
    elastic.destroy()
    buffer.destroy()


def test_wrong_devices(pair):
    pair.run(devices)


def kinds(rank, size):
    """Wrong shapes and types of every tensor of the calls that the tests of each call do not have."""
    buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD)
    x, idx, weights = routing(rank, size, 6)
    bf16 = x.bfloat16()
    rows, _, handle, _, _ = buffer.low_latency_dispatch(bf16, idx, MOST, 4 * size, use_fp8=False)
    rows = rows.clone()
    got, _, beside, kept, _ = elastic.dispatch(x, idx, weights, num_experts=4 * size)
    for kind, text, call in (
        (TypeError, "topk_idx is torch.float32, want int64 or int32",
         lambda: buffer.low_latency_dispatch(bf16, idx.float(), MOST, 4 * size)),
        (TypeError, "x is torch.int64", lambda: buffer.low_latency_dispatch(idx, idx, MOST, 4 * size)),
        (ValueError, r"x has shape \(6,\)", lambda: buffer.low_latency_dispatch(bf16[:, 0], idx, MOST, 4 * size)),
        (ValueError, "7 experts for 2 ranks", lambda: buffer.low_latency_dispatch(bf16, idx, MOST, 7)),
        (TypeError, "x is torch.float64", lambda: buffer.low_latency_combine(rows.double(), idx, weights, handle)),
        (TypeError, "topk_weights is torch.float64",
         lambda: buffer.low_latency_combine(rows, idx, weights.double(), handle)),
        (TypeError, "x is torch.float64", lambda: elastic.dispatch(x.double(), idx, num_experts=4 * size)),
        (ValueError, r"topk_idx has shape \(5, 3\)", lambda: elastic.dispatch(x, idx[:5], num_experts=4 * size)),
        (ValueError, "topk_weights has shape", lambda: elastic.dispatch(x, idx, weights[:, :2], num_experts=4 * size)),
        (ValueError, "7 experts for 2 ranks", lambda: elastic.dispatch(x, idx, num_experts=7)),
        (ValueError, "num_max_tokens_per_rank is needed",
         lambda: elastic.dispatch(x, idx, num_experts=4 * size, do_cpu_sync=False)),
        (TypeError, "x is torch.int64", lambda: elastic.combine(got.long(), kept, beside)),
        (TypeError, "bias is torch.float64", lambda: elastic.combine(got, kept, bias=x.double())),
        (ValueError, "3 biases", lambda: elastic.combine(got, kept, bias=(x, x, x))),
        (NotImplementedError, "nvfp4", lambda: elastic.dispatch((x, x, x), idx, num_experts=4 * size)),
    ):  # fmt: skip
        with pytest.raises(kind, match=text):
            call()
    few_works(buffer, rank, size)
    elastic_works(elastic, rank, size)
    elastic.destroy()
    buffer.destroy()


def test_wrong_shapes_and_types(pair):
    pair.run(kinds)


def values(rank, size):
    """Numbers and counts that mean nothing: refused before anything is sent, with the caller's value."""
    buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD)
    x, idx, weights = routing(rank, size, 6)
    bf16, stats = x.bfloat16(), "cumulative_local_expert_recv_stats"

    def few(counts):
        return buffer.low_latency_dispatch(bf16, idx, MOST, 4 * size, counts, use_fp8=False)

    def second(**arguments):
        return elastic.dispatch(x, idx, weights, num_experts=4 * size, **arguments)

    refused = [
        ("set_num_sms: num_sms is -2, want at least 0", lambda: deep_ep.Buffer.set_num_sms(-2)),
        ("dispatch: config: num_sms is -2, want at least 0",
         lambda: dispatched(buffer, x, idx, weights, config=deep_ep.Config(-2))),
        ("dispatch: num_sms is -4, want at least 0", lambda: second(num_sms=-4)),
    ]  # fmt: skip
    for alignment in (0, -4):
        said = f"dispatch: expert_alignment is {alignment}, want at least 1"
        refused.append((said, lambda n=alignment: dispatched(buffer, x, idx, weights, expert_alignment=n)))
        refused.append((said, lambda n=alignment: second(expert_alignment=n)))
    for shape in ((3,), (4, 4)):
        said = re.escape(f"dispatch: {stats} has shape {shape}, want (4,)")
        refused.append((said, lambda n=shape: few(torch.zeros(n, dtype=torch.int32))))
        refused.append((said, lambda n=shape: second(**{stats: torch.zeros(n, dtype=torch.int32)})))
    # One rank after the other: one that is refused sends nothing, so the others' calls are in step.
    for said, call in refused:
        if rank == 0:
            with pytest.raises(errors.InvalidArgument, match=f"^deep_ep: (low_latency_)?{said}$"):
                call()
    if rank == 0:
        for call in (few, lambda counts: second(**{stats: counts})):
            with pytest.raises(errors.InvalidType, match=f"{stats} is torch.float32, want int32 or int64"):
                call(torch.zeros(4))
            with pytest.raises(errors.InvalidArgument, match=f"{stats} is on meta, x on cpu"):
                call(torch.zeros(4, dtype=torch.int32, device="meta"))
    assert deep_ep.Buffer.num_sms == 20
    counts = torch.zeros(4, dtype=torch.int64)
    assert torch.equal(few(counts)[1], counts)
    second(**{stats: counts})
    works(buffer, rank, size)
    elastic_works(elastic, rank, size)
    elastic.destroy()
    buffer.destroy()


def test_values_that_mean_nothing(pair):
    pair.run(values)


def disagreed(rank, size):
    """Ranks in calls of two shapes that all have made before: both shapes on all ranks, and the next call works, also with
    results of low latency that were lent before."""
    buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD)
    x, idx, weights = routing(rank, size, 6)
    narrow = x[:, : HIDDEN // 2].contiguous()

    def few(x, hook=False):
        return buffer.low_latency_dispatch(x.bfloat16(), idx, MOST, 4 * size, use_fp8=False, return_recv_hook=hook)

    calls = (
        lambda x: dispatched(buffer, x, idx, weights),
        lambda x: elastic.dispatch(x, idx, weights, num_experts=4 * size),
        few,
        lambda x: few(x, True),
    )
    alive = [(tokens, *few(tokens)) for tokens in (x, narrow, x, narrow)]
    for call in calls[:2]:
        call(x)
        call(narrow)
    for call in calls:
        with pytest.raises(errors.Mismatch, match=f"Hidden {HIDDEN}.*Hidden {HIDDEN // 2}"):
            call(narrow if rank else x)
    for one, other in ((calls[0], few), (few, calls[1])):
        with pytest.raises(errors.Mismatch, match=r"Layout .*Layout "):
            (one if rank else other)(x)
    for tokens, rows, _, handle, _, _ in alive:
        y = buffer.low_latency_combine(rows, idx, weights, handle)[0]
        torch.testing.assert_close(y.float(), tokens * weights.sum(1, keepdim=True), rtol=0.05, atol=0.05)
    for _ in range(3):
        works(buffer, rank, size)
        few_works(buffer, rank, size)
        elastic_works(elastic, rank, size)
    elastic.destroy()
    buffer.destroy()


def test_ranks_that_disagree_on_a_shape(gloo):
    gloo.run(disagreed)


def unknown(rank, size):
    """Ranks in calls of two shapes, of which a shape is new to all, or both are, also where there is no other yet: all hear of
    both at once, and the next right call works, also of results that were lent before."""
    x, idx, weights = routing(rank, size, 6)
    everyone = (
        ("Hidden", HIDDEN, HIDDEN // 2, {"x": x[:, : HIDDEN // 2].contiguous()}),
        ("DType", "float32", "float16", {"x": x.half()}),
        ("TopK", idx.shape[1], 1, {"idx": idx[:, :1].contiguous(), "weights": weights[:, :1].contiguous()}),
        ("Experts", "[0-9]+", "[0-9]+", {"experts": 8 * size}),
    )
    bounded = ("MaxTokens", MOST, 2 * MOST, {"most": 2 * MOST})

    def normal(buffer, _, x=x, idx=idx, weights=weights, experts=4 * size, most=0):
        layout = buffer.get_dispatch_layout(idx, experts)
        about = {"num_tokens_per_rank": layout[0], "is_token_in_rank": layout[3], "num_tokens_per_expert": layout[2]}
        return buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_worst_tokens=most * size, **about)

    def worst(buffer, elastic, most=MOST, **given):
        return normal(buffer, elastic, most=most, **given)

    def newer(_, elastic, x=x, idx=idx, weights=weights, experts=4 * size, most=0):
        return elastic.dispatch(x, idx, weights, num_experts=experts, num_max_tokens_per_rank=most or None)

    def newer_bounded(buffer, elastic, most=MOST, **given):
        return newer(buffer, elastic, most=most, **given)

    def few(buffer, _, x=x, idx=idx, weights=weights, experts=4 * size, most=MOST, fp8=False, hook=False):
        return buffer.low_latency_dispatch(x, idx, most, experts, use_fp8=fp8, return_recv_hook=hook)

    def halves(buffer, elastic, **given):
        return few(buffer, elastic, hook=True, **given)

    quantized = ("Quantize", "false", "true", {"fp8": True})
    table = (
        (normal, everyone),
        (worst, (*everyone, ("MaxTokens", MOST * size, 2 * MOST * size, {"most": 2 * MOST}))),
        (newer, everyone),
        (newer_bounded, (*everyone, ("MaxTokens", "[0-9]+", "[0-9]+", {"most": 2000}))),
        (few, (*everyone, bounded, quantized)),
        (halves, (*everyone, bounded)),
    )
    others = (
        (normal, few, "Layout token-major", "Layout slab"),
        (halves, newer, "Layout slab", "Layout token-major"),
        (normal, worst, "max_rows [0-9]+", "max_rows [0-9]+"),
    )
    for before in ("nothing", "the first", "another"):
        for call, differences in table:
            for name, one, two, wrong in differences:
                buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD)
                alive = None
                if before == "the first":
                    call(buffer, elastic)
                elif before == "another":
                    alive = few(buffer, elastic, x=x.repeat(1, 2).bfloat16())
                for odd, first, second in ((1, one, two), (0, two, one)):
                    said = rf"rank 0 .*\b{name} {first}\b.*rank 1 .*\b{name} {second}\b"
                    with pytest.raises(errors.Mismatch, match=said):
                        call(buffer, elastic, **(wrong if rank == odd else {}))
                if alive is not None:
                    y = buffer.low_latency_combine(alive[0], idx, weights, alive[2])[0]
                    torch.testing.assert_close(
                        y.float(), x.repeat(1, 2) * weights.sum(1, keepdim=True), rtol=0.05, atol=0.05
                    )
                call(buffer, elastic, **wrong)
                works(buffer, rank, size)
                elastic.destroy()
                buffer.destroy()
        for one, other, first, second in others:
            buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD)
            if before != "nothing":
                one(buffer, elastic)
            with pytest.raises(errors.Mismatch, match=f"rank 0 .*{first}.*rank 1 .*{second}"):
                (other if rank else one)(buffer, elastic)
            few_works(buffer, rank, size)
            works(buffer, rank, size)
            elastic_works(elastic, rank, size)
            elastic.destroy()
            buffer.destroy()


def test_ranks_that_disagree_on_a_shape_that_is_new(gloo):
    gloo.run(unknown)


def experts(rank, size):
    """An index that is no expert, on one rank: an error on all that names it."""
    buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD)
    x, idx, weights = routing(rank, size, 6)
    layout = buffer.get_dispatch_layout(idx, 4 * size)
    about = {"num_tokens_per_rank": layout[0], "is_token_in_rank": layout[3], "num_tokens_per_expert": layout[2]}
    for no in (4 * size, -2, (1 << 63) - 1):
        wrong = idx.clone()
        wrong[3, 1] = no
        with pytest.raises(errors.InvalidArgument, match=f"get_dispatch_layout: topk_idx has expert {no} of"):
            buffer.get_dispatch_layout(wrong, 4 * size)
        with pytest.raises(errors.InvalidArgument, match=f"indices_to_map: topk_idx has expert {no} of"):
            indices_to_map(wrong, None, 6, 4 * size)
    for call in (lambda i: buffer.get_dispatch_layout(i, 4 * size), lambda i: indices_to_map(i, None, 6, 4 * size)):
        with pytest.raises(errors.InvalidType, match=r"topk_idx is torch\.float32, want int64 or int32"):
            call(idx.float())
    # -5 is no expert and no masked choice, and the others are none after something was added, or bits were lost.
    for expert in (4 * size, 4 * size, -5, 1 << 32, (1 << 63) - 1):
        beyond = idx.clone()
        if rank == 1:
            beyond[3, 1] = expert
        said = f"token 3 of rank 1 has expert {expert} as choice 1, there are {4 * size} experts"
        with pytest.raises(RuntimeError, match=said):
            buffer.dispatch(x, topk_idx=beyond, topk_weights=weights, **about)
        with pytest.raises(RuntimeError, match=said):
            buffer.dispatch(x, topk_idx=beyond, topk_weights=weights, num_worst_tokens=6 * size, **about)
        with pytest.raises(RuntimeError, match=said):
            buffer.low_latency_dispatch(x.bfloat16(), beyond, MOST, 4 * size)
        with pytest.raises(RuntimeError, match=said):
            elastic.dispatch(x, beyond, weights, num_experts=4 * size)
        works(buffer, rank, size)
        few_works(buffer, rank, size)
        elastic_works(elastic, rank, size)
    elastic.destroy()
    buffer.destroy()


def test_an_index_that_is_no_expert(gloo):
    gloo.run(experts)


def changed(rank, size):
    """Choices that were in range for the layout, and are not for the dispatch."""
    buffer = deep_ep.Buffer(dist.group.WORLD)
    x, idx, _ = routing(rank, size, 6)
    experts = 4 * size

    def send(idx, layout):
        return buffer.dispatch(x, topk_idx=idx, num_tokens_per_rank=layout[0], num_tokens_per_expert=layout[2])

    for inference in (False, True):
        with torch.inference_mode(inference):
            ways = idx.clone()
            layout = buffer.get_dispatch_layout(ways, experts)
            assert (buffer._seen is None) is inference
            assert torch.equal(send(ways, layout)[1], send(ways.clone(), layout)[1])
            if rank == 0:
                ways[2, 1] = experts + size - 1
            with pytest.raises(ValueError, match=f"token 2 of rank 0 has expert {experts + size - 1} as choice 1, there are"):
                send(ways, layout)
            assert torch.equal(send(idx, layout)[1], send(idx.clone(), layout)[1])
    works(buffer, rank, size)
    buffer.destroy()


def test_choices_that_change_behind_the_layout(gloo):
    gloo.run(changed)


def bounds(rank, size):
    """Few enough tokens on each rank, and more rows for rank 0 than num_worst_tokens."""
    buffer = deep_ep.Buffer(dist.group.WORLD)
    x = torch.randn(6, HIDDEN)
    idx = torch.zeros(6, 3, dtype=torch.int64) + torch.arange(3)  # all of rank 0
    with pytest.raises(RuntimeError, match=r"\b8\b"):
        dispatched(buffer, x, idx, torch.ones(6, 3), num_worst_tokens=8)
    works(buffer, rank, size)
    rows = dispatched(buffer, x, idx, torch.ones(6, 3), num_worst_tokens=6 * size)[0]
    assert rows.shape[0] == 6 * size
    buffer.destroy()


def test_more_rows_than_bounds_allow(gloo):
    gloo.run(bounds)


def groups(rank, size):
    """Handles of another group."""
    alone = [dist.new_group([r]) for r in range(size)][rank]
    x, idx, weights = routing(rank, size, 6)
    local = torch.where(idx >= 0, idx % 4, -1)
    mine, all_of = deep_ep.Buffer(alone), deep_ep.Buffer(dist.group.WORLD)
    one, elastic = deep_ep.ElasticBuffer(alone), deep_ep.ElasticBuffer(dist.group.WORLD)
    few = mine.low_latency_dispatch(x.bfloat16(), local, MOST, 4, use_fp8=False)[2]
    rows = torch.zeros(4, size * MOST, HIDDEN, dtype=torch.bfloat16)
    got, _, _, kept, _ = one.dispatch(x, local, weights, num_experts=4)
    for call in (
        lambda: all_of.low_latency_combine(rows, idx, weights, few),
        lambda: elastic.combine(got, kept),
        lambda: elastic.dispatch(x, handle=kept),
    ):
        with pytest.raises(ValueError, match="of another group or device"):
            call()
    few_works(all_of, rank, size)
    elastic_works(elastic, rank, size)
    for buffer in (mine, one, elastic, all_of):
        buffer.destroy()


def test_handles_of_another_group(pair):
    pair.run(groups)


def test_a_call_is_made_when_it_tells_of_an_earlier_one():
    made = []

    def call(earlier=True):
        made.append(earlier)
        if len(made) == 1:
            error = errors.InvalidArgument("switchyard: token 3 has no expert")
            error.earlier = earlier
            raise error
        return len(made)

    with pytest.warns(RuntimeWarning, match="did not wait for brought no rows: switchyard: token 3 has no expert") as said:
        assert taken_up(call) == 2
    assert [w.filename for w in said] == [__file__]  # the place of the caller's call
    made.clear()
    with pytest.raises(errors.InvalidArgument, match="token 3"):
        taken_up(lambda: call(False))
    assert made == [False]


def early(rank, size):
    """destroy with results and hooks alive, twice, and by one of two buffers."""
    buffer, other = deep_ep.Buffer(dist.group.WORLD), deep_ep.Buffer(dist.group.WORLD)
    x, idx, weights = routing(rank, size, 6)
    rows, indices, beside, _, handle, _ = dispatched(buffer, x, idx, weights)
    before = rows.clone()
    few = buffer.low_latency_dispatch(x.bfloat16(), idx, MOST, 4 * size, use_fp8=False)
    buffer.destroy()
    buffer.destroy()
    assert buffer.runtime is None
    with pytest.raises(errors.Closed, match="this buffer was destroyed"):
        dispatched(buffer, x, idx, weights)
    with pytest.raises(errors.Closed, match="this buffer was destroyed"):
        buffer.low_latency_dispatch(x.bfloat16(), idx, MOST, 4 * size, use_fp8=False)
    with pytest.raises(errors.InvalidArgument, match="neither topk_idx nor is_token_in_rank nor a handle is there"):
        other.dispatch(x)
    assert torch.equal(rows, before)
    y = other.combine(applied(rows, indices, beside, rank, size), handle)[0]
    torch.testing.assert_close(y, want(x, idx, weights, size), **CLOSE)
    del few
    few_works(other, rank, size)
    other.destroy()
    other = deep_ep.Buffer(dist.group.WORLD)
    works(other, rank, size)
    other.destroy()


def test_destroy_with_results_alive(gloo):
    gloo.run(early)


def pools_of(*buffers):
    """What the pools of the buffers' group have made."""
    return [made for buffer in buffers for engine in buffer._engines.own.values() for made in engine.pool._made.values()]


def lost(rank, size, folder, calls):
    """The last rank goes, before calls of the others or while they destroy their buffers. Those calls are errors that name it,
    and the buffers leave nothing open."""
    switchyard.communicator()
    before = library().live()
    buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD)
    for call, of in ((works, buffer), (few_works, buffer), (elastic_works, elastic)):
        call(of, rank, size)
    x, idx, weights = routing(rank, size, 6)
    few = buffer.low_latency_dispatch(x.bfloat16(), idx, MOST, 4 * size, use_fp8=False)
    rows, *_, handle, _ = dispatched(buffer, x, idx, weights)
    made = pools_of(buffer, elastic)
    assert len(made) >= 2
    (folder / str(rank)).touch()
    if rank == size - 1:
        while any(not (folder / str(r)).exists() for r in range(size)):
            time.sleep(0.01)
        os._exit(0)
    for call, of in ((few_works, buffer), (works, buffer), (elastic_works, elastic)) if calls else ():
        with pytest.raises(errors.PeerLost, match=rf"rank {size - 1}\b") as caught:
            call(of, rank, size)
        assert caught.value.rank == size - 1
        del caught
    elastic.destroy()
    buffer.destroy()
    assert all(each.closed and each.dispatcher._closed for each in made)
    with pytest.raises(errors.Closed, match="this buffer was destroyed"):
        works(buffer, rank, size)
    del few, rows, handle, made
    gc.collect()
    assert library().live() == before


@pytest.mark.parametrize("calls", [True, False], ids=["calls", "destroys"])
def test_a_lost_rank(tmp_path, calls):
    ranks = world.World(3, world.gloo, str(tmp_path / "store"))
    try:
        with pytest.raises(AssertionError) as caught:
            ranks.run(lost, tmp_path, calls)
        assert str(caught.value) == "lost: rank 2 has ended"  # and the others saw what they should
    finally:
        ranks.close()
