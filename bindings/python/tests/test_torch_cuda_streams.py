"""Calls on CUDA tensors on streams, next to what the caller enqueues, and in graphs."""

from __future__ import annotations

from datetime import timedelta

import pytest
from cuda_rig import CUDA, ready

import switchyard as sw
from switchyard import errors

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402


def asynchronous(rank, size):
    n = 50_000
    x = torch.arange(float(n * size), device=CUDA) + 7 * rank
    want = torch.cat([torch.arange(float(n)) + rank * n + 7 * p for p in range(size)])
    y = torch.empty_like(x)
    ready()
    work = sw.all_to_all_single(y, x, async_op=True)
    assert isinstance(work, dist.Work)
    streams = [torch.cuda.Stream() for _ in range(3)]
    copies = []
    for s in streams:  # several streams wait for it, and again
        with torch.cuda.stream(s):
            assert work.wait() is True
            assert work.wait()
            copies.append(y.clone())
    assert work.wait(timedelta(seconds=30))
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is y
    assert torch.equal(y.cpu(), want)
    torch.cuda.synchronize()
    assert all(torch.equal(c.cpu(), want) for c in copies)
    # It begins behind what the caller has enqueued, and what the caller enqueues next need not wait for it.
    x.zero_()
    torch.cuda._sleep(20_000_000)
    x.fill_(rank + 1)
    works = [sw.all_to_all_single(y, x, async_op=True)]
    works.append(sw.all_to_all_single(torch.empty_like(x), x, async_op=True))  # in the order of the calls
    future = works[1].get_future()
    assert works[1].get_future() is future
    works[0].wait()
    assert y.view(size, n)[:, 5].tolist() == [p + 1.0 for p in range(size)]
    assert future.wait()[0].view(size, n)[:, 9].tolist() == [p + 1.0 for p in range(size)]
    # Nobody waits for the work and nobody holds the tensors: their memory is not given to others before.
    for k in range(10):
        sw.all_to_all_single(torch.empty_like(x), torch.full_like(x, k), async_op=True)
        torch.full_like(x, -1)
    sw.all_to_all_single(y, x)  # comes behind them
    assert y.view(size, n)[:, 5].tolist() == [p + 1.0 for p in range(size)]


def test_async_op(cuda):
    cuda.run(asynchronous)


def late(rank, size):
    # A wait with a timeout that a peer does not make; the call goes on.
    x, y = torch.full((size,), rank + 1.0, device=CUDA), torch.empty(size, device=CUDA)
    ready()
    if rank == 0:
        work = sw.all_to_all_single(y, x, async_op=True)
        with pytest.raises(errors.TimedOut, match="timed out"):
            work.wait(timedelta(milliseconds=50))
        assert not work.is_completed()
        sw.barrier()  # the current stream does not wait for the exchange
        work.wait(timedelta(seconds=30))
        assert work.is_completed()
    else:
        sw.barrier()
        sw.all_to_all_single(y, x)
    assert y.tolist() == [p + 1.0 for p in range(size)]


def test_wait_with_a_timeout(cuda):
    cuda.run(late)


def streams(rank, size):
    n = 30_000
    # Each stream fills, exchanges and reads on its own; the exchanges take turns among them.
    ss = [torch.cuda.Stream() for _ in range(3)] + [torch.cuda.default_stream()]
    x, y = [torch.empty(n * size, device=CUDA) for _ in ss], [torch.empty(n * size, device=CUDA) for _ in ss]
    torch.cuda.synchronize()
    ready()
    seen = []
    for turn in range(6):
        for k, s in enumerate(ss):
            with torch.cuda.stream(s):
                torch.cuda._sleep(200_000 * (k + 1))
                x[k].fill_(100 * turn + 10 * k + rank)
                y[k].fill_(-1)
                sw.all_to_all_single(y[k], x[k])
                seen.append((100 * turn + 10 * k, y[k].view(size, n)[:, 3].clone()))
    torch.cuda.synchronize()
    for base, got in seen:
        assert got.tolist() == [base + p for p in range(size)]


