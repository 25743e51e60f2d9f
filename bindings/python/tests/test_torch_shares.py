"""Host tensors that two ranks share, in groups of torch's."""

from __future__ import annotations

import pytest

import switchyard as sw

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402


def shared(value, n=1000, dtype=torch.float32):
    return torch.full((n,), value, dtype=dtype).share_memory_()


def ring(rank, size):
    after, before = (rank + 1) % size, (rank - 1) % size
    mine = shared(float(rank))
    with sw.share(mine[10:20], after) as lent:  # all ranks first
        assert lent.tensor.data_ptr() == mine[10:].data_ptr()
        dist.barrier()
        theirs = sw.open_shared(before)
        assert theirs.size == 40
        at = theirs.tensor.view(torch.float32)
        assert at.tolist() == [float(before)] * 10
        dist.barrier()
        with pytest.raises(sw.errors.TimedOut, match=f"rank {after} has them open") as told:
            lent.close(timeout=0.01)
        assert told.value.rank == after
        sw.put(torch.full((3,), 7.5), at[2:5], before)
        sw.signal(before)
        sw.wait(after)
        assert mine[10:19].tolist() == [float(rank)] * 2 + [7.5] * 3 + [float(rank)] * 4
        got = torch.zeros(10)
        sw.get(got, at, before)
        assert got[2:6].tolist() == [7.5] * 3 + [float(before)]
        at[9] = -1  # the memory itself
        sw.signal(before)
        sw.wait(after)
        assert mine[19] == -1
        dist.barrier()
        theirs.close()
        theirs.close()
        assert theirs.tensor is None
        with pytest.raises(sw.errors.InvalidArgument, match="not symmetric memory"):
            sw.put(torch.zeros(1), mine[:1], before)
    lent.close()
    assert lent.tensor is None
    dist.barrier()


def refused(rank, size):
    peer = (rank + 1) % size
    plain = torch.zeros(10)
    lying = shared(0, 10)
    for error, words, call in (
        (sw.errors.Unsupported, "share_memory_", lambda: sw.share(plain, peer)),
        (sw.errors.InvalidArgument, "no elements", lambda: sw.share(lying[:0], peer)),
        (sw.errors.InvalidArgument, "strides", lambda: sw.share(shared(0, 10).view(2, 5).T, peer)),
        (sw.errors.InvalidArgument, f"dst is {rank}", lambda: sw.share(lying, rank)),
        (sw.errors.InvalidArgument, f"src is {size}", lambda: sw.open_shared(size)),
        (sw.errors.InvalidType, "timeout is 'soon'", lambda: sw.open_shared(peer, timeout="soon")),
        (sw.errors.InvalidType, "type torch.Tensor", lambda: sw.share([1], peer)),
        (sw.errors.Unsupported, "no memory to share on meta", lambda: sw.open_shared(peer, device="meta")),
        (sw.errors.TimedOut, f"open memory of rank {peer}", lambda: sw.open_shared(peer, timeout=0.01)),
    ):
        with pytest.raises(error, match=words):
            call()
    dist.barrier()


def subgroups(rank, size):
    group = dist.new_group([size - 1, 0])
    if rank in (0, size - 1):
        peer = size - 1 - rank
        lent = sw.share(shared(rank, dtype=torch.int64), peer, group)
        with sw.open_shared(peer, group) as theirs:
            assert theirs.tensor.view(torch.int64)[-1] == peer
        lent.close()
    dist.barrier()


def withdrawn(rank, size):
    after, before = (rank + 1) % size, (rank - 1) % size
    for timeout in (1e-6, 0.3):  # at once, and after the peer has been waited for more than once
        lent = sw.share(shared(1), after)
        lent.close(timeout=timeout)
        assert lent.tensor is None
    with pytest.raises(ZeroDivisionError), sw.share(shared(1), after) as lent:
        1 / 0  # noqa: B018
    assert lent.tensor is None
    dist.barrier()
    for _ in range(3):
        with pytest.raises(sw.errors.Freed, match=f"open memory of rank {before}: .* has withdrawn its offer"):
            sw.open_shared(before)
    lent = sw.share(shared(2), after)
    with sw.open_shared(before) as theirs:
        assert theirs.tensor.view(torch.float32)[0] == 2
        dist.barrier()
        with pytest.raises(ZeroDivisionError), lent:
            1 / 0  # noqa: B018
        assert lent.tensor is not None  # the peer has it open
        dist.barrier()
    lent.close()
    dist.barrier()


def many(rank, size):
    peer = (rank + 1) % size
    kept = [sw.share(shared(float(i), 10), peer) for i in range(100)]
    for i in range(100):
        with sw.open_shared((rank - 1) % size) as theirs:
            assert theirs.tensor.view(torch.float32)[9] == i
    for each in kept:
        each.close()
    # those that nobody closes go with the group
    sw.share(shared(1), peer)
    sw.open_shared((rank - 1) % size)
    dist.barrier()


@pytest.mark.parametrize("case", [ring, refused, subgroups, withdrawn, many], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["gloo", "backend"])
def test_shared_tensors(worlds, kind, case):
    import world

    worlds.get(3, getattr(world, kind)).run(case)
