"""python -m switchyard bench: times two calls among the ranks that a launcher has started, with nothing but this package."""

from __future__ import annotations

import re
import time
from array import array
from statistics import median
from typing import TYPE_CHECKING

from . import all_reduce, all_to_all_single, barrier, errors, init

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._core.comm import Communicator

SIZES = ["8K", "1M"]
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _bytes(text: str) -> int:
    m = re.fullmatch(r"(\d+)([KMG]?)", text)
    n = int(m[1]) * _UNITS[m[2]] if m else 0
    if n == 0:
        raise errors.InvalidArgument(f"switchyard: bench: {text!r} is no size such as 8K or 1M")
    return n


def _time(comm: Communicator, n: int, call: Callable[[], object]) -> float:
    """The median of the calls' times in seconds; the time of a call is the slowest rank's, from a barrier to its end."""
    times = array("d")
    for i in range(110 if n <= 1 << 20 else 22):
        barrier(group=comm)
        began = time.perf_counter()
        call()
        if i >= 10:  # the first ones are not counted
            times.append(time.perf_counter() - began)
    all_reduce(times, "max", group=comm)
    return median(times)


def _row(comm: Communicator, what: str, wanted: int) -> str:
    """One operation with at least that number of bytes a rank, its result checked."""
    size, rank = comm.size, comm.rank
    if what == "all_to_all_single":
        n = -(-wanted // size) * size
        x, y = array("B", [rank % 251]) * n, array("B", [255]) * n
        seconds = _time(comm, n, lambda: all_to_all_single(y, x, group=comm))
        right = y == array("B", [peer % 251 for peer in range(size) for _ in range(n // size)])
        crossed = n * (size - 1) / size
    else:
        n = -(-wanted // 4) * 4
        z = array("f", [rank]) * (n // 4)
        seconds = _time(comm, n, lambda: all_reduce(z, "max", group=comm))
        right = z == array("f", [size - 1]) * (n // 4)
        crossed = 2 * n * (size - 1) / size
    if not right:
        raise errors.Error(f"switchyard: bench: {what} of {n} bytes: rank {rank} has wrong bytes")
    return f"{what:<18} {n:>12} {1e6 * seconds:>12.1f} {crossed / seconds / 1e9:>8.2f}"


def bench(sizes: list[str]) -> int:
    """Print a row for each call and size, on rank 0."""
    wanted = [_bytes(text) for text in sizes or SIZES]
    with init(default=False) as comm:
        if comm.rank == 0:
            print(f"{comm.size} ranks, each a process, memory of the host; every received byte is checked")
            print(f"{'call':<18} {'bytes a rank':>12} {'median us':>12} {'GB/s':>8}", flush=True)
        for what in ("all_to_all_single", "all_reduce"):
            for n in wanted:
                row = _row(comm, what, n)
                if comm.rank == 0:
                    print(row, flush=True)
    return 0
