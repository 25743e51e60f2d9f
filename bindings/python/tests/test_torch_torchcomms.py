"""The backend of torchcomms: on that itself where it is installed, else on a stand-in for what a backend sees of it."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import sys
from datetime import timedelta

import pytest
from world import World

import switchyard as sw

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

comm = None


def front_end():
    """torchcomms, or its stand-in. The distribution of that name on PyPI raises an ImportError."""
    try:
        return importlib.import_module("torchcomms")
    except ImportError:
        stand_in = sys.modules["torchcomms"] = importlib.import_module("torchcomms_stand_in")
        return stand_in


def comms(rank, size, store):
    """Ranks with a communicator of torchcomms."""
    global comm
    torch.set_num_threads(1)
    place = dist.FileStore(store, size)
    comm = front_end().new_comm("switchyard", torch.device("cpu"), "main", timeout=timedelta(seconds=60), store=place)


@pytest.fixture(params=[2, 3], ids="{} ranks".format)
def ranks(worlds, request, record_property):
    found = "torchcomms_stand_in" not in front_end().__name__
    record_property("torchcomms", "installed" if found else "its stand-in")
    return worlds.get(request.param, comms)


def done(call, *arguments, turn):
    """A call that waits, or one whose work is waited for."""
    work = call(*arguments, turn % 2 == 1)
    if turn % 2 == 1:
        work.wait()
        assert work.is_completed()


DTYPES = [torch.float32, torch.int64, torch.bfloat16, torch.uint8]


def has_its_names(rank, size):
    assert (comm.get_rank(), comm.get_size(), comm.get_name(), comm.get_backend()) == (rank, size, "main", "switchyard")
    assert type(comm.get_backend_impl()).__module__ == "switchyard.torchcomms"


def every_call(rank, size, seed):
    """Calls of random shapes and types, each against what it should give."""
    ops, draw = front_end().ReduceOp, random.Random(seed)
    for turn in range(10):
        dtype, n = draw.choice(DTYPES), draw.choice([0, 1, 7, 300, 5000])
        lengths, root = [draw.choice([0, 1, 5, 400]) for _ in range(size)], draw.randrange(size)

        def of(src, *shape, dtype=dtype, turn=turn):
            return torch.arange(src + turn, src + turn + torch.Size(shape).numel()).remainder(5).view(shape).to(dtype)

        def total(*shape):
            return sum(of(src, *shape) for src in range(size))

        x = of(rank, n)
        done(comm.all_reduce, x, ops.SUM, turn=turn)
        assert torch.equal(x, total(n))
        x = of(rank, n)
        done(comm.all_reduce, x, ops.MAX, turn=turn)
        assert torch.equal(x, torch.stack([of(src, n) for src in range(size)]).amax(0))
        x = of(rank, n)
        done(comm.reduce, x, root, ops.SUM, turn=turn)
        assert torch.equal(x, total(n) if rank == root else of(rank, n))
        x = of(rank, n)
        done(comm.broadcast, x, root, turn=turn)
        assert torch.equal(x, of(root, n))

        outs = [torch.empty(n, dtype=dtype) for _ in range(size)]
        done(comm.all_gather, outs, of(rank, n), turn=turn)
        assert all(torch.equal(x, of(src, n)) for src, x in enumerate(outs))
        outs = [torch.empty(length, dtype=dtype) for length in lengths]
        done(comm.all_gather_v, outs, of(rank, lengths[rank]), turn=turn)
        assert all(torch.equal(x, of(src, lengths[src])) for src, x in enumerate(outs))
        y = torch.empty(size * n, dtype=dtype)
        done(comm.all_gather_single, y, of(rank, n), turn=turn)
        assert torch.equal(y, torch.cat([of(src, n) for src in range(size)]))

        y, parts = torch.empty(n, dtype=dtype), total(size, n)
        done(comm.reduce_scatter, y, [*of(rank, size, n)], ops.SUM, turn=turn)
        assert torch.equal(y, parts[rank])
        y = torch.empty(n, dtype=dtype)
        done(comm.reduce_scatter_single, y, of(rank, size * n), ops.SUM, turn=turn)
        assert torch.equal(y, parts[rank])
        y = torch.empty(lengths[rank], dtype=dtype)
        done(comm.reduce_scatter_v, y, [*of(rank, sum(lengths)).split(lengths)], ops.SUM, turn=turn)
        assert torch.equal(y, total(sum(lengths)).split(lengths)[rank])

        y = torch.empty(size * n, dtype=dtype)
        done(comm.all_to_all_single, y, of(rank, size * n), turn=turn)
        assert torch.equal(y, torch.cat([of(src, size, n)[rank] for src in range(size)]))
        sends = [[lengths[(src + dst) % size] for dst in range(size)] for src in range(size)]
        recv = [sends[src][rank] for src in range(size)]
        y = torch.empty(sum(recv), 3, dtype=dtype)
        done(comm.all_to_all_v_single, y, of(rank, sum(sends[rank]), 3), recv, sends[rank], turn=turn)
        want = [of(src, sum(sends[src]), 3).split(sends[src])[rank] for src in range(size)]
        assert torch.equal(y, torch.cat(want))
        outs = [torch.empty(k, 3, dtype=dtype) for k in recv]
        done(comm.all_to_all, outs, [*of(rank, sum(sends[rank]), 3).split(sends[rank])], turn=turn)
        assert all(map(torch.equal, outs, want))

        y = torch.empty(n, dtype=dtype)
        done(comm.scatter, y, [*of(root, size, n)] if rank == root else [], root, turn=turn)
        assert torch.equal(y, of(root, size, n)[rank])
        outs = [torch.empty(n, dtype=dtype) for _ in range(size if rank == root else 0)]
        done(comm.gather, outs, of(rank, n), root, turn=turn)
        assert all(torch.equal(x, of(src, n)) for src, x in enumerate(outs))
        y = torch.empty(size, n, dtype=dtype)
        done(comm.gather_single, y, of(rank, 1, n), root, turn=turn)
        assert rank != root or torch.equal(y, torch.cat([of(src, 1, n) for src in range(size)]))
        done(comm.barrier, turn=turn)

        # A ring in which all send first.
        y, work = torch.empty(n, dtype=dtype), comm.send(of(rank, n), (rank + 1) % size, True)
        comm.recv(y, (rank - 1) % size, False)
        work.wait()
        assert torch.equal(y, of((rank - 1) % size, n))


def operators(rank, size):
    ops = front_end().ReduceOp
    x = torch.tensor([0b1100 + rank, 0b1010])
    comm.all_reduce(x, ops.BAND, False)  # gloo's
    both = 0b1100
    for r in range(1, size):
        both &= 0b1100 + r
    assert x.tolist() == [both, 0b1010]
    x = torch.full((3,), float(rank))
    comm.all_reduce(x, ops.AVG, False)
    assert x.tolist() == [sum(range(size)) / size] * 3
    with pytest.raises(RuntimeError, match="the operator PREMUL_SUM: scale the tensor before a sum"):
        comm.all_reduce(x, ops.PREMUL_SUM(2.0), False)


def splits(rank, size):
    """Parts of several names and orders, parts without some ranks, and a communicator of its name again."""
    ops = front_end().ReduceOp
    for turn in range(3):
        mine = [r for r in range(size) if (r < 2) == (rank < 2)]
        mine = mine[::-1] if turn else mine
        part = comm.split(mine, "part")
        assert (part.get_rank(), part.get_size()) == (mine.index(rank), len(mine))
        x = torch.tensor([2.0**rank])
        part.all_reduce(x, ops.SUM, False)
        assert x.item() == sum(2.0**r for r in mine)
        half = part.split([part.get_rank()], "half")
        half.barrier(False)
        half.finalize()
        part.finalize()
        alone = comm.split([0] if rank == 0 else [], "alone")
        assert (alone is None) is (rank != 0)
    with pytest.raises(RuntimeError, match=rf"ranks is \[0, 0\], want different ones from 0 to {size - 1}"):
        comm.split([0, 0], "twice")
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"ranks is \[1\], want 0 among them, which makes this call"):
            comm.split([1], "others")


def lengths_that_disagree(rank, size):
    ops = front_end().ReduceOp
    with pytest.raises(RuntimeError, match=rf"output 9: want one for each of {size} ranks, and that of rank {rank} as large"):
        comm.reduce_scatter_v(torch.empty(9), [torch.ones(2)] * size, ops.SUM, False)
    x = torch.ones(2)
    comm.all_reduce(x, ops.SUM, False)
    assert x.tolist() == [size] * 2


def without_a_store(rank, size):
    """Communicators that meet by the launcher's variables: two at a time, and one of the same name after them."""
    tc = front_end()
    os.environ["MASTER_PORT"] = os.environ["SWITCHYARD_PORT"]
    for _ in range(2):
        two = [tc.new_comm("switchyard", torch.device("cpu"), name, timeout=timedelta(seconds=60)) for name in ("a", "b")]
        for one in two:
            x = torch.ones(3)
            one.all_reduce(x, tc.ReduceOp.SUM, False)
            assert x.tolist() == [size] * 3
        for one in two:
            one.barrier(False)
            one.finalize()
            with pytest.raises(RuntimeError, match="is not initialized, or finalized"):
                one.barrier(False)


