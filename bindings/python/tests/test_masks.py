"""Dispatchers whose calls go on without ranks."""

from __future__ import annotations

import os
import signal

from test_process import end, ranks, start
from world import free_port

HEAD = """
    import os, signal, sys, threading, time
    import numpy as np
    import switchyard as sw

    fresh = "REPLACES" in os.environ
    comm = sw.init(timeout=60, replaceable=True, replaces=fresh, addr=os.environ.get("REPLACES"))
    d = sw.Dispatcher(
        4, 2, 8, max_tokens=16, placement=[[e, (e + 1) % 4] for e in range(4)], masks=True, sources=True, device="cpu"
    )
    idx = np.array([[t % 4, (t + 1 + t // 4) % 4] for t in range(12)])
    x = np.arange(1, 13, dtype="f4")[:, None] * np.ones(8, "f4") + 100 * comm.rank

    def step():
        got = d.dispatch(x, idx)
        y = d.combine(got.rows, got, weighted=False, release=True)
        return got.rank_counts, y

    if not fresh:
        assert d.masked() == []
        counts, y = step()
        assert (y == 2 * x).all() and all(counts), (counts, y)
"""

KILLED = """
    for n in range(100):
        if n == 50 and comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        counts, y = step()
    assert d.masked() == [2]
    assert (y == 2 * x).all() and counts[2] == 0 and all(counts[:2]), (counts, y)
    smaller = sw.shrink()
    assert smaller.size == 3, smaller
    comm.close()
    sw.barrier()
    print("went on")
"""

RETURNS = """
    if comm.rank == 2:
        d.mask(2)
        try:
            step()
            raise SystemExit("it is not masked")
        except sw.errors.Masked as err:
            assert err.rank == 2 and d.masked() == [2], err
        made = d.unmask(timeout=50)
        assert made % 2 == 0 and d.masked() == [], made
    else:
        step()
        while d.masked():
            step()
            time.sleep(0.001)
    for _ in range(3):
        counts, y = step()
        assert (y == 2 * x).all() and all(counts), (counts, y)
    d.close()
    print("went on")
"""

REPLACED = """
    if fresh:
        assert d.unmask(timeout=50) % 2 == 0
    elif comm.rank == 2:
        print("goes", flush=True)
        while True:
            step()
    else:
        while not d.masked():
            step()
        for _ in range(3):
            counts, y = step()
            assert (y == 2 * x).all() and counts[2] == 0, (counts, y)
        if comm.rank == 1:
            coming = threading.Thread(target=sw.replace, args=(2, sys.stdin.readline().strip()))
            coming.start()
        while d.masked():
            step()
            time.sleep(0.001)
    for _ in range(3):
        counts, y = step()
        assert (y == 2 * x).all() and all(counts), (counts, y)
    if not fresh and comm.rank == 1:
        coming.join()
    d.close()
    sw.barrier()
    print("went on")
"""

REFUSED = """
    for wrong, kind in ((4, ValueError), ("1", TypeError)):
        try:
            d.mask(wrong)
            raise SystemExit(f"{wrong} was masked")
        except kind as err:
            assert str(wrong) in str(err), err
    plain = sw.Dispatcher(4, 2, 8, device="cpu")
    for call in (lambda: plain.mask(1), plain.masked, plain.unmask):
        try:
            call()
            raise SystemExit("a dispatcher without masks has them")
        except ValueError as err:
            assert "masks" in str(err), err
    print("went on")
"""


def test_a_rank_that_is_killed():
    processes = ranks(HEAD + KILLED, 4)
    for rank in (0, 1, 3):
        assert "went on" in end(processes[rank])
    assert processes[2].wait(20) == -signal.SIGKILL


def test_a_rank_that_is_masked_and_comes_back():
    for process in ranks(HEAD + RETURNS, 4):
        assert "went on" in end(process)


def test_a_fresh_process_replaces_a_rank_that_was_killed():
    port = free_port()
    processes = ranks(HEAD + REPLACED, 4)
    assert processes[2].stdout.readline() == "goes\n"
    processes[2].kill()
    os.environ["REPLACES"] = f"127.0.0.1:{port}"
    try:
        fresh = start(HEAD + REPLACED, 2, 4, port)
    finally:
        del os.environ["REPLACES"]
    processes[1].stdin.write(f"127.0.0.1:{port}\n")
    processes[1].stdin.flush()
    for process in (processes[0], processes[1], processes[3], fresh):
        assert "went on" in end(process)


def test_what_masks_refuse():
    for process in ranks(HEAD + REFUSED, 4):
        assert "went on" in end(process)
