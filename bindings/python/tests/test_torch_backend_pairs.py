"""send, recv, their batches and broadcast of the backend on host tensors, as torch's own tests have them."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from world import World, hears_of
from world import backend as on_backend

import switchyard as sw

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402


@pytest.fixture(params=[2, 3], ids="{} ranks".format)
def ranks(worlds, request):
    return worlds.get(request.param, on_backend)


DTYPES = [torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.complex64, torch.bool]


def of(value, shape, dtype):
    return torch.full(shape, value, dtype=torch.int32).to(dtype)


def none_is_gloos(case):
    """The case makes no call of gloo's: its messages and collectives would be the wrapped group's."""

    def run(rank, size):
        wrapped = dist.group.WORLD._wrapped
        dist.group.WORLD._wrapped = None
        try:
            case(rank, size)
        finally:
            dist.group.WORLD._wrapped = wrapped

    run.__name__, run.__qualname__, run.__module__ = case.__name__, case.__qualname__, case.__module__
    return run


@none_is_gloos
def each_sends_in_turn(rank, size):
    """Each rank sends to all others, and then it receives from each."""
    for shape in [(), (0,), (1,), (10, 10), (300, 500)]:
        for dtype in DTYPES:
            for src in range(size):
                if src == rank:
                    for dst in range(size):
                        if dst != rank:
                            dist.send(of(src + 1, shape, dtype), dst)
                else:
                    x = of(0, shape, dtype)
                    assert dist.recv(x, src) == src
                    assert torch.equal(x, of(src + 1, shape, dtype)), (src, shape, dtype)


@none_is_gloos
def from_any(rank, size):
    got, x = [], torch.empty(4)
    for dst in range(size):
        if dst == rank:
            for _ in range(2 * (size - 1)):
                got.append(dist.recv(x, tag=3))
                assert x.tolist() == [got[-1]] * 4
        else:
            dist.send(torch.full((4,), float(rank)), dst, tag=3)
            dist.isend(torch.full((4,), float(rank)), dst, tag=3).wait()
    assert sorted(got) == sorted([p for p in range(size) if p != rank] * 2)
    dist.barrier()


@none_is_gloos
def tags_in_another_order(rank, size):
    others = [p for p in range(size) if p != rank]
    sends = [dist.isend(torch.full((n,), float(n)), p, tag=n) for p in others for n in (5, 1, 50_000)]
    for p in others:
        for n in (50_000, 5, 1):
            x = torch.empty(n)
            dist.recv(x, p, tag=n)
            assert (x == n).all()
    for work in sends:
        work.wait()
        assert work.is_completed()
        assert work.is_success()


@none_is_gloos
def batches_in_rings(rank, size):
    after, before = (rank + 1) % size, (rank - 1) % size
    for n in (1, 1000, 1_000_000):
        for op in (1, -1):
            x, out = torch.full((n,), float(rank)), torch.empty(n)
            ops = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, out, before)][::op]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            assert (out == before).all()
        dist.send(x, after)  # all send first
        dist.recv(out, before)
        assert (out == before).all()


@none_is_gloos
def among_collectives(rank, size):
    """Messages and collectives of one group go on next to each other: what was posted first need not be over first."""
    rnd = random.Random(rank)
    for n in range(10):
        others = [p for p in range(size) if p != rank]
        got = {p: torch.empty(1 << (2 * n)) for p in others}
        receives = [dist.irecv(got[p], p, tag=n) for p in others]
        total = torch.tensor([1.0])
        work = dist.all_reduce(total, async_op=True)
        time.sleep(rnd.random() / 100)
        sends = [dist.isend(torch.full((1 << (2 * n),), float(rank)), p, tag=n) for p in others]
        for each in (work, *sends, *receives):
            each.wait()
        assert total.item() == size
        assert all((got[p] == p).all() for p in others)


@none_is_gloos
def broadcasts(rank, size):
    for shape in [(), (0,), (7,), (3, 4), (1000, 333)]:
        for dtype in DTYPES:
            for root in range(size):
                want = of(root + 1, shape, dtype)
                x = of(rank + 1, shape[::-1], dtype).permute(tuple(range(len(shape)))[::-1])
                dist.broadcast(x, root)
                assert torch.equal(x, want), (shape, dtype, root)
    many = [torch.full((9,), float(rank + i)) for i in range(20)]
    for i, work in [(i, dist.broadcast(x, i % size, async_op=True)) for i, x in enumerate(many)]:
        work.wait()
        assert many[i].tolist() == [i % size + i] * 9
    if rank == 0:
        with pytest.raises(ValueError, match="elements share memory"):
            dist.broadcast(torch.zeros(1).expand(4), 1)
    dist.barrier()


def two_of_a_group(rank, size):
    """Two ranks use a new group, and the others never do."""
    group = dist.new_group(list(range(size)))
    x = torch.tensor([rank])
    if rank == 0:
        dist.send(x, size - 1, group)
    elif rank == size - 1:
        dist.recv(x, 0, group)
        assert x.item() == 0
    dist.barrier()


def models(rank, size):
    """DistributedDataParallel spreads the parameters of rank 0 from C++."""
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 40))
    mine = [p.detach().clone() for p in model.parameters()]
    for p in mine:
        first = p.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, p)
    things = [{"rank": rank}]
    dist.broadcast_object_list(things, 0)
    assert things == [{"rank": 0}]
    if rank == 0:
        dist.send_object_list([1, "two"], 1)
    elif rank == 1:
        things = [None, None]
        dist.recv_object_list(things, 0)
        assert things == [1, "two"]


def disagreements(rank, size):
    n = 100_000
    if rank == 0:
        told = hears_of(lambda: dist.send(torch.ones(n), 1), f"sends {4 * n} bytes to rank 1, which expects 8")
        dist.barrier()  # the sender was done with it if the receiver was late
        assert told or hears_of(lambda: dist.send(torch.ones(5), 1), f"sends {4 * n} bytes to rank 1, which expects 8")
        dist.send(torch.ones(5), 1)
    elif rank == 1:
        with pytest.raises(sw.errors.Mismatch, match=f"sends {4 * n} bytes to rank 1, which expects 8"):
            dist.recv(torch.ones(2), 0)
        dist.barrier()
        x = torch.zeros(5)
        dist.recv(x, 0)
        assert x.tolist() == [1] * 5
    else:
        dist.barrier()
    with pytest.raises(ValueError, match="rank"):
        dist.send(torch.ones(1), rank)
    dist.barrier()
    # Sizes of a broadcast: all ranks hear of it, and the next one works.
    with pytest.raises(sw.errors.Mismatch):
        dist.broadcast(torch.ones(3 if rank == 0 else 4), 0)
    x = torch.full((2,), float(rank))
    dist.broadcast(x, 1)
    assert x.tolist() == [1, 1]


@none_is_gloos
def splits_in_any_guise(rank, size):
    """Split sizes of an exchange as tensors and arrays."""
    np = pytest.importorskip("numpy")
    sizes = [1 + (rank + p) % 3 for p in range(size)]
    x = torch.full((sum(sizes), 2), float(rank))
    want = torch.cat([torch.full((n, 2), float(p)) for p, n in enumerate(sizes)])
    for guise in (list, tuple, torch.tensor, np.array, iter):
        out = torch.empty_like(want)
        dist.all_to_all_single(out, x, guise(sizes), guise(sizes))
        assert torch.equal(out, want), guise
    with pytest.raises(ValueError, match=f"sums to {sum(sizes) + size} rows"):
        dist.all_to_all_single(out, x, torch.tensor(sizes), torch.tensor(sizes) + 1)
    dist.barrier()


CASES = [
    each_sends_in_turn, from_any, tags_in_another_order, batches_in_rings, among_collectives, broadcasts, two_of_a_group,
    models, disagreements, splits_in_any_guise,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_messages(ranks, case):
    ranks.run(case)


def options_after_all(rank, size, pause):
    """The ranks have met by themselves; options before the first call are still theirs."""
    group = dist.new_group()
    time.sleep(pause * rank / 3)
    comm = sw.communicator(group, validate=True)
    assert comm.validate
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert x[0] == size
    with pytest.raises(ValueError, match="is in use"):
        sw.communicator(group, validate=True)
    dist.barrier()


@pytest.mark.parametrize("pause", [0, 1])
def test_options_of_a_group_whose_ranks_have_met(ranks, pause):
    ranks.run(options_after_all, pause)


def lost(rank, size, pause):
    victim = size - 1  # whose end the test hears of last
    if rank == victim:
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGKILL)
    work = [dist.irecv(torch.empty(1), victim), dist.irecv(torch.empty(1)), dist.isend(torch.ones(1 << 20), victim, tag=9)]
    began = time.monotonic()
    for each in work[:2]:
        with pytest.raises(sw.errors.PeerLost) as e:
            each.wait()
        assert e.value.rank == victim
    assert time.monotonic() - began < 50
    with pytest.raises(sw.errors.PeerLost):
        dist.send(torch.ones(1), victim)


@pytest.mark.parametrize("pause", [0, 1])
def test_f2_a_rank_is_killed(tmp_path, pause):
    world = World(3, on_backend, str(tmp_path / "store"))
    try:
        world.run(meet)
        with pytest.raises(AssertionError, match=r"^lost: rank 2 has ended$"):
            world.run(lost, pause)
    finally:
        world.close()


def meet(rank, size):
    dist.barrier()
