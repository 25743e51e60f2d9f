"""Groups that processes come into while they run."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from test_process import end, ranks
from test_shrink import HEAD
from world import free_port

import switchyard as sw


def come(code: str, **env: str) -> subprocess.Popen:
    """A process that no launcher has started."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}, **env},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


ADMITS = """
    try:
        sw.admit("@nobody" + ADDR, timeout=0.2)
        raise SystemExit("nobody came, and was admitted")
    except sw.errors.TimedOut as err:
        assert err.rank == 2, err
    check(comm)
    larger = sw.admit(ADDR, 2, timeout=60)
    assert sw.communicator() is larger and (larger.rank, larger.size) == (comm.rank, 4), larger
    check(larger)
    check(comm, group=comm)
    comm.close()
    d = sw.Dispatcher(4, 1, 4)
    assert d.dispatch(np.ones((4, 4), "f4"), [[0], [1], [2], [3]], np.ones((4, 1))).rank_counts == [1] * 4
    larger.close()
    print("went on")
"""

NEWCOMER = """
    import os
    os.environ.update(RANK="0", WORLD_SIZE="1")
""" + HEAD.replace("sw.init(", "sw.init(addr=ADDR, late=True, join_timeout=60, ") + """
    assert comm.size == 4 and comm.rank >= 2
    d = sw.Dispatcher(4, 1, 4)
    assert d.dispatch(np.ones((4, 4), "f4"), [[0], [1], [2], [3]], np.ones((4, 1))).rank_counts == [1] * 4
    comm.close()
    print("came")
"""


def test_newcomers_are_admitted():
    addr = f"127.0.0.1:{free_port()}"
    old = ranks((HEAD + ADMITS).replace("ADDR", repr(addr)), 2)
    new = [come(NEWCOMER.replace("ADDR", repr(addr))) for _ in range(2)]
    for process in old:
        assert "went on" in end(process)
    for process in new:
        assert "came" in end(process)


def test_what_is_refused():
    comm = sw.init(0, 1, default=False)
    for call, kind, word in (
        (lambda: comm.admit("nowhere", 1), ValueError, "nowhere"),
        (lambda: comm.admit("@x", 0), ValueError, "n"),
        (lambda: comm.replace(1, "@x"), ValueError, "rank 0 of 1"),
        (lambda: sw.init(late=True), ValueError, "late"),
        (lambda: sw.init(0, 2, "@x", late=True), ValueError, "late"),
        (lambda: sw.init(0, 1, replaces=True), ValueError, "Replaces"),
    ):
        with pytest.raises(kind, match=word):
            call()
    comm.close()