def by_our_own_calls(rank, size):
    mine = sw.communicator(comm.get_backend_impl().process_group)
    x = torch.full((2,), float(rank))
    sw.all_reduce(x, group=mine)
    assert x.tolist() == [sum(range(size))] * 2


def test_it_is_found_by_its_name(ranks):
    ranks.run(has_its_names)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_call_gives_what_it_should(ranks, seed):
    ranks.run(every_call, seed)


def test_operators(ranks):
    ranks.run(operators)


def test_communicators_are_split(ranks):
    ranks.run(splits)


def test_lengths_that_disagree_are_refused(ranks):
    ranks.run(lengths_that_disagree)


def test_ranks_meet_by_the_variables_of_a_launcher(ranks):
    ranks.run(without_a_store)


def test_the_group_has_our_own_calls_too(ranks):
    ranks.run(by_our_own_calls)


def one_dies(rank, size):
    victim = size - 1  # whose end the test hears of last
    with contextlib.suppress(sw.errors.PeerLost):  # the victim's death may overtake others here
        comm.barrier(False)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    for call in (lambda: comm.all_reduce(torch.ones(4), front_end().ReduceOp.SUM, False), lambda: comm.barrier(False)):
        with pytest.raises(sw.errors.PeerLost) as e:
            call()
        assert e.value.rank == victim


def test_f2_a_rank_that_dies_is_named(tmp_path):
    world = World(3, comms, str(tmp_path / "store"))
    try:
        with pytest.raises(AssertionError, match=r"^one_dies: rank 2 has ended$"):
            world.run(one_dies)
    finally:
        world.close()


def test_ranks_without_a_launcher_are_told_what_is_missing():
    front_end()
    from switchyard import torchcomms as ours

    names = {name: os.environ.pop(name) for pair in ours._VARIABLES for name in pair if name in os.environ}
    try:
        with pytest.raises(ValueError, match="want TORCHCOMM_RANK with TORCHCOMM_SIZE, OMPI"):
            ours._ranks()
    finally:
        os.environ.update(names)
