"""Every call on CUDA tensors against NCCL's, on the same tensors in the same processes. Where ranks have to share a GPU,
which NCCL refuses, against gloo's on copies."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from datetime import timedelta

import pytest
import test_torch_backend as backend
import test_torch_calls as host
import test_torch_moe as moe
import world
from world import free_port

import switchyard as sw
from switchyard import errors
from switchyard._core import native

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

CUDA = "cuda"


def reference(output: torch.Tensor, input: torch.Tensor, *arguments, group=None) -> None:
    """torch's all_to_all_single of CUDA tensors, of bytes where its backend does not know the type."""
    if str(output.dtype).removeprefix("torch.") in host.NOT_GLOO:
        output, input = output.view(torch.uint8), input.view(torch.uint8)
    if dist.get_backend() == "nccl":
        dist.all_to_all_single(output, input, *arguments, group=group)
        return
    out = output.cpu()
    dist.all_to_all_single(out, input.cpu(), *arguments, group=group)
    output.copy_(out)


def values(rank, n, shape, dtype, poison=False):
    return host.values(rank, n, shape, dtype, poison).cuda()


def ready():
    """All ranks are here and their GPUs have done everything: whoever is late now does not hold a GPU for all."""
    sw.barrier()


def moved(rank, size, dtype, shape):
    kind = getattr(torch, dtype)
    send = [[(2 * i + 3 * j) % 4 for j in range(size)] for i in range(size)]
    recv = [send[i][rank] for i in range(size)]
    x = values(rank, sum(send[rank]), shape, kind)
    for arguments, n in (((recv, send[rank]), sum(recv)), ((), None)):
        source = x if arguments else values(rank, 3 * size, shape, kind)
        ours = values(rank, n if n is not None else 3 * size, shape, kind, poison=True)
        theirs = ours.clone()
        reference(theirs, source, *arguments)
        ready()
        assert sw.all_to_all_single(ours, source, *arguments) is None
        host.same(ours.cpu(), theirs.cpu())


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (1, 1, 7)], ids=str)
def test_all_to_all_of_rows(cuda, shape):
    cuda.run(moved, "float32", shape)


def every_type(rank, size):
    for dtype in host.DTYPES:
        moved(rank, size, dtype, (3,))


def test_all_to_all_of_every_type(cuda):
    cuda.run(every_type)


def published(rank, size):
    # PyTorch's expectations: its documentation's, and what its tests of all_to_all_single on NCCL compute.
    torch.set_default_device(CUDA)
    try:
        host.published(rank, size)
    finally:
        torch.set_default_device(None)
    for dtype in (torch.float32, torch.cfloat, torch.float16, torch.bfloat16, torch.bool, torch.int64):
        # Equal splits: from every rank one row with its number.
        x = torch.full((size, size), rank, device=CUDA).to(dtype)
        out = torch.empty_like(x)
        sw.all_to_all_single(out, x)
        expected = torch.cat([torch.full((1, size), r) for r in range(size)]).to(dtype)
        assert torch.equal(out.cpu(), expected)
        # Unequal splits: rank i sends i + 1 rows to everybody, in rows of size elements.
        send, recv = [rank + 1] * size, [r + 1 for r in range(size)]
        x = torch.full((sum(send), size), rank, device=CUDA).to(dtype)
        out = torch.empty(sum(recv), size, device=CUDA, dtype=dtype)
        sw.all_to_all_single(out, x, recv, send)
        expected = torch.cat([torch.full((r + 1, size), r) for r in range(size)]).to(dtype)
        assert torch.equal(out.cpu(), expected)
        # Empty splits: everybody sends to rank 0 alone, and then nobody sends.
        send = [size if r == 0 else 0 for r in range(size)]
        recv = [size] * size if rank == 0 else [0] * size
        x = torch.full((size, 2), rank, device=CUDA).to(dtype)
        out = torch.empty(sum(recv), 2, device=CUDA, dtype=dtype)
        sw.all_to_all_single(out, x, recv, send)
        expected = torch.cat([torch.full((size, 2), r) for r in range(size)]).to(dtype) if rank == 0 else out.cpu()
        assert torch.equal(out.cpu(), expected)
        nothing = torch.empty(0, device=CUDA, dtype=dtype)
        sw.all_to_all_single(torch.empty_like(nothing), nothing)


def test_the_expectations_of_torch(worlds):
    worlds.get(4, world.cuda).run(published)


def sizes(rank, size, dtype):
    kind = getattr(torch, dtype)
    for n in (0, 1, 2, 3, 5, 15, 17, 1000, 4099, 70_001, 600_000):
        x = values(rank, n * size, (), kind)
        ours = values(rank, n * size, (), kind, poison=True)
        theirs = ours.clone()
        reference(theirs, x)
        # One element in, so that nothing is aligned.
        shifted = torch.empty(n * size + 1, dtype=kind, device=CUDA)[1:]
        source = torch.empty(n * size + 3, dtype=kind, device=CUDA)[3:].copy_(x)
        ready()
        sw.all_to_all_single(ours, x)
        sw.all_to_all_single(shifted, source)
        host.same(ours.cpu(), theirs.cpu())
        host.same(shifted.cpu(), theirs.cpu())


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
def test_all_to_all_of_every_size(cuda, dtype):
    cuda.run(sizes, dtype)


