"""Buffer in normal mode."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import switchyard
import torch
import torch.distributed as dist
from layers import HIDDEN, TOP_K, applied, dispatched, routing, want

import deep_ep


def buffer_of() -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, 1 << 20, 0)


def alive(rank, size):
    """64 routings at a time, used in the other order, after their rows and their buffer are gone."""
    buffer = buffer_of()
    kept = []
    for seed in range(64):
        x, idx, weights = routing(rank, size, 5 + (seed + rank) % 3, seed)
        rows, indices, beside, counts, handle, event = dispatched(buffer, x, idx, weights)
        assert event.event is None
        assert counts == [int((indices == e).sum()) for e in range(4)]
        kept.append((seed, handle, applied(rows, indices, beside, rank, size)))
    made = handle.routing.made
    sent = made.dispatcher.counters().choices
    for seed, handle, out in kept:
        y, _, _ = buffer.combine(out, handle)
        torch.testing.assert_close(y, want(*routing(rank, size, 5 + (seed + rank) % 3, seed), size), rtol=1e-4, atol=1e-5)
    assert made.dispatcher.counters().choices == sent  # no dispatch was needed to find the ways
    buffer.destroy()
    other = buffer_of()
    for seed, handle, out in reversed(kept):
        x, idx, weights = routing(rank, size, 5 + (seed + rank) % 3, seed)
        y, _, _ = other.combine(out, handle)
        torch.testing.assert_close(y, want(x, idx, weights, size), rtol=1e-4, atol=1e-5)
        again = other.dispatch(x, handle=handle)[0]
        y, _, _ = other.combine(again.double().float(), handle)
        to = torch.stack([((idx >= 4 * r) & (idx < 4 * r + 4)).any(1) for r in range(size)]).sum(0)
        torch.testing.assert_close(y, x * to[:, None])
    other.destroy()


def test_64_routings_at_a_time(gloo):
    gloo.run(alive)


def keeps(rank, size):
    """Rank 0 keeps all results and handles, the others none."""
    buffer, kept = buffer_of(), []
    for seed in range(12):
        x, idx, weights = routing(rank, size, 9, seed)
        made = dispatched(buffer, x, idx, weights)
        y, _, _ = buffer.combine(applied(*made[:3], rank, size), made[4])
        torch.testing.assert_close(y, want(x, idx, weights, size), rtol=1e-4, atol=1e-5)
        if rank == 0:
            kept.append((made, [t.clone() for t in made[:3]]))
        del made
    for made, copies in kept:
        for mine, before in zip(made[:3], copies):
            assert torch.equal(mine, before)
    dead = [weakref.ref(made[4]) for made, _ in kept]
    kept, made = [], None
    gc.collect()
    assert all(ref() is None for ref in dead)
    buffer.destroy()


def test_one_rank_keeps_all_results(gloo):
    gloo.run(keeps)


def copied(rank, size):
    """A copy of a module that holds a buffer has the same one, and a handle is its own copy. Neither goes into a file."""
    normal, elastic = buffer_of(), deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=64, hidden=HIDDEN)
    hybrid = deep_ep.HybridEPBuffer(dist.group.WORLD, HIDDEN, 64, 4)
    x, idx, weights = routing(rank, size, 5 + rank)
    rows, indices, beside, _, handle, _ = dispatched(normal, x, idx, weights)
    _, _, _, other, _ = elastic.dispatch(x, idx, weights, None, 4 * size, 64)
    model = torch.nn.Linear(2, 2)
    model.buffers_of_ranks = (normal, elastic, hybrid)
    twin = torch.optim.swa_utils.AveragedModel(model).module
    assert all(a is b for a, b in zip(twin.buffers_of_ranks, model.buffers_of_ranks))
    y, _, _ = twin.buffers_of_ranks[0].combine(applied(rows, indices, beside, rank, size), copy.deepcopy(handle))
    torch.testing.assert_close(y, want(x, idx, weights, size), rtol=1e-4, atol=1e-5)
    for thing in (normal, elastic, hybrid, handle, other):
        with pytest.raises(switchyard.errors.InvalidType, match=r"lives in its process, and cannot be pickled.*state_dict"):
            torch.save(thing, io.BytesIO())
    for buffer in model.buffers_of_ranks[:2]:
        buffer.destroy()


def test_copies_of_what_holds_a_buffer(gloo):
    gloo.run(copied)


def grows(rank, size):
    """No tokens, then many, then 20 times as many on one rank alone."""
    buffer = buffer_of()
    for seed, tokens in enumerate((0, 40, 0 if rank else 1000, 3, 0)):
        x, idx, weights = routing(rank, size, tokens, seed)
        rows, indices, beside, _, handle, _ = dispatched(buffer, x, idx, weights)
        y, sums, _ = buffer.combine(applied(rows, indices, beside, rank, size), handle, topk_weights=beside)
        torch.testing.assert_close(y, want(x, idx, weights, size), rtol=1e-4, atol=1e-5)
        assert torch.equal(sums, weights)
    buffer.destroy()


def test_tokens_come_and_go(gloo):
    gloo.run(grows)


def modes(rank, size):
    """Worst-case lengths, alignment, events, weights of all ranks, float8 with scales of every kind."""
    buffer = buffer_of()
    x, idx, weights = routing(rank, size, 8)
    rows, indices, beside, _, handle, _ = dispatched(buffer, x, idx, weights)
    n = rows.shape[0]
    worst = dispatched(buffer, x, idx, weights, num_worst_tokens=8 * size, previous_event=buffer.capture(), async_finish=True,
                       allocate_on_comm_stream=True)  # fmt: skip
    worst[5].current_stream_wait()
    assert worst[3] == []
    assert [t.shape[0] for t in worst[:3]] == [8 * size] * 3
    assert torch.equal(worst[0][:n], rows)
    assert torch.equal(worst[1][:n], indices)
    assert (worst[1][n:] == -1).all()
    assert (worst[2][n:] == 0).all()
    y = buffer.combine(applied(*worst[:3], rank, size), worst[4])[0]
    torch.testing.assert_close(y, want(x, idx, weights, size), rtol=1e-4, atol=1e-5)
    assert buffer.dispatch(x, handle=worst[4])[0].shape[0] == 8 * size
    aligned = dispatched(buffer, x, idx, weights, expert_alignment=16)[3]
    assert aligned == [-(-int((indices == e).sum()) // 16) * 16 for e in range(4)]

    ones = torch.ones(n, TOP_K)
    _, sums, _ = buffer.combine(rows, handle, topk_weights=ones)
    to = handle[4].sum(1)
    assert torch.equal(sums, to[:, None].expand(-1, TOP_K).float())
    biases = tuple(torch.full((8, HIDDEN), float(k)) for k in (1, 2))
    torch.testing.assert_close(buffer.combine(rows, handle, bias=biases)[0], x * to[:, None] + 3)

    matrix, sent, first, sources, inside, head = handle
    assert matrix[size - 1, rank] == n == sources.shape[0]
    assert torch.equal(inside.sum(0, dtype=torch.int32)[:, None], sent)
    assert (head.max(0).values + 1).tolist() == sent[:, 0].tolist()
    assert first[0] == 0

    q = torch.randint(0, 120, (8, HIDDEN), dtype=torch.uint8).view(torch.float8_e4m3fn)
    for scales in (torch.rand(8, 2), torch.rand(8, 1), torch.randint(99, (8, 1), dtype=torch.int32), torch.rand(2, 8).t()):
        (got, beside), _, _, _, handle, _ = dispatched(buffer, (q, scales), idx, weights)
        src, ranks = (
            handle[3],
            torch.repeat_interleave(torch.arange(size), handle[0][:, rank].diff(prepend=torch.zeros(1).int())),
        )
        mine = ranks == rank
        assert torch.equal(got.view(torch.uint8)[mine], q.view(torch.uint8)[src[mine]])
        assert torch.equal(beside[mine], scales[src[mine]])
        assert beside.dtype is scales.dtype
        assert buffer.combine(torch.ones(got.shape, dtype=torch.bfloat16), handle)[0].dtype is torch.bfloat16
    buffer.destroy()


def test_modes(gloo):
    gloo.run(modes)


def refused(rank, size):
    """Wrong arguments are refused before anything is sent, and the next right call works."""
    buffer = buffer_of()
    x, idx, weights = routing(rank, size, 6)
    handle = dispatched(buffer, x, idx, weights)[4]
    layout = buffer.get_dispatch_layout(idx, 4 * size)
    about = {"num_tokens_per_rank": layout[0], "is_token_in_rank": layout[3], "num_tokens_per_expert": layout[2]}

    def send(x=x, **arguments):
        return buffer.dispatch(x, **{"topk_idx": idx, "topk_weights": weights, **about, **arguments})

    alone = [dist.new_group([r]) for r in range(size)][rank]
    beyond = torch.full_like(idx, 4 * size)
    for kind, text, call in (
        (TypeError, "x is torch.float64", lambda: send(x.double())),
        (ValueError, r"x has shape \(256,\)", lambda: send(x[0])),
        (TypeError, "float8_e4m3fn without scales", lambda: send(x.to(torch.float8_e4m3fn))),
        (ValueError, r"scales are \[6, 3\]", lambda: send((x.to(torch.float8_e4m3fn), torch.ones(6, 3)))),
        (ValueError, r"topk_idx has shape \(5, 3\)", lambda: send(topk_idx=idx[:5])),
        (TypeError, "topk_weights is torch.float64", lambda: send(topk_weights=weights.double())),
        (ValueError, "experts for", lambda: send(num_tokens_per_expert=layout[2][:-1])),
        (ValueError, "num_tokens_per_expert is missing", lambda: send(num_tokens_per_expert=None)),
        (ValueError, "6 tokens, num_worst_tokens is 5", lambda: send(num_worst_tokens=5)),
        (ValueError, "do not go with a handle", lambda: send(handle=handle)),
        (ValueError, "has 5 tokens, those of the handle are 6", lambda: buffer.dispatch(x[:5], handle=handle)),
        (TypeError, "handle is tuple", lambda: buffer.combine(x, ())),
        (ValueError, "rows, the dispatch brought", lambda: buffer.combine(x.new_zeros(99, HIDDEN), handle)),
        (ValueError, "bias has shape", lambda: buffer.combine(x, handle, bias=x[:2])),
        (AssertionError, "previous_event", lambda: send(allocate_on_comm_stream=True)),
        (ValueError, f"expert {4 * size} of {4 * size}", lambda: buffer.get_dispatch_layout(beyond, 4 * size)),
        (NotImplementedError, "enable_shrink", lambda: deep_ep.Buffer(dist.group.WORLD, enable_shrink=True)),
        (NotImplementedError, "comm", lambda: deep_ep.Buffer(None, comm=object())),
        (NotImplementedError, "internode_dispatch", lambda: buffer.internode_dispatch(x)),
    ):  # fmt: skip
        with pytest.raises(kind, match=text):
            call()
    single = deep_ep.Buffer(alone)
    with pytest.raises(ValueError, match="of another group or device"):
        single.combine(x, handle)
    with pytest.raises(RuntimeError, match="has expert"):
        send(topk_idx=beyond if rank == 0 else idx)
    y = buffer.combine(applied(*send()[:3], rank, size), handle)[0]
    torch.testing.assert_close(y, want(x, idx, weights, size), rtol=1e-4, atol=1e-5)
    single.destroy()
    buffer.destroy()


def test_wrong_arguments(gloo):
    gloo.run(refused)


def defaults(rank, size):
    """A default type of the caller's."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        buffer = buffer_of()
        x, idx, weights = (t.float() if t.is_floating_point() else t for t in routing(rank, size, 6))
        rows, indices, beside, _, handle, _ = dispatched(buffer, x, idx, weights)
        assert (rows.dtype, indices.dtype, beside.dtype) == (torch.float32, torch.int64, torch.float32)
        assert torch.equal(buffer.combine(rows, handle, topk_weights=beside)[1], weights)
        buffer.destroy()
    finally:
        torch.set_default_dtype(torch.float32)


def test_default_types(pair):
    pair.run(defaults)
