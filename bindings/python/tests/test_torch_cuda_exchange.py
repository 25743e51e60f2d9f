"""all_to_all_single of CUDA tensors: rows, types, sizes, splits, limits, wrong arguments."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import test_torch_calls as host
import world
from cuda_rig import CUDA, ready, reference, values

import switchyard as sw
from switchyard import errors

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402


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
