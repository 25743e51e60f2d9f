"""Ranks that a launcher starts meet without torch, as they do from Go."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import switchyard as sw
from switchyard import errors

CODE = """
import sys
import switchyard as sw
comm = sw.init(*eval(sys.argv[1]), join_timeout=60)
sw.barrier()
print(comm.rank, comm.size)
sw.shutdown()
"""

LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SWITCHYARD_RANK",
    "SWITCHYARD_WORLD_SIZE", "SWITCHYARD_PORT", "SWITCHYARD_ADDR", "SWITCHYARD_LAUNCHER", "SLURM_STEP_ID",
    "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK",
)  # fmt: skip


@pytest.fixture(autouse=True)
def nobody_has_started_us(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def meet(environment, arguments=lambda rank: ()):
    """Two processes, each with the environment of its rank and the arguments of init."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, repr(arguments(rank))], env={**os.environ, **environment(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank, process in enumerate(processes):
        out, err = process.communicate(timeout=600)
        assert (process.returncode, out) == (0, f"{rank} 2\n"), err


def test_slurm():
    job = f"{os.getpid()}"
    meet(lambda rank: {
        "SLURM_STEP_ID": "0", "SLURM_JOB_ID": job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
    })  # fmt: skip


def test_a_file(tmp_path):
    meet(lambda rank: {"RANK": str(rank), "WORLD_SIZE": "2", "SWITCHYARD_ADDR": f"file://{tmp_path}/meet"})
    meet(lambda rank: {}, lambda rank: (rank, 2, f"file://{tmp_path}/meet"))
    assert not list(tmp_path.iterdir())


def test_an_id():
    for host in ("", "127.0.0.1"):
        address = sw.new_id(host)
        meet(lambda rank, address=address: {}, lambda rank, address=address: (rank, 2, address))


def test_what_is_refused(monkeypatch):
    with pytest.raises(errors.InvalidArgument, match="no group: call switchyard"):
        sw.barrier()
    with pytest.raises(errors.InvalidArgument, match="is not this one"):
        sw.new_id("203.0.113.7")
    with pytest.raises(errors.InvalidArgument, match='want "host:port", "@name", "file:///path" or an id'):
        sw.init(0, 2, "nowhere")
    with pytest.raises(errors.Error, match="that NewID has not made"):
        sw.init(0, 2, "id:short")
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(errors.InvalidArgument, match="PMI_RANK is 0 but PMI_SIZE is not set: set both or neither"):
        sw.init()
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(errors.InvalidArgument, match="say rank 0 of 1, PMI_RANK and PMI_SIZE say rank 0 of 2"):
        sw.init()


def test_the_benchmark_measures_by_any_launcher(tmp_path):
    def start(rank, *sizes):
        environment = {"RANK": str(rank), "WORLD_SIZE": "2", "SWITCHYARD_ADDR": f"file://{tmp_path}/meet"}
        return subprocess.Popen(
            [sys.executable, "-m", "switchyard", "bench", *sizes], env={**os.environ, **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    processes = [start(rank, "8K", "30") for rank in range(2)]
    (rows, err), (nothing, _) = (p.communicate(timeout=600) for p in processes)
    assert [p.returncode for p in processes] == [0, 0], err
    assert nothing == ""
    words = [row.split() for row in rows.splitlines()]
    assert words[0][:2] == ["2", "ranks,"]
    calls = [("all_to_all_single", "8192"), ("all_to_all_single", "30"), ("all_reduce", "8192"), ("all_reduce", "32")]
    assert [tuple(w[:2]) for w in words[2:]] == calls
    assert all(float(w[2]) > 0 for w in words[2:])

    p = start(0, "8X")
    assert "switchyard: bench: '8X' is no size such as 8K or 1M" in p.communicate(timeout=600)[1]
    assert p.returncode == 1
