"""Metrics and status of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from array import array

import pytest

import switchyard as sw


def test_metrics_count_calls():
    with sw.init(0, 1, default=False) as comm:
        x = array("f", [1, 2, 3])
        for _ in range(3):
            sw.all_reduce(x, group=comm)
        (rank,) = sw.metrics()["ranks"]
        (reduction,) = [o for o in rank["operations"] if o["operation"] == "all-reduce"]
        assert (reduction["calls"], reduction["failed"], reduction["payload_bytes"]) == (3, 0, 36)
        assert rank["size"] == 1
        assert rank["heaps"][0]["used_bytes"] > 0
    assert sw.metrics()["ranks"] == []


def test_who_waits_is_told_while_it_waits():
    """Rank 1 is late; this thread, a command and JSON say so."""
    here = sw.new_id()
    late = threading.Event()
    x = [array("f", [1.0]), array("f", [2.0])]

    def rank(number: int) -> None:
        with sw.init(number, 2, here, default=False) as comm:
            sw.barrier(comm)
            if number == 1:
                late.wait(30)
            sw.all_reduce(x[number], group=comm)

    ranks = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    for r in ranks:
        r.start()
    end = time.monotonic() + 20
    while "rank 1 has not entered all-reduce 1" not in sw.metrics().get("verdict", "") and time.monotonic() < end:
        time.sleep(0.02)
    verdict = sw.metrics()["verdict"]
    command = [sys.executable, "-m", "switchyard", "status"]
    table = subprocess.run(command, capture_output=True, text=True, timeout=60)
    everything = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60)
    late.set()
    for r in ranks:
        r.join()
    assert verdict.startswith("rank 1 has not entered all-reduce 1 of group")
    assert table.returncode == 0, table.stderr
    assert "rank 1 has not entered all-reduce 1 of group" in table.stdout
    assert any(r["waiting"] for r in json.loads(everything.stdout)["ranks"] if r.get("waiting"))
    assert x[0][0] == x[1][0] == 3


def test_torchs_analyzer_reads_calls(tmp_path):
    """It finds that rank 1 has not made a call."""
    analyzer = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
    here, late = sw.new_id(), threading.Event()

    def rank(number: int) -> None:
        with sw.init(number, 2, here, default=False) as comm:
            for _ in range(3):
                sw.all_reduce(array("f", [1.0]), group=comm)
            if number == 1:
                late.wait(60)
            sw.all_reduce(array("f", [2.0]), group=comm)

    ranks = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    for r in ranks:
        r.start()
    end = time.monotonic() + 20
    while "rank 1 has not entered all-reduce 4" not in sw.metrics().get("verdict", "") and time.monotonic() < end:
        time.sleep(0.02)
    job = sw.metrics()["ranks"][0]["job"]
    command = [sys.executable, "-m", "switchyard", "dump", str(tmp_path / "calls_rank_"), job]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=60)
    late.set()
    for r in ranks:
        r.join()
    assert dumped.returncode == 0, dumped.stderr
    assert dumped.stdout.split() == [str(tmp_path / f"calls_rank_{r}") for r in range(2)]
    command = [sys.executable, "-m", analyzer.__name__, str(tmp_path), "--prefix", "calls_rank_"]
    read = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert read.returncode == 0, read.stderr
    said = read.stdout + read.stderr
    assert "Not all ranks joining collective, sequence number: 4" in said
    assert "missing ranks: {1}" in said
