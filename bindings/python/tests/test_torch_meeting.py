"""How groups meet at their first use: nobody waits who need not, and whoever failed can try again."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from datetime import timedelta

import pytest
import world

import switchyard as sw
from switchyard import errors

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402


def crossed(rank, size):
    # Both ranks use two groups for the first time, each in its own order, and wait at the end.
    a, b = dist.new_group(), dist.new_group()
    began, works = time.monotonic(), []
    x = {g: torch.full((3,), rank + 1.0) for g in (a, b)}
    for g in (a, b) if rank == 0 else (b, a):
        works.append(sw.all_reduce(x[g], group=g, async_op=True))
        works.append(sw.all_reduce(x[g], group=g, async_op=True))  # comes behind the first
    took = time.monotonic() - began
    for work in works:
        assert work.wait(timedelta(seconds=30))
        assert work.is_success()
        assert isinstance(work, sw.Work)
    assert took < 20, took
    for t in x.values():
        assert t.tolist() == [float(size * sum(range(1, size + 1)))] * 3
    # The same without a word of waiting in between, with outputs that have to be copied to where they belong.
    c, d = dist.new_group(), dist.new_group()
    out = {g: torch.zeros(2, size).t() for g in (c, d)}
    pending = [
        (g, sw.all_to_all_single(out[g], torch.full((size, 2), float(rank)), group=g, async_op=True))
        for g in ((c, d) if rank == 0 else (d, c))
    ]
    for g, work in pending:
        work.wait()
        assert out[g].tolist() == [[float(p)] * 2 for p in range(size)]
    assert sw.all_reduce(torch.ones(1), group=a) is None


def test_two_groups_in_different_orders(gloo):
    gloo.run(crossed)


def threads(rank, size):
    # The same by threads, whose calls are not asynchronous: one waits for one group, the other for the other.
    groups = [dist.new_group(), dist.new_group()]
    done = []

    def use(k: int) -> None:
        time.sleep(0.3 * ((k + rank) % 2))
        x = torch.ones(2)
        sw.all_reduce(x, group=groups[k])
        sw.barrier(group=groups[k])
        done.append(x.tolist() == [size, size])

    own = [threading.Thread(target=use, args=(k,)) for k in range(2)]
    for t in own:
        t.start()
    for t in own:
        t.join(30)
    assert done == [True, True]
    # And a group whose peers come late holds up nobody in another.
    late, quick = dist.new_group(), dist.new_group()
    if rank == 0:
        waiting = threading.Thread(target=lambda: sw.barrier(group=late))
        waiting.start()
        time.sleep(0.2)
    began = time.monotonic()
    sw.barrier(group=quick)
    assert time.monotonic() - began < 30
    dist.barrier()
    if rank == 0:
        waiting.join(0.05)
        assert waiting.is_alive()
        dist.barrier()
        waiting.join(30)
    else:
        dist.barrier()
        sw.barrier(group=late)


def test_two_groups_in_two_threads(gloo):
    gloo.run(threads)


def backend_crossed(rank, size):
    a, b = dist.new_group(backend="switchyard"), dist.new_group(backend="switchyard")
    x = {g: torch.full((3,), rank + 1.0) for g in (a, b)}
    works = [dist.all_reduce(x[g], group=g, async_op=True) for g in ((a, b) if rank == 0 else (b, a))]
    for work in works:
        work.wait()
    for t in x.values():
        assert t.tolist() == [float(sum(range(1, size + 1)))] * 3
    for g in (a, b):
        assert sw.communicator(g).size == size
        dist.destroy_process_group(g)


def test_two_groups_of_the_backend(backend):
    backend.run(backend_crossed)


def again(rank, size):
    # Rank 0 has tried twice in vain, the others once, or not at all; then all come.
    store = dist.distributed_c10d._get_default_store()
    options = {"TimeoutSeconds": 20.0, "JoinSeconds": 0.4}
    from switchyard._core.joining import join
    from switchyard._torch.groups import _Store

    inside = _Store(dist.PrefixStore("again", store))
    for who in (0, 0, 1, 0):
        if rank == who:
            with pytest.raises(errors.TimedOut, match="have not come"):
                join(rank, size, inside, options, "again")
        dist.barrier()
    options["JoinSeconds"] = 60.0
    if rank == 1:
        time.sleep(0.7)
    comm = join(rank, size, inside, options, "again")
    x = torch.ones(2)
    sw.all_reduce(x, group=comm)
    assert x.tolist() == [size, size]
    comm.close()
    # And once more in the same store, where the cards of the first time lie.
    with join(rank, size, inside, options, "again") as comm:
        sw.barrier(group=comm)
    # A rank that cannot listen says so to all, once.
    if rank == 0:
        os.environ["SWITCHYARD_DEBUG"] = "loud"
        with pytest.raises(errors.Error, match="SWITCHYARD_DEBUG"):
            join(rank, size, inside, options, "again")
        del os.environ["SWITCHYARD_DEBUG"]
    else:
        with pytest.raises(errors.Mismatch, match="rank 0 cannot join"):
            join(rank, size, inside, options, "again")
    dist.barrier()
    with join(rank, size, inside, options, "again") as comm:
        sw.barrier(group=comm)


def test_ranks_that_failed_to_meet_do_so_later(gloo):
    gloo.run(again)


def failed(rank, size):
    # Nobody else comes: an asynchronous call gets the error at its wait, and the group can be used afterwards.
    g = dist.new_group(timeout=timedelta(seconds=4))
    x = torch.ones(1)
    if rank == 0:
        work = sw.all_reduce(x, group=g, async_op=True)
        assert not work.is_completed()
        with pytest.raises(errors.TimedOut, match=r"(Timed out|closed|timeout)"):
            work.wait()
        assert isinstance(work.exception(), errors.TimedOut)
        with pytest.raises(errors.TimedOut):
            sw.barrier(group=g)
    dist.barrier()
    sw.all_reduce(x, group=g)
    assert x.item() == size


def test_an_asynchronous_call_that_nobody_answers(gloo):
    gloo.run(failed)


def alone(rank, size):
    # torch's tests look for these words in what a barrier raises that a rank does not join.
    g = dist.new_group(timeout=timedelta(seconds=4))
    sw.barrier(group=g)
    if rank == 0:
        with pytest.raises(errors.TimedOut, match=r"(Timed out|closed|timeout)") as caught:
            sw.barrier(group=g)
        assert caught.value.rank != 0
    dist.barrier()
    dist.barrier()


def test_the_words_of_a_timeout(gloo):
    gloo.run(alone)


def apart(rank, size):
    # Ranks that say they are on several hosts: everything goes to gloo, also what is asked for before that is known.
    import switchyard._core.joining as joining

    own = joining.place
    joining.place = lambda: f"host/{rank % 2}"  # two users
    try:
        g = dist.new_group()
        x, y = torch.full((2,), rank + 1.0), torch.empty(size, 2)
        works = [sw.all_reduce(x, group=g, async_op=True)]
        works.append(sw.all_gather_into_tensor(y, torch.full((1, 2), float(rank)), group=g, async_op=True))
        for work in works:
            work.wait()
        assert x.tolist() == [float(sum(range(1, size + 1)))] * 2
        assert y[:, 0].tolist() == list(range(size))
        sw.all_reduce(x, group=g)
        work = sw.all_reduce(x, group=g, async_op=True)
        work.wait()
        assert x.tolist() == [float(size * size * sum(range(1, size + 1)))] * 2
        sw.barrier(group=g)
        with pytest.raises(errors.Unsupported, match="no symmetric memory"):
            sw.communicator(g)
    finally:
        joining.place = own


def test_ranks_that_do_not_reach_each_other(gloo):
    gloo.run(apart)


def test_a_card_that_is_forgotten_while_it_is_read():
    from switchyard._torch.groups import _Store

    store = dist.HashStore()
    other = _Store(store)

    class Between:
        """A store of a rank that another one overtakes between a check and what follows."""

        def check(self, keys):
            found = store.check(keys)
            other.forget(keys[0])
            return found

        def get(self, key):
            assert store.check([key]), "the get waits for a key that nobody sets any more"
            return store.get(key)

    other.put("card", b"1")
    reader = _Store(Between())
    assert reader.get("card") is None
    assert reader.get("card") is None
    assert other.get("no card") is None
    other.put("card", b"2")
    assert other.get("card") == b"2"


def unequal(rank, size):
    """Hosts with different numbers of ranks have no symmetric memory: torch does the calls, and one rank says why."""
    os.environ["SWITCHYARD_HOSTID"] = f"host {min(rank, 1)}"
    try:
        g = dist.new_group()
        x = torch.full((2,), rank + 1.0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            sw.all_reduce(x, group=g)
        assert x.tolist() == [float(sum(range(1, size + 1)))] * 2
        words = [str(w.message) for w in said if "several hosts" in str(w.message)]
        assert len(words) == (rank == 0), said
    finally:
        del os.environ["SWITCHYARD_HOSTID"]


def test_hosts_with_different_numbers_of_ranks(worlds):
    worlds.get(4, world.gloo).run(unequal)


LEAVES = """
    import sys, time
    import torch, torch.distributed as dist
    import switchyard as sw
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        work = sw.all_reduce(torch.ones(1), async_op=True)
        time.sleep(float(sys.argv[1]))
        assert not work.is_completed()
    print("end", flush=True)
