"""Reductions and gathers of CUDA tensors."""

from __future__ import annotations

import math

import pytest
import test_torch_calls as host
from cuda_rig import CUDA, ready
from test_plans import all_reduce, all_to_all, rounds, steps

import switchyard as sw
from switchyard import errors
from switchyard._core import algorithms

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402


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


def registered(rank, size):
    """Algorithms of one's own for GPUs are chosen by their times there, and calls of the host do without."""
    def where(good):
        return lambda nbytes, ranks: 0.01 if good(nbytes) else math.inf

    def backwards(ranks):
        return {"orders": rounds(ranks), "window": 1}

    try:
        sw.register_algorithm("few", where(lambda n: n <= 4096), steps, ranks=[size], device="cuda")
        large = where(lambda n: n >= 1 << 20)
        sw.register_algorithm("back", large, backwards, collective="exchange", ranks=[size], device="cuda")
        group = dist.new_group()
        for n, chosen in ((1000, True), (1 << 20, False)):
            x = torch.full((n,), rank + 1.0, device=CUDA)
            assert sw.explain(x, x, group=group, call="all_reduce").startswith("plan few (lowest estimate)") == chosen
            assert "few" not in sw.explain(x.cpu(), x.cpu(), group=group, call="all_reduce").split("\n")[0]
            sw.all_reduce(x, group=group)
            assert (x == size * (size + 1) / 2).all().item()
            y, x = (torch.empty(n * size, device=CUDA), torch.full((n * size,), float(rank), device=CUDA))
            assert sw.explain(y, x, group=group).startswith("back (lowest estimate)") != chosen
            ready()
            sw.all_to_all_single(y, x, group=group)
            assert torch.equal(y.view(size, n)[:, -1].cpu(), torch.arange(float(size)))
            assert torch.equal(y.view(size, n)[:, 0].cpu(), torch.arange(float(size)))
    finally:
        algorithms._algorithms.clear()


def planned(rank, size):
    group = dist.new_group()
    sw.communicator(group, plans=[all_reduce(size), all_to_all(size)], algorithm="own")
    for n in (1, 1003, 70_001):
        x = torch.full((n,), rank + 1.0, device=CUDA)
        assert sw.explain(x, x, group=group, call="all_reduce").startswith("plan own (forced)")
        for async_op in (False, True):
            work = sw.all_reduce(x, group=group, async_op=async_op)
            if async_op:
                work.wait()
        assert (x == size * size * (size + 1) / 2).all().item()
        symmetric = sw.empty(n, dtype=torch.int64, group=group, device=CUDA)
        symmetric.fill_(rank)
        sw.all_reduce(symmetric, group=group)
        assert (symmetric == size * (size - 1) // 2).all().item()
        x = torch.arange(n * size, device=CUDA) + 1000 * rank
        y = torch.zeros_like(x)
        ready()
        sw.all_to_all_by_plan(y, x, group)
        want = torch.cat([torch.arange(n * rank, n * (rank + 1)) + 1000 * r for r in range(size)])
        assert torch.equal(y.cpu(), want)
        sw.all_to_all_by_plan(x, x, group)
        assert torch.equal(x, y)
        assert sw.explain(y, x, group=group, call="all_to_all_by_plan").startswith("plan direct")
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(5000, device=CUDA)
    with torch.cuda.graph(graph):
        sw.all_reduce(x, group=group)
    for replay in range(20):
        x.fill_(replay + rank)
        ready()
        graph.replay()
        assert (x == size * replay + size * (size - 1) / 2).all().item()
    with pytest.raises(errors.Unsupported, match="plans are for dense tensors, both of the host or both of a GPU"):
        sw.all_to_all_by_plan(y.cpu(), x, group)


def test_plans_of_a_group_run_on_gpus(cuda):
    cuda.run(planned)


def test_registered_algorithms(cuda):
    cuda.run(registered)