def test_streams(cuda):
    cuda.run(streams)


def graphs(rank, size):
    n, m = 40_000, 60_000  # the second goes in chunks, in place
    x, y = torch.zeros(n * size, device=CUDA), torch.zeros(n * size, device=CUDA)
    big, place = torch.zeros(m * size, device=CUDA, dtype=torch.float64), sw.empty(m * size, dtype=torch.float64, device=CUDA)
    send = [2 + (rank + k) % 2 for k in range(size)]
    recv = send  # rank i sends 2 + (i + k) % 2 to k, which is symmetric
    rows, got = torch.zeros(sum(send), 5, device=CUDA), torch.zeros(sum(recv), 5, device=CUDA)
    sw.all_to_all_single(y, x)
    ready()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sw.all_to_all_single(y, x)
        doubled = y * 2
        sw.all_to_all_single(place, big)
        work = sw.all_to_all_single(got, rows, recv, send, async_op=True)
        work.wait()
        last = got + 1
    assert y.sum().item() == 0  # captured, not run
    eager = torch.empty_like(y)
    for k in range(5):
        x.fill_(10 * k + rank)
        big.fill_(20 * k + rank)
        rows.fill_(30 * k + rank)
        ready()
        graph.replay()
        if k % 2 == 0:  # calls in between, on the stream of the replays
            sw.all_to_all_single(eager, x)
            graph.replay()
            assert eager.view(size, n)[:, 1].tolist() == [10 * k + p for p in range(size)]
        assert doubled.view(size, n)[:, 1].tolist() == [2 * (10 * k + p) for p in range(size)]
        assert place.view(size, m)[:, -1].tolist() == [20 * k + p for p in range(size)]
        assert last[:, 4].tolist() == [30 * k + p + 1 for p in range(size) for _ in range(recv[p])]
    ready()
    del graph
    sw.free(place)


def test_cuda_graphs(cuda):
    cuda.run(graphs)


def on_another_stream(rank, size):
    other = torch.cuda.Stream()
    for stream in (other, other.cuda_stream):
        x, y = torch.zeros(size, device=CUDA), torch.zeros(size, device=CUDA)
        total = torch.zeros(3, device=CUDA)
        ready()
        with torch.cuda.stream(other):
            torch.cuda._sleep(20_000_000)  # what the calls have to come behind
            x.fill_(rank + 1)
            total.fill_(rank + 1)
        sw.all_to_all_single(y, x, stream=stream)
        sw.all_reduce(total, stream=stream)
        assert torch.cuda.current_stream() != other
        other.synchronize()
        assert y.tolist() == [p + 1 for p in range(size)]
        assert total[0].item() == size * (size + 1) / 2
    with pytest.raises(TypeError, match="stream is a str"):
        sw.all_reduce(total, stream="x")


def test_calls_on_a_stream_that_is_named(cuda):
    cuda.run(on_another_stream)


def between_two(rank, size):
    after, before = (rank + 1) % size, (rank - 1) % size
    place, got = sw.empty(4, dtype=torch.int64, device=CUDA), torch.zeros(2, dtype=torch.int64, device=CUDA)
    place.fill_(-1)
    ready()
    sw.barrier()
    for n in range(5):
        sw.put(torch.full((2,), 10 * rank + n, device=CUDA), place[1:3], after)
        sw.signal(after, 2, device=CUDA)
        sw.wait(before, 2, device=CUDA)
        assert place.tolist() == [-1, 10 * before + n, 10 * before + n, -1]
        sw.signal(before, 3, device=CUDA)
        sw.wait(after, 3, device=CUDA)
    sw.get(got, place[1:3], after, stream=torch.cuda.Stream())
    torch.cuda.synchronize()
    assert got.tolist() == [10 * rank + 4] * 2
    sw.barrier()
    sw.free(place)


def test_puts_gets_and_signals(cuda):
    cuda.run(between_two)
