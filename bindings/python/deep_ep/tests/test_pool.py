"""The pool of dispatchers: how many there are, and who gives them back."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from layers import HIDDEN, applied, dispatched, routing, want

import deep_ep
from deep_ep import _pool, _streams

CPU = torch.device("cpu")


def bounded(rank, size):
    """More shapes than a pool keeps: the least used are given back, and handles work on."""
    most, _pool.MOST = _pool.MOST, 4
    buffer = deep_ep.Buffer(dist.group.WORLD)
    try:
        pool = buffer._engines.of(CPU).pool
        pool.close()
        kept = []
        for n in range(7):
            x, idx, weights = routing(rank, size, 6, n)
            wide = x.repeat(1, n + 1)
            rows, indices, beside, _, handle, _ = dispatched(buffer, wide, idx, weights)
            kept.append((applied(rows, indices, beside, rank, size), handle, want(wide, idx, weights, size)))
            buffer.low_latency_dispatch(x.bfloat16(), idx, 6, 4 * size, use_fp8=False)  # which is used all the time
            assert len(pool._made) <= 4
            assert sum(shape.slab for shape in pool._made) == 1
        assert sorted(shape.hidden // HIDDEN for shape in pool._made if not shape.slab) == [5, 6, 7]
        for rows, handle, sums in kept:
            torch.testing.assert_close(buffer.combine(rows, handle)[0], sums, rtol=1e-4, atol=1e-5)
            assert len(pool._made) <= 4
    finally:
        _pool.MOST = most
        buffer.destroy()


def test_a_pool_is_bounded(gloo):
    gloo.run(bounded)


def under_way(rank, size):
    """destroy of one buffer between the halves of another's call."""
    one, other = deep_ep.Buffer(dist.group.WORLD), deep_ep.Buffer(dist.group.WORLD)
    x, idx, weights = routing(rank, size, 6)
    few = x.bfloat16()
    rows, _, handle, _, hook = one.low_latency_dispatch(few, idx, 6, 4 * size, use_fp8=False, return_recv_hook=True)
    other.destroy()
    hook()
    y, _, hook = one.low_latency_combine(rows, idx, weights, handle, return_recv_hook=True)
    deep_ep.ElasticBuffer(dist.group.WORLD).destroy()
    hook()
    torch.testing.assert_close(y.float(), x * weights.sum(1, keepdim=True), rtol=0.05, atol=0.05)
    one.destroy()


def test_destroy_beside_a_call_under_way(gloo):
    gloo.run(under_way)


def last(rank, size):
    """The memory of a group is given back with the last buffer, and not before."""
    group = dist.new_group(list(range(size)))
    one, other = deep_ep.Buffer(group), deep_ep.Buffer(group)
    x, idx, weights = routing(rank, size, 6)
    dispatched(one, x, idx, weights)
    pool = one._engines.of(CPU).pool
    (made,) = pool._made.values()
    one.destroy()
    assert not made.closed
    dispatched(other, x, idx, weights)
    other.destroy()
    assert made.closed
    assert not pool._made
    dist.destroy_process_group(group)


def test_the_last_destroy_gives_memory_back(gloo):
    gloo.run(last)


def test_reads_are_awaited_by_other_streams_alone():
    """With streams that are numbers, since the host has none."""
    now, captured, seen = [1], [False], []

    class Stream(int):
        def wait_event(self, event):
            seen.append(("wait", int(self)))

    class Event:
        def record(self, stream):
            seen.append(("record", int(stream)))

    def raw_stream(index):
        return now[0]

    def stream_now(index):
        return Stream(now[0])

    def capturing():
        return captured[0]

    def current_stream(device):
        return SimpleNamespace(stream_id=number)

    with (
        mock.patch.multiple(_streams, raw_stream=raw_stream, stream_now=stream_now, capturing=capturing),
        mock.patch.multiple(torch.cuda, Event=Event, current_stream=current_stream),
    ):
        # The default stream, one of torch's own, and one of somebody else's, which may be gone when another is used.
        for number in (0, 3, 4):
            now[0], captured[0] = 1, False
            seen.clear()
            reads = _streams.Reads(torch.device("cuda", 0))
            reads.follow()
            assert reads.several == (number == 4)
            if reads.several:
                reads.mark()
            reads.follow()
            assert seen == [("record", 1)] * (number == 4)
            now[0] = 2
            reads.follow()
            assert seen == [("record", 1), ("wait", 2)]
            assert reads.several
            reads.mark()
            reads.follow()
            now[0] = 1
            reads.mark()  # the second half of a call, on another stream than the first
            now[0] = 2
            reads.follow()
            assert seen[2:] == [("record", 2), ("record", 1), ("wait", 2)]
            now[0], captured[0] = 1, True
            reads.follow()
            reads.mark()
            assert len(seen) == 5
            assert reads.capturing()
    host = _streams.Reads(torch.device("cpu"))
    host.follow()
    assert not host.several
    assert not host.capturing()
