"""Calls that torch's own backends make in the place of Switchyard are counted, with the reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import world

import switchyard as sw

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

R = dist.ReduceOp


def counted():
    """Calls by operation, backend and reason, of all groups of this process."""
    calls = {}
    for rank in sw.metrics()["ranks"]:
        for f in rank.get("fallbacks", []):
            key = f["operation"], f["backend"], f["reason"]
            calls[key] = calls.get(key, 0) + f["calls"]
    return calls


def new(call, *arguments, **named):
    """What a call adds."""
    before = counted()
    work = call(*arguments, **named)
    if named.get("async_op"):
        work.wait()
    return {key: n - before.get(key, 0) for key, n in counted().items() if n != before.get(key, 0)}


class Named(torch.Tensor):
    """A tensor whose memory may not be what it seems."""


def by_the_backend(rank, size):
    sw.communicator()  # the ranks have met
    whole, like = torch.ones(2, dtype=torch.int32), torch.ones(2)
    assert new(dist.all_reduce, like) == {}
    assert new(dist.barrier) == {}
    assert new(dist.all_reduce, whole, R.BXOR) == {("all_reduce", "gloo", "reduction"): 1}
    assert new(dist.all_reduce, whole, R.BXOR, async_op=True) == {("all_reduce", "gloo", "reduction"): 1}
    assert new(dist.reduce, whole, 0, R.BXOR) == {("reduce", "gloo", "reduction"): 1}
    assert new(dist.all_reduce, like.to_sparse()) == {("all_reduce", "gloo", "tensor"): 1}
    assert new(dist.broadcast, like.as_subclass(Named), 0) == {("broadcast", "gloo", "tensor"): 1}
    outputs = [torch.ones(2).as_subclass(Named) for _ in range(size)]
    assert new(dist.all_gather, outputs, like) == {("all_gather", "gloo", "tensor"): 1}
    # The functions of Switchyard leave it to the same backend, which counts.
    assert new(sw.all_reduce, whole, "bxor") == {("all_reduce", "gloo", "reduction"): 1}
    swap = (dist.send, like.as_subclass(Named), 1) if rank == 0 else (dist.recv, like.as_subclass(Named), 0)
    assert new(*swap) == {("send" if rank == 0 else "recv", "gloo", "tensor"): 1}
    dist.barrier()


def test_the_backend_counts_calls_that_it_leaves(backend):
    backend.run(by_the_backend)


def of_functions(rank, size):
    g = dist.new_group()
    whole = torch.ones(2, dtype=torch.int32)
    ranks = len(sw.metrics()["ranks"])
    assert new(sw.all_reduce, whole, "bxor", group=g) == {("all_reduce", "gloo", "reduction"): 1}
    assert len(sw.metrics()["ranks"]) == ranks + 1, "the group's ranks have not met"
    assert new(sw.all_reduce, torch.ones(2), group=g) == {}
    kept = [f for r in sw.metrics()["ranks"] for f in r.get("fallbacks", []) if r["host"] >= 0 and r["size"] == size]
    assert {"operation": "all_reduce", "backend": "gloo", "reason": "reduction", "calls": 1} in kept
    assert len(sw.metrics()["ranks"]) == ranks + 1, "it is one rank, before it has met and afterwards"
    assert new(sw.all_reduce, whole, "bxor", group=g) == {("all_reduce", "gloo", "reduction"): 1}
    dist.destroy_process_group(g)


def test_functions_count_calls_before_the_ranks_have_met(gloo):
    gloo.run(of_functions)


def without_memory(rank, size):
    import switchyard._core.joining as joining

    own = joining.place
    joining.place = lambda: f"host/{rank % 2}"  # two users
    try:
        g = dist.new_group()
        x = torch.ones(2)
        assert new(sw.all_reduce, x, group=g, async_op=True) == {("all_reduce", "gloo", "group"): 1}
        assert new(sw.all_reduce, x, group=g) == {("all_reduce", "gloo", "group"): 1}
        assert new(sw.barrier, group=g) == {("barrier", "gloo", "group"): 1}
        (alone,) = [r for r in sw.metrics()["ranks"] if r["host"] == -1]
        assert (alone["rank"], alone["size"]) == (rank, size)
        dist.destroy_process_group(g)
        del g
        assert [r for r in sw.metrics()["ranks"] if r["host"] == -1] == []
    finally:
        joining.place = own


def test_a_group_without_symmetric_memory_counts_all_calls(gloo):
    gloo.run(without_memory)


def asked(rank, size):
    """All ranks have made their calls, and none has ended, while rank 0 asks as an operator does."""
    dist.barrier()
    for _ in range(10):
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2, dtype=torch.int32), R.BXOR)
    dist.barrier()
    said = ""
    if rank == 0:
        command = [sys.executable, "-m", "switchyard", "status"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    dist.barrier()
    return said


def test_an_operator_sees_that_calls_fall_back(worlds):
    said = worlds.get(4, world.backend).run(asked)[0]
    found = "ranks 0, 1, 2 and 3: calls of all_reduce fall back to gloo, 40 in all: "
    why = "Switchyard does not reduce this element type with this operator"
    assert re.search(re.escape(found + why) + "$", said, re.MULTILINE), said


def test_the_first_call_of_a_kind_that_falls_back_is_logged():
    code = """
import torch, torch.distributed as dist
dist.init_process_group("switchyard", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.BXOR)
"""
    env = {**os.environ, "SWITCHYARD_DEBUG": "warn"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True, env=env)
    (line,) = [line for line in done.stderr.splitlines() if "calls fall back" in line]
    assert "rank=0" in line
    assert "operation=all_reduce to=gloo" in line
    assert "Switchyard does not reduce this element type with this operator" in line


WITHOUT_UCX = """
import torch
import torch.distributed as dist
import switchyard.torch

dist.init_process_group("switchyard")
rank = dist.get_rank()
for g in (None, dist.new_group(), dist.new_group()):
    for _ in range(2):
        x, y = torch.full((3,), rank + 1.0), torch.empty(2)
        dist.all_reduce(x, group=g)
        assert x.tolist() == [3.0] * 3
        dist.all_to_all_single(y, torch.arange(2.0) + 10 * rank, group=g)
        assert y.tolist() == [rank, 10.0 + rank]
dist.barrier()
dist.destroy_process_group()
print("as torch does")
"""


def test_a_process_warns_once_that_there_is_no_ucx(tmp_path):
    """Calls of all groups across hosts go to gloo, and rank 0 says why, once however many groups and calls there are."""
    (tmp_path / "libucp.so.0").write_text("no library")
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_UCX)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("LD_LIBRARY_PATH")]))
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(world.free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **meet, "LD_LIBRARY_PATH": path, "RANK": str(rank), "SWITCHYARD_HOSTID": f"host {rank}"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=world.HANGS)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    assert all("as torch does" in text for text in said), said
    assert [text.count("UserWarning: switchyard: the ranks of group") for text in said] == [1, 0], said
    assert re.search(r"UserWarning: .*cannot have symmetric memory .*libucp\.so\.0.*its calls go to torch", said[0]), said[0]
