"""Metrics and status of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from array import array

import numpy as np
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
        (heap, *_) = rank["heaps"]
        assert heap["used_bytes"] > 0
        assert heap["free_bytes"] == heap["reserved_bytes"] - heap["used_bytes"]
        assert (rank["epoch"], rank["members"]) == (0, [0])
    assert sw.metrics()["ranks"] == []


def test_metrics_tell_tokens_by_expert():
    with sw.init(0, 1, default=False) as comm:
        moe = sw.Dispatcher(3, 1, 2, max_tokens=4, layout="padded", capacity=2, layer="block 3", group=comm)
        x, idx = np.ones((3, 2), np.float32), np.array([[0], [2], [2]])
        moe.dispatch(x, idx).release()
        with pytest.raises(sw.errors.Overflow):
            moe.dispatch(x, np.array([[1], [1], [1]]))
        (layer,) = sw.metrics()["ranks"][0]["layers"]
        assert (layer["layer"], layer["tokens"], layer["routed"]) == ("block 3", [1, 0, 2], [3])
        assert (layer["imbalance"], layer["overflows"], layer["owners"]) == (1, [1], [[0], [0], [0]])
        with pytest.raises(sw.errors.InvalidType):
            sw.Dispatcher(3, 1, 2, layer=3, group=comm)
        moe.close()


def test_who_waits_is_told_while_it_waits():
    """Rank 1 is late; this thread, a command and JSON say so."""
    here = sw.new_id()
    late = threading.Event()
    x = [array("f", [1.0]), array("f", [2.0])]

    def rank(number: int) -> None:
        with sw.init(number, 2, here, timeout=300, default=False) as comm:
            sw.barrier(comm)
            if number == 1:
                late.wait(300)
            sw.all_reduce(x[number], group=comm)

    ranks = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    for r in ranks:
        r.start()
    end = time.monotonic() + 60
    while "rank 1 has not entered all-reduce 1" not in sw.metrics().get("verdict", "") and time.monotonic() < end:
        time.sleep(0.02)
    verdict = sw.metrics()["verdict"]
    job = sw.metrics()["ranks"][0]["job"]

    def said(command: str, of: str = job) -> subprocess.CompletedProcess[str]:
        module = [sys.executable, "-m", "switchyard"]
        return subprocess.run([*module, *command.split(), "-job", of], capture_output=True, text=True, timeout=600)

    # Other jobs of this user may run, come and go.
    table, everything, explained, window = said("status"), said("status --json"), said("explain"), said("explain --json")
    top, objects, lines = said("top 2"), said("top 1 --json"), said("dump --json")
    trace, later = said("trace"), said("trace -d 0.1")
    of_none = {c: said(c, of="none") for c in ["status --json", "top 1", "explain", "dump --json", "trace"]}
    unbound = subprocess.run([sys.executable, "-m", "switchyard", "status"], capture_output=True, text=True, timeout=600)
    late.set()
    for r in ranks:
        r.join()
    assert unbound.returncode == 0, unbound.stderr
    assert unbound.stdout
    assert top.stdout.count("rank 1 has not entered all-reduce 1 of group") == 2, top
    assert "rank 1 has not entered" in json.loads(objects.stdout)["verdict"]
    assert {r["job"] for r in json.loads(everything.stdout)["ranks"]} == {job}
    for command, done in of_none.items():
        assert done.returncode == 1, (command, done)
        assert 'job "none"' in done.stderr, (command, done)
    state, *calls = map(json.loads, lines.stdout.splitlines())
    assert {r["job"] for r in state["ranks"]} == {job}
    calls = [(c["rank"], c["operation"], c["state"]) for c in calls]
    assert (0, "all-reduce", "started") in calls
    assert (1, "all-reduce", "started") not in calls
    assert len(slices(trace.stdout, "X")) >= len(slices(later.stdout, "X"))
    assert any(e["name"] == "all-reduce" for e in slices(later.stdout, "B")), "the call that has not ended"
    assert verdict.startswith("rank 1 has not entered all-reduce 1 of group")
    assert table.returncode == 0, table.stderr
    assert "rank 1 has not entered all-reduce 1 of group" in table.stdout
    assert explained.returncode == 0, explained.stderr
    assert "no call began in " in explained.stdout
    assert "rank 1 has not entered all-reduce 1 of group" in explained.stdout
    waited = [o for o in json.loads(window.stdout)["operations"] if o.get("waited")]
    assert ("all-reduce", 1) in [(o["operation"], w["rank"]) for o in waited for w in o["waited"]]
    assert any(r["waiting"] for r in json.loads(everything.stdout)["ranks"] if r.get("waiting"))
    assert x[0][0] == x[1][0] == 3


def slices(trace, phase):
    return [e for e in json.loads(trace)["traceEvents"] if e["ph"] == phase]


def test_doctor_looks_at_the_machine():
    """It says the same as the command of Go, and two processes exchange bytes."""
    command = [sys.executable, "-m", "switchyard", "doctor"]
    lines = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=600)
    assert lines.stderr == ""
    found = {f["check"]: f for f in map(json.loads, lines.stdout.splitlines())}
    names = ["versions", "processors", "launcher", "memory", "descriptors", "memlock", "ptrace", "container", "ports", "driver"]
    assert list(found) == [*names, "exchange"]
    assert found["exchange"]["state"] == "ok", found["exchange"]
    assert found["exchange"]["says"].startswith("2 processes exchanged 1024 KiB each in ")
    assert all(("cure" in f) == (f["state"] != "ok") for f in found.values())
    assert lines.returncode == int(any(f["state"] == "problem" for f in found.values()))
    spoiled = {**os.environ, "SWITCHYARD_JOIN_TIMEOUT": "soon", "COLUMNS": "60"}
    text = subprocess.run(command, capture_output=True, text=True, timeout=600, env=spoiled)
    assert text.returncode == 1
    assert max(map(len, text.stdout.splitlines())) <= 60
    assert "problem  exchange" in text.stdout
    assert "SWITCHYARD_JOIN_TIMEOUT" in "".join(text.stdout.split())


@pytest.mark.parametrize(
    "arguments", [["top", "x"], ["doctor", "now"], ["trace", "-d"], ["dump"], ["status", "3"], ["status", "-job"]]
)
def test_a_command_that_is_none_is_refused(arguments):
    command = [sys.executable, "-m", "switchyard", *arguments]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert refused.returncode == 2
    assert refused.stderr.startswith("usage: python -m switchyard")


def dump_of(folder):
    """Have the ranks of this process leave their calls in a folder."""
    job = sw.metrics()["ranks"][0]["job"]
    command = [sys.executable, "-m", "switchyard", "dump", str(folder / "calls_rank_"), job]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def analyze(analyzer, folder):
    command = [sys.executable, "-m", analyzer.__name__, str(folder), "--prefix", "calls_rank_"]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_torchs_analyzer_reads_calls(tmp_path):
    """It finds that rank 1 has not made a call."""
    analyzer = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
    here, late = sw.new_id(), threading.Event()

    def rank(number: int) -> None:
        with sw.init(number, 2, here, timeout=300, default=False) as comm:
            for _ in range(3):
                sw.all_reduce(array("f", [1.0]), group=comm)
            if number == 1:
                late.wait(300)
            sw.all_reduce(array("f", [2.0]), group=comm)

    ranks = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    for r in ranks:
        r.start()
    end = time.monotonic() + 60
    while "rank 1 has not entered all-reduce 4" not in sw.metrics().get("verdict", "") and time.monotonic() < end:
        time.sleep(0.02)
    dumped = dump_of(tmp_path)
    late.set()
    for r in ranks:
        r.join()
    assert dumped.returncode == 0, dumped.stderr
    assert dumped.stdout.split() == [str(tmp_path / f"calls_rank_{r}") for r in range(2)]
    read = analyze(analyzer, tmp_path)
    assert read.returncode == 0, read.stderr
    said = read.stdout + read.stderr
    assert "Not all ranks joining collective, sequence number: 4" in said
    assert "missing ranks: {1}" in said


def test_torchs_analyzer_finds_the_rank_in_another_call(tmp_path):
    """Rank 1 gathers where rank 0 reduces, by one communicator."""
    analyzer = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
    here, read, failed = sw.new_id(), threading.Event(), []

    def rank(number: int) -> None:
        with sw.init(number, 2, here, timeout=300, default=False) as comm:
            x, y = np.ones(2, np.float32), np.empty(4, np.float32)
            call = [lambda: sw.all_reduce(x, group=comm), lambda: sw.all_gather_into_tensor(y, x, group=comm)][number]
            with pytest.raises(sw.errors.Mismatch):
                call()
            failed.append(number)
            read.wait(300)

    ranks = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    for r in ranks:
        r.start()
    end = time.monotonic() + 60
    while len(failed) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    dumped = dump_of(tmp_path)
    read.set()
    for r in ranks:
        r.join()
    assert dumped.returncode == 0, dumped.stderr
    said = analyze(analyzer, tmp_path)
    assert "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH" in said.stdout + said.stderr
    assert "unrecognized" not in said.stdout + said.stderr
