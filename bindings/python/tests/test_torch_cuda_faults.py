"""Ranks that are lost, late, gone, or end, with work on GPUs."""

from __future__ import annotations

import signal

import pytest
from cuda_rig import START, end, run

torch = pytest.importorskip("torch")


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