def changing(rank, size):
    # Splits that nobody has seen before, more of them than are remembered.
    g = torch.Generator().manual_seed(5)
    for _ in range(30 if torch.cuda.device_count() < size else 1500):
        send = torch.randint(0, 5, (size, size), generator=g)
        x = torch.arange(int(send[rank].sum()), device=CUDA) + 1000 * rank
        out = torch.full((int(send[:, rank].sum()),), -1, device=CUDA)
        sw.all_to_all_single(out, x, send[:, rank].tolist(), send[rank].tolist())
        first = [1000 * p + int(send[p, :rank].sum()) for p in range(size)]
        assert out.tolist() == [first[p] + i for p in range(size) for i in range(int(send[p, rank]))]


def test_changing_splits(cuda):
    cuda.run(changing)


def zero_rows(rank, size):
    for shape, arguments in (((0,), ()), ((0, 3), ()), ((0, 3), ([0] * size, [0] * size)), ((2 * size, 0), ())):
        sw.all_to_all_single(torch.empty(shape, device=CUDA), torch.empty(shape, device=CUDA), *arguments)
    send = [3] + [0] * (size - 1)
    recv = [3] * size if rank == 0 else [0] * size
    out = torch.full((sum(recv), 2), -1.0, device=CUDA)
    sw.all_to_all_single(out, torch.full((3, 2), float(rank), device=CUDA), recv, send)
    assert out[:, 1].tolist() == ([float(p) for p in range(size) for _ in range(3)] if rank == 0 else [])
    # Splits on one side only, and in other guises.
    out, x = torch.empty(2 * size, device=CUDA), torch.arange(2.0 * size, device=CUDA)
    for arguments in ((None, [2] * size), ([2] * size, []), ((2,) * size, range(2, 3) if size == 1 else [2] * size)):
        out.fill_(-1)
        sw.all_to_all_single(out, x, *arguments)
        assert out.view(size, 2)[:, 0].tolist() == [2.0 * rank] * size


def test_zero_splits(cuda):
    cuda.run(zero_rows)


def live(rank, size):
    # Splits on the GPU: in calls of every kind, and in a graph that is replayed with others.
    g = torch.Generator().manual_seed(11)
    room = 8 * size
    x, out = torch.empty(room, 3, device=CUDA, dtype=torch.int64), torch.empty(room, 3, device=CUDA, dtype=torch.int64)
    send, recv = (torch.ones(size, device=CUDA, dtype=torch.int64) for _ in range(2))

    def fill() -> list[int]:
        counts = torch.randint(0, 9, (size, size), generator=g)
        send.copy_(counts[rank])
        recv.copy_(counts[:, rank])
        out.fill_(-1)
        x.copy_((torch.arange(room)[:, None] + 1000 * rank).expand(room, 3))
        first = [1000 * p + int(counts[p, :rank].sum()) for p in range(size)]
        want = [first[p] + i for p in range(size) for i in range(int(counts[p, rank]))]
        ready()
        return want

    def check(want: list[int]) -> None:
        assert out[: len(want), 0].tolist() == want
        assert (out[len(want) :] == -1).all()  # what is left of the output is as it was

    for async_op in (False, True, False):
        want = fill()
        work = sw.all_to_all_single(out, x, recv, send, async_op=async_op)
        if work is not None:
            work.wait()
        check(want)
    want = fill()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sw.all_to_all_single(out, x, recv, send)
    for _ in range(3):
        want = fill()
        graph.replay()
        check(want)
    sw.synchronize()


def test_splits_on_the_gpu(cuda):
    cuda.run(live)


def too_much(rank, size):
    # Splits on the GPU that do not fit: all ranks hear at once whose they are, and the next call works.
    g = dist.new_group(timeout=timedelta(seconds=60))
    x, out = torch.zeros(4 * size, device=CUDA), torch.zeros(4 * size, device=CUDA)
    splits = torch.full((size,), 4, device=CUDA)
    sw.all_to_all_single(out, x, splits, splits, group=g)
    sw.synchronize(g)
    for room in (4, 400_000):  # packets, and messages with credit
        x, out = torch.full((room * size,), float(rank), device=CUDA), torch.zeros(room * size, device=CUDA)
        splits = torch.full((size,), room, device=CUDA)
        bad = splits + 1 if rank == 0 else splits
        began = time.monotonic()
        sw.all_to_all_single(out, x, splits, bad, group=g)
        with pytest.raises(errors.InvalidArgument, match="rank 0 refuses its splits") as caught:
            sw.synchronize(g)
        assert caught.value.rank == 0
        assert time.monotonic() - began < 20
        sw.all_to_all_single(out, x, splits, splits, group=g)
        sw.synchronize(g)
        assert out.view(size, room)[:, 0].tolist() == list(range(size))
    dist.barrier()


def test_splits_on_the_gpu_that_do_not_fit(cuda):
    cuda.run(too_much)


