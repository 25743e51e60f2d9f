"""Dispatchers of CUDA tensors: the layers of the host's tests on GPUs, CUDA graphs, streams and faults."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import test_torch_moe as host
import world as worlds_module

import switchyard as sw
from switchyard import errors

torch = pytest.importorskip("torch")
import moe_layers as layers  # noqa: E402
import torch.distributed as dist  # noqa: E402

CUDA = "cuda"


def run(ranks: worlds_module.World, *arguments) -> list:
    """What hangs does not hold GPUs for long."""
    return ranks.run(*arguments, timeout=60)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", list(layers.LAYOUTS))
def test_layers_in_every_layout(cuda, layout, dtype):
    run(cuda, layers.gradients, CUDA, layout, dtype, host.WAYS, {})


@pytest.mark.parametrize("layout", ["slab", "rank_padded", "flat"])
def test_layers_for_few_tokens(cuda, layout):
    run(cuda, layers.gradients, CUDA, layout, "float16", host.WAYS, {"low_latency": True, "index_dtype": torch.int32})


@pytest.mark.parametrize("layout", ["flat", "slab", "token_major"])
def test_layers_in_compiled_graphs(worlds, layout):
    run(worlds.get(2, worlds_module.cuda), layers.gradients, CUDA, layout, "float32", host.WAYS, {}, True)


@pytest.mark.parametrize("check", ["biased", "again", "lifetimes", "counted", "refused", "overflow"])
def test_dispatches(cuda, check):
    run(cuda, getattr(layers, check), CUDA)


@pytest.mark.parametrize("layout", list(layers.LAYOUTS))
def test_routings_outlive_their_outputs(cuda, layout):
    run(cuda, layers.kept, CUDA, layout)


@pytest.mark.parametrize("layout", list(layers.LAYOUTS))
def test_what_a_dispatch_left_is_the_callers(cuda, layout):
    run(cuda, layers.taken, CUDA, layout)


@pytest.mark.parametrize("layout", ["flat", "token_major", "rank_padded"])
def test_dispatchers_share_memory(cuda, layout):
    run(cuda, layers.shared, CUDA, layout)


@pytest.mark.parametrize("layout", list(layers.LAYOUTS))
@pytest.mark.parametrize("options", host.SCALES, ids=str)
def test_float8(worlds, layout, options):
    run(worlds.get(2, worlds_module.cuda), layers.float8, CUDA, layout, options)


@pytest.mark.parametrize("layout", ["flat", "slab", "rank_padded"])
def test_two_at_a_time(cuda, layout):
    run(cuda, layers.two_at_a_time, CUDA, layout, {"low_latency": layout != "flat"})


def captured(rank, size, layout, options):
    """A layer in one graph, and its halves in three, replayed with other routing in turns with calls outside."""
    d = layers.dispatcher(size, CUDA, layout, handles=3, **options)
    m = layers.matrices(size, CUDA)
    mine = layers.local(d, m)
    x, idx, weights = layers.routing(rank, size, CUDA, 0)
    for _ in range(2):  # what torch loads at first
        got = d.dispatch(x, idx, weights)
        d.combine(layers.experts(got, mine), got)
    del got
    torch.cuda.synchronize()
    whole, parts = torch.cuda.CUDAGraph(), [torch.cuda.CUDAGraph() for _ in range(3)]
    with torch.cuda.graph(whole):
        one = d.dispatch(x, idx, weights)
        y = d.combine(layers.experts(one, mine), one)
    with torch.cuda.graph(parts[0]):
        two = d.dispatch(x, idx, weights, async_op=True)
    with torch.cuda.graph(parts[1]):
        pending = d.combine(layers.experts(two.wait(), mine), two, async_op=True)
    with torch.cuda.graph(parts[2]):
        z = pending.wait()
    for seed in range(1, 20):
        for to, of in zip((x, idx, weights), layers.routing(rank, size, CUDA, seed)):
            to.copy_(of)
        want = layers.reference(x, idx, weights, m)
        torch.cuda.synchronize()
        sw.barrier()
        if seed % 3 == 0:
            got = d.dispatch(x, idx, weights)
            torch.testing.assert_close(d.combine(layers.experts(got, mine), got), want, rtol=1e-4, atol=1e-5)
            del got
        out, graphs = (y, [whole]) if seed % 2 else (z, parts)
        out.fill_(-1)
        for graph in graphs:
            graph.replay()
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    sw.synchronize()
    del one, two, pending, y, z, whole, parts, graph, graphs, out
    d.close()


@pytest.mark.parametrize("layout", list(layers.LAYOUTS))
def test_graphs(cuda, layout):
    run(cuda, captured, layout, {})


@pytest.mark.parametrize("layout", ["slab", "rank_padded"])
def test_graphs_for_few_tokens(cuda, layout):
    run(cuda, captured, layout, {"low_latency": True})


def counted_in_graphs(rank, size):
    """The host has the counts of the latest replay, also behind combines of as many rows as came and kept routings."""
    d = layers.dispatcher(size, CUDA, "token_major", handles=2, host_counts=True)
    x, idx, weights = layers.routing(rank, size, CUDA, 0)
    want = {}
    for seed in range(1, 5):
        for to, of in zip((x, idx, weights), layers.routing(rank, size, CUDA, seed)):
            to.copy_(of)
        got = d.dispatch(x, idx, weights)
        host = got.host_counts()
        want[seed] = host, d.combine(got.rows[: host.rows], got)
        del got
    assert len({host.rows for host, _ in want.values()}) > 1
    sw.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one = d.dispatch(x, idx, weights)
        with pytest.raises(errors.Unsupported, match="a graph is being captured"):
            one.host_counts()
    for seed, (host, y) in want.items():
        for to, of in zip((x, idx, weights), layers.routing(rank, size, CUDA, seed)):
            to.copy_(of)
        torch.cuda.synchronize()
        sw.barrier()
        graph.replay()
        torch.cuda.synchronize()
        # By an operator, and by Python, which looks at the length itself.
        by_operator = d.combine(one.rows[: host.rows], one)
        by_python = d.combine(one.rows[: host.rows].clone().requires_grad_(), one)
        assert torch.equal(by_operator, y)
        assert torch.equal(by_python.detach(), y)
        assert one.host_counts() == host == one.keep().counts
    sw.synchronize()
    del one, graph, want, by_operator, by_python
    d.close()


def test_counts_in_graphs(cuda):
    run(cuda, counted_in_graphs)


def places(rank, size):
    """Tensors of every allocator, and calls on several streams."""
    d = layers.dispatcher(size, CUDA, "flat", handles=2)
    m = layers.matrices(size, CUDA)
    mine = layers.local(d, m)
    x, idx, weights = layers.routing(rank, size, CUDA, 3)
    want = layers.reference(x, idx, weights, m)
    pool = sw.mem_pool(8 << 20)
    with torch.cuda.use_mem_pool(pool):
        pooled = torch.empty(d.max_rows, layers.HIDDEN, device=CUDA)
        px = torch.empty_like(x)
    symmetric = sw.empty(d.max_rows, layers.HIDDEN, device=CUDA)
    for buffer in (pooled, symmetric, None):
        got = d.dispatch(px.copy_(x), idx, weights)
        out = layers.experts(got, mine)
        if buffer is not None:
            out = buffer.copy_(out)
        else:
            out = got.rows.copy_(out)  # in place
        torch.testing.assert_close(d.combine(out, got), want, rtol=1e-4, atol=1e-5)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(5):
        here = torch.cuda.current_stream()
        first.wait_stream(here)
        with torch.cuda.stream(first):
            torch.cuda._sleep(1_000_000)
            got = d.dispatch(x, idx, weights)
            out = layers.experts(got, mine)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            y = d.combine(out, got)
        here.wait_stream(second)
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    # Rows of one dispatch are the tokens of the next.
    other = layers.dispatcher(size, CUDA, "token_major", max_tokens=d.max_rows)
    rows = d.max_rows
    again = other.dispatch(got.rows, torch.zeros(rows, layers.TOP_K, dtype=torch.int64, device=CUDA) - 1)
    assert (other.combine(again.rows, again) == 0).all()
    torch.cuda.synchronize()
    sw.free(symmetric)
    del got, again, out, pooled, px
    other.close()
    d.close()


def test_memory_and_streams(cuda):
    run(cuda, places)


def many(rank, size):
    """Thousands of small dispatches, two in flight, each of whose elements is checked."""
    d = layers.dispatcher(size, CUDA, "slab", low_latency=True, handles=2)
    batches = [layers.routing(rank, size, CUDA, seed) for seed in range(8)]
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    want = [(x * (w * (idx >= 0)).sum(1, keepdim=True)) for x, idx, w in batches]
    torch.cuda.synchronize()
    sw.barrier()
    before = None
    for i in range(2000 if torch.cuda.device_count() >= size else 50):
        x, idx, w = batches[i % 8]
        got = d.dispatch(x, idx, w, async_op=True)
        if before is not None:
            k, other = before
            y = d.combine(other.wait().rows, other, async_op=True).wait()
            wrong += ((y - want[k]).abs() > 1e-4).sum()
        before, other = (i % 8, got), None
    assert wrong.item() == 0
    sw.synchronize()
    del before, got
    d.close()


def test_many_dispatches(cuda):
    run(cuda, many)


def mixed(rank, size):
    """Tensors are where the dispatcher is."""
    x, idx, w = torch.ones(8, 16), torch.full((8, 1), rank), torch.ones(8, 1)
    on_host, on_gpu = (sw.Dispatcher(size, 1, 16, max_tokens=8, device=where) for where in ("cpu", CUDA))
    for bad in ((x.cuda(), idx, w), (x, idx.cuda(), w), (x, idx, w.cuda())):
        with pytest.raises(errors.InvalidArgument, match=r"is on cuda:., the dispatcher on cpu"):
            on_host.dispatch(*bad)
    for bad in ((x, idx.cuda(), w.cuda()), (x.cuda(), idx, w.cuda()), (x.cuda(), idx.cuda(), w)):
        with pytest.raises(errors.InvalidArgument, match=r"is on cpu, the dispatcher on cuda:."):
            on_gpu.dispatch(*bad)
    with pytest.raises(errors.InvalidType, match="x is not a tensor"):
        on_gpu.dispatch(x.numpy(), idx, w)
    got = on_host.dispatch(x, idx, w)
    there = on_gpu.dispatch(x.cuda(), idx.cuda(), w.cuda())
    with pytest.raises(errors.InvalidArgument, match="is on cuda"):
        on_host.combine(there.rows, got)
    with pytest.raises(errors.InvalidArgument, match="host_counts is not set"):
        there.host_counts()
    assert torch.equal(on_gpu.combine(there.rows, there).cpu(), on_host.combine(got.rows, got))
    with pytest.raises(errors.InvalidArgument, match="16"):
        sw.Dispatcher(size, 1, 2, device=CUDA)
    del got, there
    on_host.close()
    on_gpu.close()


def test_tensors_elsewhere_are_refused(cuda):
    run(cuda, mixed)


def late(rank, size):
    """A rank that does not come is named, and the dispatcher is over."""
    g = dist.new_group(timeout=timedelta(seconds=3))
    d = layers.dispatcher(size, CUDA, "flat", group=g)
    batch = layers.routing(rank, size, CUDA, 1)
    got = d.dispatch(*batch)
    torch.cuda.synchronize()
    dist.barrier()
    if rank != 1:
        began = time.monotonic()
        d.combine(got.rows, got)
        with pytest.raises(errors.TimedOut) as caught:
            sw.synchronize(g)
        assert caught.value.rank == 1
        assert time.monotonic() - began < 15
        with pytest.raises(errors.TimedOut):
            d.combine(got.rows, got)
    dist.barrier()
    sw.communicator(g)._abandon()


def test_a_rank_that_does_not_come(cuda):
    run(cuda, late)


def trained(rank, size, steps):
    example = host.load()
    losses = {}
    for impl in ("torch", "layer"):
        arguments = ["--device", CUDA, "--impl", impl, "--steps", str(steps), "--experts", str(4 * size)]
        losses.update(example.train(example.arguments(arguments), lambda line: None))
    return losses


def test_training_gives_the_losses_of_torch(cuda):
    losses = cuda.run(trained, 60, timeout=300)[0]
    assert losses["torch"][-1] < losses["torch"][0] - 0.1
    assert max(abs(a - b) for a, b in zip(losses["layer"], losses["torch"])) < 1e-2
