"""Messages between two ranks, gather, scatter and reduce of CUDA tensors, of this package and of torch's backend."""

from __future__ import annotations

import pytest
import world
from cuda_rig import CUDA

import switchyard as sw

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

SIZES = (0, 1, 1000, 5_000, 3_000_000)


def of(value, n, dtype=torch.float32):
    return torch.full((n,), value, device=CUDA, dtype=torch.int32).to(dtype)


def messages(rank, size):
    after, before = (rank + 1) % size, (rank - 1) % size
    for n in SIZES:
        for dtype in (torch.uint8, torch.bfloat16, torch.complex64):
            out = torch.empty(n, device=CUDA, dtype=dtype)
            # One after the other: even ranks send first.
            if rank % 2 == 0:
                sw.send(of(rank + 1, n, dtype), after, tag=n)
                assert sw.recv(out, before, tag=n) == before
            else:
                sw.recv(out, before, tag=n)
                sw.send(of(rank + 1, n, dtype), after, tag=n)
            assert torch.equal(out, of(before + 1, n, dtype))
            # All send first, next to what the stream does then.
            out.zero_()
            sends = sw.isend(of(rank + 2, n, dtype), after)
            receives = sw.irecv(out, before)
            receives.wait()
            sends.wait()
            assert receives.source_rank() == before
            assert torch.equal(out, of(before + 2, n, dtype))
            # As a batch, with tags in another order, and into a tensor that is not row by row.
            strange = torch.zeros(n, 2, device=CUDA, dtype=dtype).T
            ops = [sw.P2POp(sw.isend, of(rank + tag, n, dtype), after, tag=tag) for tag in (1, 2)]
            ops += [sw.P2POp(sw.irecv, strange[tag - 1], before, tag=tag) for tag in (2, 1)]
            (work,) = sw.batch_isend_irecv(ops)
            work.wait()
            assert torch.equal(strange, torch.stack([of(before + tag, n, dtype) for tag in (1, 2)]))
    sw.synchronize()
    sw.barrier()