def limited(rank, size):
    # Limits of a call, and a communicator that leaves the multiprocessors alone.
    n = 200_000  # more than packets carry
    x = torch.arange(n * size, device=CUDA).view(size, n) + (rank << 40)
    want = (torch.arange(size, device=CUDA) << 40)[:, None] + torch.arange(rank * n, (rank + 1) * n, device=CUDA)
    for limits in ({}, {"max_sms": 2}, {"max_sms": 4, "copy_sms": 4}, {"copy_sms": 0}):
        out = torch.full_like(x, -1)
        ready()
        sw.all_to_all_single(out, x, **limits)
        assert torch.equal(out, want)
    if torch.cuda.device_count() < size:
        return  # ranks that share a GPU hold up each other's copies
    g = dist.new_group()
    sw.communicator(g, device=CUDA, no_sms=True)
    with pytest.raises(errors.InvalidArgument, match="in use"):
        sw.communicator(g, device=CUDA, no_sms=True)
    with pytest.raises(errors.InvalidArgument, match="peer_displs"):
        sw.all_to_all_single(torch.empty_like(x), x, group=g)
    place = sw.empty(size, n, dtype=x.dtype, device=CUDA, group=g)
    for _ in range(2):
        place.fill_(-1)
        ready()
        sw.all_to_all_single(place, x, group=g, peer_displs=[rank] * size)
        assert torch.equal(place, want)
    sw.synchronize(g)
    sw.free(place)


def test_limits_of_a_call(cuda):
    cuda.run(limited)


def wrong(rank, size):
    n = 2 * size
    x, y = torch.zeros(n, device=CUDA), torch.zeros(n, device=CUDA)
    z = torch.zeros(n, 2, device=CUDA)
    each = [2] * size
    for text, output, input, *splits in (
        ("Number of tensor splits not equal to group size", y, x, each[:-1], each),
        ("Number of tensor splits not equal to group size", y, x, each, [*each, 0]),
        ("Split sizes doesn't match total dim 0 size", y, x, [1] * size, each),
        ("Split sizes doesn't match total dim 0 size", y, x, each, [3] * size),
        ("negative", y, x, [n + 1, -1] + [0] * (size - 2), each),
        ("Tensors must be contiguous", z, torch.zeros(2, n, device=CUDA).t()),
        ("Tensors must be contiguous", torch.zeros(2, n, device=CUDA).t(), z),
        ("different dtypes", y, x.double()),
        ("Expected parameter `output` of type torch.Tensor", [1], x),
        ("Expected parameter `input` of type torch.Tensor", y, None),
        ("want a list of integers", y, x, [2.0] * size, each),
        ("want a list of integers", y, x, torch.tensor(each).double(), each),
        ("input_split_sizes is not on the GPU", y, x, torch.tensor(each, device=CUDA), each),
        ("want torch.int64", y, x, *[torch.tensor(each, device=CUDA, dtype=torch.int32)] * 2),
        ("dim 0 does not divide equally across group size", torch.zeros(n + 1, device=CUDA), torch.zeros(n + 1, device=CUDA)),
        ("dimension", torch.zeros((), device=CUDA), torch.zeros((), device=CUDA)),
        ("overlap", x, x),
        ("output is on cpu, input on cuda", y.cpu(), x),
        ("output is on cuda:., input on cpu", y, x.cpu()),
        ("to itself", y, x, [1] * (size - 1) + [size + 1] if rank == 0 else [size + 1] + [1] * (size - 1), each),
        ("conj", torch.zeros(n, device=CUDA, dtype=torch.cfloat), torch.zeros(n, device=CUDA, dtype=torch.cfloat).conj()),
        ("negation", y, torch.zeros(n, device=CUDA)._neg_view()),
    ):
        for asynchronous in (False, True):
            with pytest.raises((ValueError, RuntimeError, TypeError), match=text):
                sw.all_to_all_single(output, input, *splits, async_op=asynchronous)
    # Nothing was sent: everybody can go on.
    ready()
    sw.all_to_all_single(y, torch.full_like(x, rank))
    assert y.view(size, 2)[:, 0].tolist() == list(range(size))


def test_wrong_arguments(cuda):
    cuda.run(wrong)


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


def symmetric(rank, size):
    n = 100_000
    y = sw.empty(size, n, device=CUDA)
    assert y.is_cuda
    assert y.dtype is torch.float32
    z = sw.empty((2, 3), dtype=torch.bfloat16, device=torch.device(CUDA, torch.cuda.current_device()))
    assert z.shape == (2, 3)
    z.fill_(2)
    assert z.sum().item() == 12
    assert sw.empty(0, 5, device=CUDA).shape == (0, 5)
    x = torch.empty(size, n, device=CUDA)
    assert "output in place" in sw.explain(y, x)
    assert "output in place" not in sw.explain(torch.empty_like(x), x)
    for k in range(3):
        x.fill_(rank + k)
        y.fill_(-1)
        ready()
        sw.all_to_all_single(y, x)
        assert y[:, 7].tolist() == [p + k for p in range(size)]
        # A view, somewhere inside, of both.
        part, source = y.view(-1)[5 : 5 + 1000 * size], x.view(-1)[3 : 3 + 1000 * size].fill_(10 + rank)
        ready()
        sw.all_to_all_single(part, source)
        assert part.view(size, 1000)[:, 999].tolist() == [10 + p for p in range(size)]
    sw.verify()
    big = sw.empty(200 << 20, dtype=torch.uint8, device=CUDA)  # more than the heap had
    big.zero_()
    sw.verify()
    for t in (z, big, y):
        sw.free(t)
    with pytest.raises(errors.Freed):
        sw.free(y)
    with pytest.raises(errors.Freed):
        sw.all_to_all_single(y, x)
    again = sw.empty(size, n, device=CUDA)
    assert again.data_ptr() == y.data_ptr()
    sw.free(again)
    sw.verify()
    if rank == 0:
        sw.empty(3, device=CUDA)
    with pytest.raises(errors.Diverged, match="alloc of 12 bytes"):
        sw.verify()


