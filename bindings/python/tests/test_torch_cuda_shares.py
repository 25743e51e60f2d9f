"""CUDA tensors of torch's allocator that two ranks share."""

from __future__ import annotations

import pytest
import world
from cuda_rig import CUDA, ready

import switchyard as sw

torch = pytest.importorskip("torch")


def ring(rank, size):
    after, before = (rank + 1) % size, (rank - 1) % size
    for n in (1, 1000, 3_000_000):
        mine = torch.full((2 * n,), float(rank), device=CUDA)
        ready()
        with sw.share(mine[n:], after), sw.open_shared(before, device=CUDA) as theirs:
            assert theirs.tensor.is_cuda
            assert theirs.size == 4 * n
            at = theirs.tensor.view(torch.float32)
            got = torch.empty(n, device=CUDA)
            sw.get(got, at, before)
            assert torch.equal(got, torch.full_like(got, before))
            ready()
            for k in range(3):
                sw.put(torch.full((n,), 10.0 * k + rank, device=CUDA), at, before)
                sw.signal(before, device=CUDA)
                sw.wait(after, device=CUDA)
                assert mine.tolist()[:: max(n - 1, 1)][-1] == 10.0 * k + after
                assert mine[n - 1].item() == rank
                ready()
            # a message of it, which is read where it lies
            mine[n:].fill_(100.0 + rank)
            work = sw.isend(mine[n:], after)
            sw.recv(got, before)
            work.wait()
            assert torch.equal(got, torch.full_like(got, 100.0 + before))
            torch.cuda.synchronize()
            ready()
    sw.synchronize()


def graphs(rank, size):
    peer, n = 1 - rank, 100_000
    mine, src, got = (torch.zeros(n, device=CUDA) for _ in range(3))
    lent, theirs = sw.share(mine, peer), sw.open_shared(peer, device=CUDA)
    at = theirs.tensor.view(torch.float32)
    ready()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sw.put(src, at, peer)
        sw.signal(peer, device=CUDA)
        sw.wait(peer, device=CUDA)
        got.copy_(mine)
    for k in range(5):
        src.fill_(10 * k + rank)
        graph.replay()
        assert torch.equal(got, torch.full_like(got, 10 * k + peer))
        torch.cuda.synchronize()
        ready()
    theirs.close()
    lent.close()
    sw.check()


def refused(rank, size):
    peer = 1 - rank
    x = sw.empty(10, device=CUDA)
    with pytest.raises(sw.errors.Unsupported, match="symmetric heap already"):
        sw.share(x, peer)
    with pytest.raises(sw.errors.TimedOut, match=f"open memory of rank {peer}"):
        sw.open_shared(peer, device=CUDA, timeout=0.01)
    mine = torch.zeros(10, device=CUDA)
    ready()
    lent = sw.share(mine, peer)
    theirs = sw.open_shared(peer, device=CUDA)
    stale = theirs.tensor
    ready()
    with pytest.raises(sw.errors.TimedOut, match=f"rank {peer} has them open"):
        lent.close(timeout=0.01)
    ready()
    theirs.close()
    lent.close()
    with pytest.raises(sw.errors.InvalidArgument, match="not symmetric memory"):
        sw.put(torch.zeros(40, dtype=torch.uint8, device=CUDA), stale, peer)
    sw.free(x)


@pytest.mark.parametrize("case", [ring, graphs, refused], ids=lambda f: f.__name__)
def test_shared_cuda_tensors(worlds, case):
    worlds.get(2, world.cuda).run(case)