"""


@pytest.mark.parametrize("pause", [0, 0.02, 0.3])
def test_a_process_that_ends_while_its_ranks_meet(tmp_path, pause):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(LEAVES))
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(world.free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(pause)],
            env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [p.communicate(timeout=600)[0] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], "\n".join(said)
    assert all("end" in text for text in said)


def validated(rank, size):
    g = dist.new_group(timeout=timedelta(seconds=60))
    comm = sw.communicator(g, validate=True)
    assert comm.validate
    with pytest.raises(errors.InvalidArgument, match="in use"):
        sw.communicator(g, validate=True)
    # Rank 0 sends rank 1 one element too many: every rank hears of it, and nothing has moved.
    send, recv = [2] * size, [2] * size
    if rank == 0:
        send[1] += 1
    y = torch.full((2 * size,), -1.0)
    with pytest.raises((errors.Mismatch, errors.InvalidArgument)):
        sw.all_to_all_single(y, torch.zeros(sum(send)), recv, send, group=g)
    assert y.tolist() == [-1.0] * 2 * size
    # Rank 1 refuses a call before the library sees it. The others hear of that at once.
    began = time.monotonic()
    x, z = torch.zeros(2 * size), torch.zeros(2 * size * size)
    for run in (
        lambda bad: sw.all_to_all_single(y, x, [2 + bad] * size, [2] * size, group=g),
        lambda bad: sw.all_to_all_single(y, x, [2 + bad] * size, [2] * size, g, True).wait(),
        lambda bad: sw.all_to_all_single(y.double() if bad else y, x, group=g),
        lambda bad: sw.all_gather_into_tensor(z[bad:], x, g),
        lambda bad: sw.reduce_scatter_tensor(y[: 2 + bad], x, group=g),
    ):
        with pytest.raises(errors.InvalidArgument, match=None if rank == 1 else "rank 1 refused"):
            run(int(rank == 1))
    # So do those of a group that has not met.
    late = dist.new_group(timeout=timedelta(seconds=60))
    sw._sides.configure(late, Validate=True)
    with pytest.raises(errors.InvalidArgument, match=None if rank == 1 else "rank 1 refused"):
        sw.all_to_all_single(y, x, [2 + (rank == 1)] * size, [2] * size, late, True).wait()
    assert time.monotonic() - began < 50
    sw.all_to_all_single(y, torch.full((2 * size,), float(rank)), group=g)
    assert y[::2].tolist() == list(range(size))
    with pytest.raises(errors.InvalidArgument, match="CUDA"):
        sw.communicator(g, max_sms=3)
    with pytest.raises(errors.InvalidArgument, match="max_sms is 0"):
        sw.communicator(g, device="cuda", max_sms=0)


def test_ranks_that_compare_their_calls(worlds):
    worlds.get(2, world.gloo).run(validated)