def test_symmetric_tensors(worlds):
    # It leaves a group behind whose ranks have diverged.
    w = world.World(2, world.cuda_plain, "")
    try:
        w.run(symmetric)
    finally:
        w.close()


def pooled(rank, size):
    n = 300_000
    pool = sw.mem_pool(64 << 20)
    with torch.cuda.use_mem_pool(pool):
        if rank % 2:  # the ranks' pools need not look alike
            odd = torch.empty(3_000_001, device=CUDA, dtype=torch.uint8)
        y = torch.empty(size, n, device=CUDA)
    outside = torch.empty(size, n, device=CUDA)
    x = torch.empty(size, n, device=CUDA)
    assert "output in place" in sw.explain(y, x)
    assert "output in place" not in sw.explain(outside, x)
    for k in range(3):
        x.fill_(rank + k)
        for out in (y, outside):
            out.fill_(-1)
            ready()
            sw.all_to_all_single(out, x)
            assert out[:, 5].tolist() == [p + k for p in range(size)]
            assert out[:, -1].tolist() == [p + k for p in range(size)]
    sw.verify()  # of what the ranks do by themselves nothing is compared
    # Tensors come and go; their memory is used again.
    address = y.data_ptr()
    del y
    with torch.cuda.use_mem_pool(pool):
        again = torch.empty(size, n, device=CUDA)
        assert again.data_ptr() == address
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(100 << 20, device=CUDA, dtype=torch.uint8)
    x.fill_(rank + 50)
    ready()
    sw.all_to_all_single(again, x)
    assert again[:, 0].tolist() == [p + 50 for p in range(size)]
    if rank % 2:
        del odd
    del again, pool  # which gives back what it had taken
    gc.collect()
    torch.cuda.empty_cache()
    # What torch calls for that.
    device = torch.cuda.current_device()
    number = sw.communicator()._gpu(device).pool(8 << 20, 0)
    lib = ctypes.CDLL(native.path())
    take, give = getattr(lib, f"switchyard_pool_alloc_{number}"), getattr(lib, f"switchyard_pool_free_{number}")
    take.restype, take.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    give.restype, give.argtypes = None, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    half = 4 << 20
    first, second = take(half, device, None), take(half, device, None)
    assert abs(first - second) == half
    assert first % 512 == 0
    assert take(1, device, None) is None
    give(first, half, device, None)
    assert take(half, device + 1, None) is None
    assert take(half, device, None) == first
    ready()


def test_mem_pool(cuda):
    cuda.run(pooled)


def groups(rank, size):
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    pgs = [dist.new_group(h) for h in halves]
    mine, other = (pgs[0], pgs[1]) if rank in halves[0] else (pgs[1], pgs[0])
    members = halves[0] if rank in halves[0] else halves[1]
    y = torch.empty(len(members), device=CUDA)
    sw.all_to_all_single(y, torch.full((len(members),), float(rank), device=CUDA), group=mine)
    assert y.tolist() == members
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert sw.all_to_all_single(y, y, group=other) is None
    assert len(caught) == 1
    backwards = dist.new_group(list(reversed(range(size))))
    sw.communicator(backwards, device=CUDA)  # made ready
    z = torch.empty(size, device=CUDA)
    x = torch.arange(float(size), device=CUDA) + 10 * rank
    place = dist.get_rank(backwards)
    ready()
    sw.all_to_all_single(z, x, group=backwards)
    assert z.tolist() == [10 * dist.get_global_rank(backwards, p) + place for p in range(size)]
    ready()
    sw.all_to_all_single(z, x)
    assert z.tolist() == [10 * p + rank for p in range(size)]
    dist.destroy_process_group(backwards)
    sub = sw.communicator().split(rank % 2)
    y = torch.empty(sub.size, device=CUDA)
    sw.all_to_all_single(y, torch.full((sub.size,), float(rank), device=CUDA), group=sub)
    assert y.tolist() == [float(p) for p in range(rank % 2, size, 2)]
    sw.synchronize(sub)
    sub.close()
    with pytest.raises(errors.Closed):
        sw.all_to_all_single(y, y.clone(), group=sub)
    ready()


def test_groups_and_subgroups(cuda):
    cuda.run(groups)


def reductions():
    """Data types and operators that the library has."""
    from switchyard._torch import calls

    return [(dtype, op) for (dtype, op), kind in calls._KINDS.items() if kind is not None]


def reduced(rank, size):
    # The library's own results on the host are the reference, bit for bit.
    for n in (0, 1, 1003, 70_001):
        for dtype, op in reductions():
            x = (host.values(rank, n * size, (), torch.float64) % 5 - (1 if dtype.is_signed else 0)).to(dtype)
            ours, theirs = x.cuda(), x.clone()
            ready()
            assert sw.all_reduce(ours, op) is None
            sw.all_reduce(theirs, op)
            host.same(ours.cpu(), theirs)
            shifted = torch.empty(n * size + 1, dtype=dtype, device=CUDA)[1:].copy_(x)  # nothing is aligned
            part, want = torch.empty(n, dtype=dtype, device=CUDA), torch.empty(n, dtype=dtype)
            ready()
            sw.reduce_scatter_tensor(part, shifted, op)
            sw.reduce_scatter_tensor(want, x, op)
            host.same(part.cpu(), want)
            if op == "sum":
                whole, all_of_it = torch.empty_like(ours), torch.empty_like(theirs)
                ready()
                sw.all_gather_into_tensor(whole, part)
                sw.all_gather_into_tensor(all_of_it, want)
                host.same(whole.cpu(), all_of_it)


