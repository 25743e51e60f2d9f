"""Ranks of switchyard.triton on a processor: `TRITON_INTERPRET=1 python triton_ranks.py EXAMPLE`.

Each is a process that interprets the kernels. They share one piece of memory, in which they find segments, records and all
words as on GPUs. The three instructions of a GPU have others here in their place.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from layer_products import interpretable
from triton_compiles import example

import switchyard.triton as st

SIZE, SIGNALS, COUNT = 3, 8, 300
#: Where things lie in a rank's segment, and how many bytes the rank has.
CONTROL, ABORT, RECORD, WORLD, OUT, MINE, LINES = 256, 384, 512, 640, 4096, 12288, 16384
STRIDE = 1 << 15
LATE, ABORTED, OTHER_VERSION = 1, 2, 100


@triton.jit
def of_version_9(world, seen):
    tl.store(seen, st.begin(world, 9).number)


@triton.jit
def told(world, seen):
    """Tells each rank and waits for it. peer is a constant."""
    call = st.begin(world)
    tl.store(seen + 1, call.rank + 10 * call.size + 100 * call.signals)
    for peer in tl.static_range(3):
        st.signal(call, peer, 5)
    for peer in tl.static_range(3):
        call = st.wait(call, peer, 5)
    tl.store(seen, call.number)


@triton.jit
def waits(world, seen, peer):
    call = st.begin(world)
    tl.store(seen, call.number)
    call = st.wait(call, peer, 1)
    st.signal(call, peer, 1)
    st.put(call, peer, seen + 2, -1)
    tl.store(seen + 1, call.number)


class Rank:
    """A rank's memory. It finds the segments of others by a table, as they lie backwards then, or by arithmetic."""

    def __init__(self, memory: mmap.mmap, rank: int, table: bool, timeout: float) -> None:
        self.words, self.rank = np.frombuffer(memory, np.int64), rank
        heap = self.words.ctypes.data
        self.segments = [heap + (SIZE - 1 - r if table else r) * STRIDE for r in range(SIZE)]
        self.own = self.segments[rank]
        base, stride, found = heap, STRIDE, 0
        if table:
            base, stride, found = self.own - rank * 64, 64, heap + SIZE * STRIDE + rank * 128
            self.array(found, SIZE)[:] = self.segments
        self.world = self.own + WORLD
        self.array(self.world, 4, np.int32)[:] = [1, SIGNALS, rank, SIZE]
        addresses = [base, stride, found, CONTROL, LINES, ABORT, self.own + RECORD, int(timeout * 1e9)]
        self.array(self.world + 16, 8)[:] = addresses
        self.calls, self.readers_and_fault = self.array(self.own + CONTROL, 1), self.array(self.own + CONTROL + 8, 2, np.int32)
        self.record, self.abort = self.array(self.own + RECORD, 12), self.array(self.own + ABORT, 1)
        self.seen = self.array(self.own + MINE, 3)

    def array(self, at: int, n: int, kind: Any = np.int64) -> np.ndarray:
        """The memory at an address."""
        first = (at - self.words.ctypes.data) // kind().itemsize
        return self.words.view(kind)[first : first + n]

    def line(self, of: int, by: int, index: int) -> np.ndarray:
        """A rank's word for a signal by another one."""
        return self.array(self.segments[of] + LINES + (by * SIGNALS + index) * 32, 1)

    def clear(self) -> None:
        self.readers_and_fault[1], self.abort[0], self.record[:] = 0, 0, 0

    def fault(self) -> tuple[int, ...]:
        """Kind, peer, call, and the versions of the kernel and the library."""
        kind, peer = self.record.view(np.int32)[:2].tolist()
        assert self.readers_and_fault.tolist() == [0, kind]
        return (kind, peer, *self.record[1:4].tolist())


def gathers(me: Rank, meet: Callable[[], None]) -> None:
    """Launches of one program and of many, of ranks that come when they like."""
    kernel = example()
    out, x = torch.from_numpy(me.array(me.own + OUT, SIZE * COUNT)), torch.zeros(COUNT, dtype=torch.int64)
    calls = 0
    for programs, count in [(1, COUNT), (3, 1), (2, 77), (4, COUNT)] * 2:
        calls += 1
        x[:] = torch.arange(COUNT) * 1000 + calls * 10 + me.rank
        kernel[(programs,)](me.world, out, x, count, BLOCK=64)
        assert (me.calls[0], me.readers_and_fault.tolist()) == (calls, [0, 0])
        for r in range(SIZE):
            got, want = out[r * count : (r + 1) * count], torch.arange(count) * 1000 + calls * 10 + r
            assert torch.equal(got, want), (calls, r, got)
    told[(1,)](me.world, torch.from_numpy(me.seen))
    assert me.seen.tolist() == [calls + 1, me.rank + 10 * SIZE + 100 * SIGNALS, 0]


def faults(me: Rank, meet: Callable[[], None]) -> None:
    """Rank 0 waits for rank 2, which does not come."""
    seen = torch.from_numpy(me.seen)

    def wait() -> list[int]:
        waits[(1,)](me.world, seen, 2)
        return me.seen.tolist()[:2]

    if me.rank == 0:
        me.line(2, 0, 1)[0] = -7
        assert wait() == [1, 0]
        assert me.fault() == (LATE, 2, 1, 0, 1)
        assert wait() == [0, 0], "a launch after a fault does something"
        assert (me.fault(), me.calls[0]) == ((LATE, 2, 1, 0, 1), 2)
        for call, stop in (3, me.abort), (4, me.record[10:11]):
            me.clear()
            stop[0] = 1
            assert wait() == [call, 0]
            assert me.fault() == (ABORTED, 2, call, 0, 1)
        me.clear()
        of_version_9[(1,)](me.world, seen)
        assert (me.fault(), me.seen[0]) == ((OTHER_VERSION, 0, 5, 9, 1), 0)
        me.clear()
        assert me.line(2, 0, 1)[0] == -7, "a call that is over signals"

        def now() -> int:  # the first time, and the second is behind the deadline, with which the signal comes
            if times.pop() > 1:
                me.line(0, 2, 1)[0] = 6
                return 1 << 60
            return 1

        times, st._now_ns = [2, 1], now
        assert wait() == [6, 6], "a wait is given up without a last look"
        assert (me.fault(), times) == ((0, 0, 0, 0, 0), [])
    meet()
    if me.rank == 2:
        assert (me.line(2, 0, 1)[0], me.seen.tolist()) == (6, [0, 0, -1])


def run(test: Callable[..., None], memory: mmap.mmap, rank: int, table: bool, timeout: float, barrier: Any) -> None:
    test(Rank(memory, rank, table, timeout), lambda: barrier.wait(60) and None)


def now_ns() -> int:
    os.sched_yield()  # there are more ranks than processors
    return time.monotonic_ns()


def main() -> None:
    interpretable()
    st._now_ns, st._LOOK_EVERY = now_ns, 1
    st._publish = lambda at, word: tl.atomic_xchg(at.to(tl.pointer_type(tl.int64)), word, sem="release", scope="sys")
    context = multiprocessing.get_context("fork")  # so that the memory has the same addresses
    for test, timeout in ((gathers, 120), (faults, 0.5)):
        for table in (False, True):
            memory, barrier = mmap.mmap(-1, SIZE * STRIDE + 4096), context.Barrier(SIZE)
            ranks = [context.Process(target=run, args=(test, memory, r, table, timeout, barrier)) for r in range(SIZE)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            assert [process.exitcode for process in ranks] == [0] * SIZE, (test.__name__, table)


if __name__ == "__main__":
    main()