def from_any(rank, size):
    peer = 1 - rank
    for n in SIZES:
        out = torch.empty(n, device=CUDA)
        # Next to the sends: the host waits for the rank alone.
        sends = sw.isend(of(rank + 1, n), peer, tag=n)
        assert sw.recv(out, tag=n) == peer
        assert torch.equal(out, of(peer + 1, n))
        receives = sw.irecv(out, tag=n)
        more = sw.isend(of(rank + 2, n), peer, tag=n)
        assert receives.source_rank() == peer
        receives.wait()
        assert torch.equal(out, of(peer + 2, n))
        # In a batch, one behind a receive from the rank, of the same tag.
        outs = [torch.empty(n, device=CUDA) for _ in range(2)]
        ops = [sw.P2POp(sw.irecv, outs[0], peer), sw.P2POp(sw.irecv, outs[1], None)]
        ops += [sw.P2POp(sw.isend, of(rank + i, n), peer) for i in (3, 4)]
        (work,) = sw.batch_isend_irecv(ops)
        work.wait()
        assert [torch.equal(x, of(peer + i, n)) for x, i in zip(outs, (3, 4))] == [True, True]
        assert list(work._done.sources) == [peer, peer, -1, -1]
        for each in (sends, more):
            each.wait()
    # In a graph the ranks are known once it has run.
    x, out = of(0, 1000), of(-1, 1000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(sw.errors.Unsupported, match="from any rank while a graph is captured"):
            sw.recv(out)
        ops = [sw.P2POp(sw.isend, x, peer), sw.P2POp(sw.irecv, out, None)]
        (work,) = sw.batch_isend_irecv(ops)
        work.wait()
        with pytest.raises(sw.errors.Unsupported, match="from any rank while a graph is captured"):
            list(work._done.sources)
    for step in range(5):
        x.fill_(step * size + rank)
        graph.replay()
        assert torch.equal(out, of(step * size + peer, 1000))
        assert list(work._done.sources) == [-1, peer]
    del graph
    sw.synchronize()
    sw.barrier()


def graphs(rank, size):
    after, before = (rank + 1) % size, (rank - 1) % size
    for n in (1000, 1_000_000):
        x, out = of(0, n), of(-1, n)
        ops = [sw.P2POp(sw.isend, x, after), sw.P2POp(sw.irecv, out, before)]
        sw.batch_isend_irecv(ops)[0].wait()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sw.batch_isend_irecv(ops)[0].wait()
        for step in range(10):
            x.fill_(step * size + rank)
            graph.replay()
            assert torch.equal(out, of(step * size + before, n))
        del graph
    sw.barrier()


def streams(rank, size):
    """Calls on a stream that is not the current one, behind what that stream has."""
    after, before = (rank + 1) % size, (rank - 1) % size
    s, n = torch.cuda.Stream(), 50_000
    for turn in range(4):
        x, out, more = (torch.zeros(n, device=CUDA) for _ in range(3))
        torch.cuda.synchronize()
        with torch.cuda.stream(s):
            torch.cuda._sleep(2_000_000)
            x.fill_(10 * turn + rank)
        sent = sw.isend(x, after, stream=s)
        assert sw.recv(out, before, stream=s.cuda_stream) == before
        ops = [sw.P2POp(sw.isend, x, after, tag=1), sw.P2POp(sw.irecv, more, before, tag=1)]
        (both,) = sw.batch_isend_irecv(ops, stream=s)
        sent.wait()
        both.wait()
        s.synchronize()
        assert torch.equal(out, of(10 * turn + before, n))
        assert torch.equal(more, out)
    with pytest.raises(ValueError, match="stream is a str, want"):
        sw.send(x, after, stream="s")
    sw.barrier()


def sizes_that_differ(rank, size):
    x = torch.ones(100_000, device=CUDA)
    if rank == 0:
        sw.send(x, 1)
    else:
        sw.recv(x[:10_000], 0)
    with pytest.raises(sw.errors.Mismatch, match="sends 400000 bytes to rank 1, which expects 40000"):
        sw.synchronize()
    sw.barrier()
    if rank == 0:
        sw.send(x, 1)
    else:
        x.zero_()
        sw.recv(x, 0)
        assert x.sum().item() == 100_000
    sw.barrier()


@pytest.mark.parametrize("case", [messages, from_any, graphs, streams, sizes_that_differ], ids=lambda f: f.__name__)
def test_pairs_of_cuda_tensors(worlds, case):
    worlds.get(2, world.cuda).run(case)


def of_torch(rank, size):
    """Calls of torch's, of which NCCL makes none."""
    wrapped, dist.group.WORLD._wrapped = dist.group.WORLD._wrapped, None
    try:
        peer = 1 - rank
        for n in SIZES:
            out = torch.empty(n, device=CUDA)
            if rank == 0:
                dist.send(of(1, n), 1, tag=3)
                dist.recv(out, 1, tag=4)
            else:
                dist.recv(out, 0, tag=3)
                dist.send(of(2, n), 0, tag=4)
            assert torch.equal(out, of(peer + 1, n))
            work = [dist.isend(of(rank + 5, n), peer), dist.irecv(out, peer)]
            for each in work:
                each.wait()
            assert torch.equal(out, of(peer + 5, n))
            sent = dist.isend(of(rank + 6, n), peer)
            assert dist.recv(out) == peer
            assert torch.equal(out, of(peer + 6, n))
            sent.wait()
            for root in range(size):
                mine = of(rank, n)
                lists = [torch.empty(n, device=CUDA) for _ in range(size)]
                dist.gather(mine, lists if rank == root else None, root)
                if rank == root:
                    assert all(torch.equal(x, of(p, n)) for p, x in enumerate(lists))
                dist.scatter(out, [of(p + 7, n) for p in range(size)] if rank == root else None, root)
                assert torch.equal(out, of(rank + 7, n))
                for async_op in (False, True):
                    work = dist.all_gather(lists, mine, async_op=async_op)
                    work.wait() if async_op else None
                    assert all(torch.equal(x, of(p, n)) for p, x in enumerate(lists))
                    work = dist.reduce_scatter(out, [of(p + rank, n) for p in range(size)], async_op=async_op)
                    work.wait() if async_op else None
                    assert torch.equal(out, of(rank * size + sum(range(size)), n))
                total = of(rank + 1, n)
                dist.reduce(total, root)
                assert torch.equal(total, of(sum(range(1, size + 1)) if rank == root else rank + 1, n))
    finally:
        dist.group.WORLD._wrapped = wrapped
    x, out = of(rank, 1 << 20), of(-1, 1 << 20)
    for order in (1, -1):
        ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, out, 1 - rank)][::order]
        for each in dist.batch_isend_irecv(ops):
            each.wait()
        assert torch.equal(out, of(1 - rank, 1 << 20))
    dist.barrier()


def test_pairs_of_the_backend(worlds):
    worlds.get(2, world.cuda_backend).run(of_torch)