def test_reductions_of_every_type(cuda):
    cuda.run(reduced)


def reduced_otherwise(rank, size):
    n = 30_000
    total = size * (size + 1) / 2
    # Work of its own, whose output the current stream waits for.
    x = torch.full((n,), rank + 1.0, device=CUDA)
    ready()
    work = sw.all_reduce(x, async_op=True)
    assert isinstance(work, dist.Work)
    work.wait()
    assert (x == total).all().item()
    assert work.result()[0] is x
    # Not in one stretch of memory: through copies, also where the work is waited for later.
    for async_op in (False, True):
        grid = torch.full((64, 64), rank + 1.0, device=CUDA)
        work = sw.all_reduce(grid[:, ::2], async_op=async_op)
        if async_op:
            work.wait()
        assert grid[3, :4].tolist() == [total, rank + 1, total, rank + 1]
    # Complex numbers, symmetric tensors, halves of one tensor.
    c = torch.full((5,), rank + 1j, device=CUDA)
    sw.all_reduce(c)
    assert c.tolist() == [size * (size - 1) / 2 + size * 1j] * 5
    here = sw.empty(1 << 20, dtype=torch.bfloat16, device=CUDA)
    here.fill_(rank + 1)
    ready()
    sw.all_reduce(here)
    assert (here == total).all().item()
    whole = torch.empty(size, 7, device=CUDA)
    whole[rank] = rank
    sw.all_gather_into_tensor(whole, whole[rank])
    assert whole[:, 3].tolist() == [*range(size)]
    # A graph.
    ready()
    graph = torch.cuda.CUDAGraph()
    part = torch.empty(n // size, device=CUDA)
    with torch.cuda.graph(graph):
        sw.all_reduce(x)
        sw.reduce_scatter_tensor(part, x[: n // size * size])
    for k in range(50):
        x.fill_(k + rank)
        ready()
        graph.replay()
        assert x[-1].item() == k * size + size * (size - 1) / 2
        assert part[5].item() == size * x[0].item()
    ready()
    del graph
    # What is wrong is refused, and calls that differ are an error of one call.
    with pytest.raises(ValueError, match="same size"):
        sw.reduce_scatter_tensor(torch.empty(3, device=CUDA), torch.empty(size, device=CUDA))
    sw.all_reduce(torch.ones(10 + rank, device=CUDA))
    torch.cuda.synchronize()
    with pytest.raises(errors.Mismatch):
        sw.check()
    ready()
    y = torch.ones(10, device=CUDA)
    sw.all_reduce(y)
    assert y.tolist() == [size] * 10
    sw.free(here)


def test_reductions_otherwise(cuda):
    cuda.run(reduced_otherwise)


def replicas(rank, size):
    import switchyard.torch as st

    def train(hook):
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(8, 3000), torch.nn.Tanh(), torch.nn.Linear(3000, 1)).cuda()
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
        if hook:
            model.register_comm_hook(None, st.average_hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(4):
            g = torch.Generator().manual_seed(10 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(16, 8, generator=g).cuda()).square().mean().backward()
            optimizer.step()
        return [p.detach().cpu() for p in model.parameters()]

    if dist.get_backend() == "nccl":
        for a, b in zip(train(True), train(False)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_hook_of_distributed_data_parallel(cuda):
    cuda.run(replicas)


def elsewhere(rank, size):
    # What the project has no kernels for goes to torch's backend.
    x = torch.full((5,), rank + 1.0, device=CUDA)
    if dist.get_backend() != "gloo":
        small = torch.full((5,), rank - 3, device=CUDA, dtype=torch.int8)
        sw.all_reduce(small, "max")
        assert small.tolist() == [size - 4] * 5
    torch.cuda._sleep(5_000_000)
    x.fill_(rank)
    sw.barrier()
    assert torch.cuda.current_stream().query()  # as with NCCL's barrier


def test_what_goes_to_torch(cuda):
    cuda.run(elsewhere)


def incapable(rank, size):
    # GPUs that cannot exchange: torch's backend does it, and says so once.
    group = dist.new_group()
    comm = sw.communicator(group)

    def refuse(number, options):
        comm._no_gpus[number] = errors.Unsupported("switchyard: no way to a peer")
        raise comm._no_gpus[number]

    comm._open_gpu = refuse
    x, y = torch.arange(float(size), device=CUDA) + 10 * rank, torch.empty(size, device=CUDA)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            sw.all_to_all_single(y.zero_(), x, group=group)
            assert y.tolist() == [10.0 * p + rank for p in range(size)]
    said = [str(w.message) for w in caught if "switchyard" in str(w.message)]
    assert said == (["switchyard: exchanges of CUDA tensors go to torch: switchyard: no way to a peer"] if rank == 0 else [])
    with pytest.raises(errors.Unsupported, match="no way to a peer"):
        sw.communicator(group, device=CUDA)


def test_gpus_that_cannot_exchange(cuda):
    cuda.run(incapable)


def operators(rank, size):
    import switchyard.torch as st

    name = dist.group.WORLD.group_name
    send = [[1 + (i + 2 * j) % 3 for j in range(size)] for i in range(size)]
    recv, send = [send[i][rank] for i in range(size)], send[rank]
    ops = torch.ops.switchyard
    x = torch.randn(sum(send), 3, device=CUDA, requires_grad=True)
    for op, arguments in (
        (ops.all_to_all_single.default, (x, recv, send, name)),
        (ops.all_to_all_single_.default, (torch.empty(sum(recv), 3, device=CUDA), x.detach(), recv, send, name)),
    ):
        torch.library.opcheck(op, arguments)
    # The gradient of an exchange is the exchange back.
    weight = torch.arange(sum(recv) * 3.0, device=CUDA).view(-1, 3) + rank
    (st.all_to_all_single(x, recv, send) * weight).sum().backward()
    back = torch.empty_like(x)
    reference(back, weight, send, recv)
    assert torch.equal(x.grad, back)

    def layer(x):
        y = st.all_to_all_single(x * 2, recv, send)
        z = torch.empty_like(x)
        sw.all_to_all_single(z, y.relu(), send, recv)
        return z + 1

    x = torch.randn(sum(send), 3, device=CUDA)
    ready()
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


def test_operators_and_compiled_graphs(cuda):
    cuda.run(operators)


def as_backend(rank, size):
    import torch.distributed._functional_collectives as fc

    assert dist.get_backend() == "switchyard"
    x = torch.arange(2.0 * size, device=CUDA) + 10 * rank
    y = torch.empty(2 * size, device=CUDA)
    dist.all_to_all_single(y, x)
    assert y.view(size, 2)[:, 0].tolist() == [10 * p + 2 * rank for p in range(size)]
    work = dist.all_to_all_single(y.zero_(), x, [2] * size, [2] * size, async_op=True)
    work.wait()
    assert y.view(size, 2)[:, 1].tolist() == [10 * p + 2 * rank + 1 for p in range(size)]
    z = fc.all_to_all_single(x, [2] * size, [2] * size, dist.group.WORLD)
    assert z.tolist() == y.tolist()
    c = torch.empty(size, device=CUDA, dtype=torch.cfloat)
    dist.all_to_all_single(c, torch.full_like(c, rank + 1j))
    assert c.tolist() == [p + 1j for p in range(size)]
    gpu = sw.communicator()._gpu(torch.cuda.current_device())
    assert len(gpu._shapes) >= 2  # they were ours
    dist.barrier()
    assert not gpu.reduces  # exchanges do without
    with pytest.raises(errors.Error, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        dist.all_reduce(torch.ones(3, device=CUDA))
    with pytest.raises(ValueError, match="contiguous"):
        dist.all_to_all_single(torch.empty(size, 2, device=CUDA), torch.empty(2, size, device=CUDA).t())
    h = torch.tensor([rank + 1.0])  # host tensors beside them
    dist.all_reduce(h)
    assert h.item() == size * (size + 1) / 2
    if torch.cuda.device_count() >= size:
        g = h.cuda()
        dist.all_reduce(g)
        dist.broadcast(g, 0)
        assert g.item() == h.item() * size
    graph = torch.cuda.CUDAGraph()
    dist.barrier()
    with torch.cuda.graph(graph):
        dist.all_to_all_single(y, x)
    x.add_(100)
    graph.replay()
    assert y.view(size, 2)[:, 0].tolist() == [100 + 10 * p + 2 * rank for p in range(size)]
    dist.barrier()


def test_backend(worlds):
    worlds.get(2, world.cuda_backend).run(as_backend)


def as_backend_several(rank, size):
    pg = dist.group.WORLD
    gpu = sw.communicator()._gpu(torch.cuda.current_device())
    reduces = gpu.reduces  # after tests before this one
    wrapped, pg._wrapped = pg._wrapped, None  # all of it is ours
    try:
        backend.lists(CUDA, rank, size)
        assert gpu.reduces == reduces
        backend.coalesced(CUDA, rank, size)
        assert gpu.reduces
    finally:
        pg._wrapped = wrapped
    dist.barrier()
    if torch.cuda.device_count() < size:
        return  # NCCL refuses to share a GPU
    # Calls between the old style's start and end: what is NCCL's is one batch, what is ours goes at once.
    x, y = torch.arange(float(size), device=CUDA) + 10 * rank, torch.empty(size, device=CUDA)
    manager = dist.distributed_c10d._coalescing_manager
    with manager(device=torch.device(CUDA, torch.cuda.current_device()), async_ops=True) as cm:
        dist.all_to_all_single(y, x)
    cm.wait()
    assert y.tolist() == [10 * p + rank for p in range(size)]
    got, given = torch.zeros(5, device=CUDA), torch.full((5,), float(rank), device=CUDA)
    after, before = (rank + 1) % size, (rank - 1) % size
    with manager(device=torch.device(CUDA, torch.cuda.current_device()), async_ops=True) as cm:
        dist.isend(given, after)
        dist.irecv(got, before)
    cm.wait()
    assert got.tolist() == [before] * 5


def test_backend_on_lists_and_coalesced_calls(worlds):
    worlds.get(2, world.cuda_backend).run(as_backend_several)


def as_backend_sharded(rank, size):
    pg = dist.group.WORLD
    dist.barrier()
    wrapped, pg._wrapped = pg._wrapped, None
    try:
        backend.sharded(CUDA, rank, size)
    finally:
        pg._wrapped = wrapped
    dist.barrier()


def test_fully_sharded_data_parallel(worlds):
    if torch.cuda.device_count() < 2:
        pytest.skip("ranks that share a GPU would wait for each other in the middle of a step")
    worlds.get(2, world.cuda_backend).run(as_backend_sharded)


def without_process_group(rank, size):
    assert not dist.is_initialized()
    out = torch.empty(size, device=CUDA)
    sw.all_to_all_single(out, torch.full((size,), float(rank), device=CUDA))
    assert out.tolist() == list(range(size))
    sw.synchronize()
    x = torch.full((2,), rank + 1.0, device=CUDA)
    sw.all_reduce(x)
    assert x.tolist() == [size * (size + 1) / 2] * 2
    with pytest.raises(errors.Unsupported, match="no process group"):
        sw.all_reduce(torch.ones(2, dtype=torch.int16, device=CUDA))
    with pytest.raises(errors.Unsupported, match="cuda:77"):
        sw.communicator()._gpu(77)
    with pytest.raises(errors.Unsupported, match="cuda:77"):  # is not asked for again
        sw.communicator()._gpu(77)
    # The sizes do not agree. Later calls work.
    for n in (1_000_000, 1000):
        rows = [n] * size
        sent = list(rows)
        if rank == 0:
            sent[1] += 1
        sw.barrier()
        sw.all_to_all_single(torch.empty(n * size, device=CUDA), torch.empty(sum(sent), device=CUDA), rows, sent)
        hears = rank == 1 or (rank == 0 and n == 1_000_000)  # the sender of few bytes with its next call
        if hears:
            with pytest.raises(errors.Mismatch, match=f"{4 * n + 4}.*{4 * n}|{4 * n}.*{4 * n + 4}"):
                sw.synchronize()
        torch.cuda.synchronize()
        sw.barrier()
        sw.all_to_all_single(out, torch.full((size,), rank + 5.0, device=CUDA))
        assert out.tolist() == [p + 5 for p in range(size)]
        if rank == 0 and not hears:
            with pytest.raises(errors.Mismatch, match=f"{4 * n + 4}"):
                sw.synchronize()
        sw.synchronize()


def test_torch_without_a_process_group(worlds):
    worlds.get(2, world.cuda_plain).run(without_process_group)


def run(code: str, size: int = 2, **environment: str) -> list[subprocess.Popen]:
    port = free_port()
    environment = {**os.environ, "WORLD_SIZE": str(size), "SWITCHYARD_PORT": str(port), **environment}
    return [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)],
            env={**environment, "RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for r in range(size)
    ]  # fmt: skip


def end(process: subprocess.Popen, timeout: float = 60, code: int = 0) -> None:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"did not end within {timeout} s\n{out}\n{err}")
    assert process.returncode == code, f"{process.returncode}\n{out}\n{err}"


START = """
    import os, sys, time
    import torch
    import switchyard as sw
    comm = sw.init(timeout={timeout})
    torch.cuda.set_device(comm.rank % torch.cuda.device_count())
    x, y = torch.ones(2000, device="cuda"), torch.empty(2000, device="cuda")
    sw.all_to_all_single(y, x)
    torch.cuda.synchronize()
    sw.barrier()
"""


def test_a_lost_rank_is_named():
    code = START.format(timeout=60) + """
    if comm.rank == 1:
        os.kill(os.getpid(), 9)
    began = time.monotonic()
    for _ in range(2):
        try:
            sw.all_to_all_single(y, x)
            sw.synchronize()
        except sw.errors.PeerLost as err:
            assert err.rank == 1, err
        else:
            sys.exit("no error")
    assert time.monotonic() - began < 15
    """
    first, second = run(code)
    end(first)
    end(second, code=-signal.SIGKILL)


def test_training_goes_on_without_a_lost_rank():
    # Each rank has data of its own, and parameters that are the same on all. What one rank computes is so simple that the
    # others know what the parameters have to be, with it and without.
    code = START.format(timeout=60).replace("2000", "3000") + """
    STEPS, LOST_AT = 12, 5

    def gradient(w, r, step):
        return 0.25 * w * (r + 1) - float(step % 3 + r)

    want = torch.zeros(1000, device="cuda")
    for step in range(STEPS):
        members = [0, 2] if step >= LOST_AT else [0, 1, 2]
        total = gradient(want, members[0], step)
        for r in members[1:]:
            total = total + gradient(want, r, step)
        want = want - 0.5 * total / len(members)

    me, group, w, step = comm.rank, comm, torch.zeros(1000, device="cuda"), 0
    while step < STEPS:
        if me == 1 and step == LOST_AT:
            time.sleep(0.5)
            os.kill(os.getpid(), 9)
        g = gradient(w, me, step)
        seen = torch.empty(group.size, 2, device="cuda", dtype=torch.int64)
        try:
            sw.all_to_all_single(seen, torch.tensor([[me, step]] * group.size, device="cuda"), group=group)
            sw.all_reduce(g, group=group)
            sw.synchronize(group)
        except sw.errors.PeerLost as err:
            assert err.rank == 1 and step == LOST_AT and group is comm, (err, step)
            free = torch.cuda.mem_get_info()[0]
            group = sw.shrink(group)
            assert (group.rank, group.size) == (me // 2, 2), group
            comm.close()
            assert torch.cuda.mem_get_info()[0] > free, "its memory was not given back"
            continue
        assert seen.tolist() == [[r, step] for r in ([0, 2] if step >= LOST_AT else [0, 1, 2])], seen
        w = w - 0.5 * g / group.size
        step += 1
    assert group is not comm
    assert torch.equal(w, want), (w - want).abs().max()
    group.close()
    """
    first, second, third = run(code, size=3)
    end(first)
    end(third)
    end(second, code=-signal.SIGKILL)


def test_a_rank_that_does_not_come_is_named():
    code = START.format(timeout=3) + """
    if comm.rank == 1:
        time.sleep(8)
        os._exit(0)
    sw.all_to_all_single(y, x)
    began = time.monotonic()
    try:
        sw.synchronize()
    except sw.errors.TimedOut as err:
        assert err.rank == 1, err
        assert 2 < time.monotonic() - began < 6
    else:
        sys.exit("no error")
    try:
        sw.all_to_all_single(y, x)
    except sw.errors.TimedOut as err:
        assert "earlier call" in str(err), err
    else:
        sys.exit("no error")
    os._exit(0)
    """
    for process in run(code):
        end(process)


def test_a_rank_that_has_left_is_named():
    code = START.format(timeout=60) + """
    if comm.rank == 1:
        sys.exit(0)
    began = time.monotonic()
    try:
        sw.all_to_all_single(y, x)
        sw.synchronize()
    except sw.errors.PeerLost as err:
        assert err.rank == 1 and time.monotonic() - began < 20, err
    else:
        sys.exit("no error")
    """
    for process in run(code):
        end(process)


def test_exit_with_work_under_way():
    code = START.format(timeout=60) + """
    pool = sw.mem_pool(8 << 20)
    with torch.cuda.use_mem_pool(pool):
        z = torch.empty(2000, device="cuda")
    w = sw.empty(2000, device="cuda")
    for k in range(20):
        sw.all_to_all_single((z, w)[k % 2], x, async_op=True)
    """
    for process in run(code):
        end(process)


def test_the_heap_has_the_size_that_is_asked_for():
    code = """
    import os, sys
    import torch
    import switchyard as sw
    sw.init(timeout=20)
    torch.cuda.set_device(0)
    try:
        sw.communicator(device="cuda")
    except {error} as err:
        assert {text!r} in str(err), err
    else:
        sw.all_to_all_single(torch.empty(2, device="cuda"), torch.empty(2, device="cuda"))
        torch.cuda.synchronize()
    """
    for size, error, text in (("1G", "()", ""), ("1M", "()", ""), ("900G", "sw.errors.OutOfMemory", "memory"),
                              ("much", "sw.errors.InvalidArgument", "SWITCHYARD_CUDA_HEAP is")):  # fmt: skip
        processes = run(code.format(error=error, text=text), size=1, SWITCHYARD_CUDA_HEAP=size)
        for process in processes:
            end(process)


def test_handles_and_memory_are_given_back():
    code = """
    import gc, os
    import torch
    import switchyard as sw
    os.environ["SWITCHYARD_CUDA_HEAP"] = "64M"
    torch.ones(1, device="cuda")

    def once():
        with sw.init(0, 1, default=False) as comm:
            y = sw.empty(1000, device="cuda", group=comm)
            sw.all_to_all_single(y, torch.ones(1000, device="cuda"), group=comm)
            sw.synchronize(comm)
            assert y.sum().item() == 1000
            sw.free(y)
            sw.verify(comm)

    once()
    gc.collect()
    live, fds, free = native.library().live(), len(os.listdir("/proc/self/fd")), torch.cuda.mem_get_info()[0]
    for _ in range(5):
        once()
    gc.collect()
    assert native.library().live() <= live, (native.library().live(), live)
    assert len(os.listdir("/proc/self/fd")) <= fds + 2
    assert torch.cuda.mem_get_info()[0] >= free - (16 << 20), (free, torch.cuda.mem_get_info())
    """
    (process,) = run(code, size=1)
    end(process)


def trained(rank, size, steps):
    example = moe.load()
    lines = []
    arguments = ["--device", "cuda", "--steps", str(steps), "--batch", "4", "--length", "32"]
    losses = example.train(example.arguments(arguments), lines.append)
    return losses, lines[-1]


def test_training_gives_the_same_losses(cuda):
    losses, line = cuda.run(trained, 200, timeout=600)[0]
    assert len(losses["torch"]) == 200
    assert losses["torch"] == losses["switchyard"]
    assert losses["torch"][-1] < losses["torch"][0] - 0.2
    assert "the losses are the same" in line


def overhead(rank, size):
    # One call from Python, without peers: the bar is 20 us with them.
    x, y = torch.ones(2048, device=CUDA), torch.empty(2048, device=CUDA)
    for _ in range(100):
        sw.all_to_all_single(y, x)
    torch.cuda.synchronize()
    best = 1.0
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(50):
            sw.all_to_all_single(y, x)
        best = min(best, (time.perf_counter() - began) / 50)
        torch.cuda.synchronize()
    assert best < 20e-6, best


def test_the_overhead_of_a_call(worlds):
    worlds.get(1, world.cuda_plain).run(overhead)
