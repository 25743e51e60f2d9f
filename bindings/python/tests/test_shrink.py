"""Ranks that go on after one was lost."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import time

import numpy as np
import pytest
from conftest import needs_gpu
from test_process import end, ranks

import switchyard as sw
from switchyard import errors

# What ranks do until one of them is gone, and what the others do then. check makes calls of each kind.
HEAD = """
    import sys, time
    import numpy as np
    import switchyard as sw

    def check(comm, **group):
        y = np.empty(comm.size)
        sw.all_to_all_single(y, np.full(comm.size, comm.rank + 1.0), **group)
        assert y.tolist() == [r + 1.0 for r in range(comm.size)]
        x = np.full(100_000, comm.rank + 1.0)
        sw.all_reduce(x, **group)
        assert (x == sum(range(1, comm.size + 1))).all()
        sw.barrier(**group)

    comm = sw.init(timeout=60)
    check(comm)
"""

GO_ON = """
    if comm.rank != 1:
        try:
            while True:
                check(comm)
        except sw.errors.PeerLost as err:
            assert err.rank == 1, err
        smaller = sw.shrink()
        assert sw.communicator() is smaller
        assert (smaller.rank, smaller.size) == (comm.rank // 2, 2), smaller
        comm.close()
        check(smaller)
        half = smaller.split(0)
        check(half, group=half)
        y = sw.empty(2, 3, dtype="f8")
        sw.all_to_all_single(y, np.full((2, 3), float(smaller.rank)))
        assert y[:, 0].tolist() == [0, 1]
        d = sw.Dispatcher(2, 1, 4)
        got = d.dispatch(np.ones((3, 4), "f4"), [[0], [1], [1]], np.ones((3, 1)))
        assert d.combine(got.rows, got).tolist() == [[1.0] * 4] * 3
        try:
            comm.shrink()
        except sw.errors.Closed:
            print("went on")
"""


def met(code: str) -> list[subprocess.Popen]:
    """Three ranks that are past HEAD: the end of one could overtake others there."""
    processes = ranks(HEAD + '    print("met", flush=True)\n' + code, 3)
    for process in processes:
        assert process.stdout.readline() == "met\n"
    return processes


def sent_off(code: str) -> list[subprocess.Popen]:
    """The same, each with a line to read once all are past HEAD."""
    processes = met(code)
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    return processes


def test_survivors_of_a_killed_rank_go_on():
    processes = met("    if comm.rank == 1:\n        sys.stdin.read()\n" + GO_ON)
    time.sleep(0.3)
    processes[1].send_signal(signal.SIGKILL)
    for process in processes[::2]:
        assert end(process) == "went on\n"
    processes[1].communicate()


def test_survivors_of_a_rank_that_left_go_on():
    processes = met("    if comm.rank == 1:\n        sys.stdin.read()\n" + GO_ON)
    assert end(processes[1]) == ""
    for process in processes[::2]:
        assert end(process) == "went on\n"


def test_a_rank_that_is_left_out_learns_it():
    code = """
    sys.stdin.readline()
    if comm.rank == 1:
        time.sleep(1)
        try:
            sw.barrier()
        except sw.errors.Aborted as err:
            assert "goes on without ranks [1]" in str(err), err
        try:
            sw.shrink()
        except sw.errors.PeerLost as err:
            assert err.rank == 1, err
            print("left out")
    else:
        smaller = comm.shrink([1] if comm.rank else (), timeout=60)
        check(smaller, group=smaller)
        print("went on")
    """
    processes = sent_off(code)
    for process, want in zip(processes, ("went on\n", "left out\n", "went on\n")):
        assert end(process) == want


def test_the_rank_that_is_left_out_is_to_blame_and_not_the_one_that_leaves_it_out():
    code = """
    sys.stdin.readline()
    if comm.rank == 1:
        smaller = comm.shrink([2], timeout=60)
    else:
        if comm.rank == 2:
            sys.stdin.readline()  # it hangs
        try:
            sw.barrier()
        except sw.errors.Aborted as err:
            assert err.rank == 2, err
            assert "rank 1 goes on without ranks [2]" in str(err), err
        if comm.rank == 0:
            smaller = comm.shrink(timeout=60)
    if comm.rank != 2:
        check(smaller, group=smaller)
    print("as it should be")
    """
    processes = sent_off(code)
    for process in processes:
        assert end(process) == "as it should be\n"


def test_a_rank_that_does_not_shrink_is_named():
    code = HEAD + """
    if comm.rank == 0:
        try:
            sw.shrink(timeout=0.5)
        except sw.errors.TimedOut as err:
            assert err.rank == 1, err
            assert "leave_out=[1]" in str(err), err
    sw.barrier()  # nobody is lost
    check(sw.shrink())  # and a call that was not answered can be repeated
    """
    for process in ranks(code, 2):
        end(process)


def test_wrong_arguments_of_shrink_are_named():
    with sw.init(0, 1, default=False) as comm:
        for kind, text, arguments in (
            (TypeError, "leave_out is 1, want a list", (1,)),
            (TypeError, "leave_out is 'a', want an integer", (["a"],)),
            (ValueError, "leave_out has rank 0, want other ranks of 1", ([0],)),
            (ValueError, "timeout is -1, want a positive", ((), -1)),
        ):
            with pytest.raises(kind, match=text):
                comm.shrink(*arguments)
        with comm.shrink() as again:
            x = np.ones(3)
            sw.all_reduce(x, group=again)
            assert (x == 1).all()
        with pytest.raises(errors.Closed):
            comm.shrink()


TORCH = """
    import os, sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    import switchyard as sw

    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    x = torch.ones(8, device=DEVICE)
    sw.all_reduce(x)
    assert (x == 3).all()
    print("met", flush=True)
    if rank == 1:
        sys.stdin.read()  # its end could overtake others in their call
        os.kill(os.getpid(), 9)
    try:
        while True:
            sw.all_reduce(x)
    except sw.errors.PeerLost as err:
        assert err.rank == 1, err
    group = sw.shrink(dist.group.WORLD)
    y = torch.empty(2, device=DEVICE)
    sw.all_to_all_single(y, torch.full((2,), float(rank), device=DEVICE), group=group)
    assert y.tolist() == [0, 2], y
    work = sw.all_reduce(y, group=group, async_op=True)
    work.wait()
    assert y.tolist() == [0, 4]
    print("went on", flush=True)
    os._exit(0)  # gloo and its store are of three ranks
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("backend", ["gloo", "switchyard"])
def test_survivors_of_a_process_group_go_on(backend, device, monkeypatch):
    from world import free_port

    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    processes = ranks(TORCH.replace("BACKEND", repr(backend)).replace("DEVICE", repr(device)), 3)
    for process in processes:  # gloo talks too
        assert any(line.endswith("met\n") for line in iter(process.stdout.readline, ""))
    processes[1].communicate()
    for process in processes[::2]:
        assert end(process).endswith("went on\n")
