"""Sizes, clocks, ratios and busy loops: what all kinds of runs share."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time

import torch

import switchyard

GRAPH = 20  # calls in a graph
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size_of(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def name_of(size: int) -> str:
    for unit in "GMK":
        if size >= UNITS[unit] and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]} {unit}iB"
    return f"{size} B"


def slowest(seconds: float) -> float:
    t = torch.tensor([seconds], dtype=torch.float64)
    switchyard.all_reduce(t, "max")
    return t.item()


def ratio_of(theirs: list[float], ours: list[float]) -> str:
    low, middle, high = quartiles([a / b for a, b in zip(theirs, ours)])
    return f"{middle:7.2f}   {low:.2f} to {high:.2f}"


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return low, statistics.median(values), high


class Report:
    """What rank 0 prints: tables for people, or with --json a line for each row."""

    def __init__(self, args: argparse.Namespace, rank: int, **run: object) -> None:
        self._json, self._first, self._run = args.json, rank == 0, {**run, "busy": args.busy}

    def text(self, line: str) -> None:
        if self._first and not self._json:
            print(line, flush=True)

    def row(self, ours: list[float], theirs: list[float] | None, **row: object) -> None:
        """A row of times in seconds. Those of a peer are pairs with ours."""
        if not self._first or not self._json:
            return
        out = {**self._run, **row, "us": statistics.median(ours) * 1e6}
        if theirs:
            low, middle, high = quartiles([a / b for a, b in zip(theirs, ours)])
            out.update(peer_us=statistics.median(theirs) * 1e6, ratio=middle, ratio_low=low, ratio_high=high)
        print(json.dumps(out), flush=True)


# A process that ends when its standard input does.
BUSY_LOOP = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True:
    pass
"""


@contextlib.contextmanager
def busy_loops(n: int):
    """n processes that keep a core busy each. They end with this one, also when it is killed: their standard input does."""
    loops: list[subprocess.Popen] = []
    try:
        loops += (subprocess.Popen([sys.executable, "-c", BUSY_LOOP], stdin=subprocess.PIPE) for _ in range(n))
        yield
    finally:
        for loop in loops:
            loop.communicate()


def timed(run, n: int) -> tuple[float, float]:
    """Seconds that one of n takes on the GPU and on the host; the slowest rank's."""
    torch.cuda.synchronize()
    switchyard.barrier()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    began = time.perf_counter()
    run(n)
    host = time.perf_counter() - began
    last.record()
    torch.cuda.synchronize()
    return slowest(first.elapsed_time(last) / 1e3 / n), slowest(host / n)


def on_host(run, n: int) -> tuple[float, float]:
    """The same without a GPU: both are the time until the calls return."""
    switchyard.barrier()
    began = time.perf_counter()
    run(n)
    seconds = slowest((time.perf_counter() - began) / n)
    return seconds, seconds


class Side:
    """Calls of one library, and the seconds that one takes in each block of them: eager and, on GPUs, in a CUDA graph."""

    def __init__(self, name: str, x: torch.Tensor) -> None:
        """x is a tensor of the calls, for which all is there that they need."""
        self.name = name
        self.eager: list[float] = []
        self.replayed: list[float] = []
        self._clock = timed if x.is_cuda else on_host
        self._graph = None
        self.check()
        if x.is_cuda:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self.calls(GRAPH)

    def calls(self, n: int) -> None:
        """Make n calls."""
        raise NotImplementedError

    def check(self) -> None:
        """Make calls, and end the program if they are wrong."""
        raise NotImplementedError

    def time(self, n: int) -> None:
        """Measure a block of n calls."""
        self.calls(3)
        self.eager.append(self._clock(self.calls, n)[0])
        graph = self._graph
        if graph is not None:
            graph.replay()
            self.replayed.append(self._clock(lambda n: [graph.replay() for _ in range(n)], max(n // GRAPH, 1))[0] / GRAPH)
