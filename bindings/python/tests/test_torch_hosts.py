"""Ranks of several hosts: exchanges, reductions and dispatches of host tensors cross."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from pathlib import Path

import hosts
import pytest
import world

import switchyard as sw

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

pytestmark = pytest.mark.skipif(ctypes.util.find_library("ucp") is None, reason="needs UCX")


def crosses(rank, size, g):
    """Calls of a group whose ranks are on two hosts."""
    x = torch.arange(size * 3.0) + 100 * rank
    y = torch.empty(size, 3)
    work = sw.all_to_all_single(y.view(-1), x, group=g, async_op=True)
    work.wait()
    assert sw.communicator(g).size == size
    assert torch.equal(y, torch.arange(3.0) + 3 * rank + 100 * torch.arange(size)[:, None])
    total = torch.full((70000,), rank + 1.0)
    sw.all_reduce(total, group=g)
    assert (total == sum(range(1, size + 1))).all()
    gathered = torch.empty(size, 2)
    sw.all_gather_into_tensor(gathered, torch.full((1, 2), float(rank)), group=g)
    assert gathered[:, 0].tolist() == list(range(size))
    d = sw.Dispatcher(2 * size, 2, 16, max_tokens=8, dtype="float32", combine_dtype="float32", group=g)
    tokens, experts = torch.randn(8, 16), torch.stack([torch.randperm(2 * size)[:2] for _ in range(8)]).int()
    got = d.dispatch(tokens, experts, torch.full((8, 2), 0.5))
    assert torch.allclose(d.combine(got.rows * 2, got), 2 * tokens)
    del got
    d.close()
    sw.barrier(group=g)
    arrived = torch.empty_like(x)
    ring = [sw.P2POp(sw.isend, x, (rank + 1) % size, group=g), sw.P2POp(sw.irecv, arrived, (rank - 1) % size, group=g)]
    for request in sw.batch_isend_irecv(ring):
        request.wait()
    assert torch.equal(arrived, torch.arange(size * 3.0) + 100 * ((rank - 1) % size))
    at = sw.empty(size, dtype=torch.float32, group=g)
    for peer in range(size):
        if peer != rank:
            sw.put(torch.full((1,), float(rank)), at[rank : rank + 1], peer, group=g)
            sw.signal(peer, group=g)
    for peer in range(size):
        if peer != rank:
            sw.wait(peer, group=g)
    at[rank] = rank
    assert at.tolist() == list(range(size))
    sw.barrier(group=g)
    of_ours = dist.new_group(backend="switchyard")
    backend_calls(rank, size, of_ours)


def backend_calls(rank, size, g):
    """The calls of torch's backend between two ranks and with a root. None of them goes elsewhere."""
    before = fallbacks()
    for n in (1, 300_000):  # a small message, and one in chunks
        x, y = torch.full((n,), float(rank)), torch.empty(n)
        work = dist.isend(x, (rank + 1) % size, group=g)
        dist.recv(y, (rank - 1) % size, group=g)
        work.wait()
        assert (y == (rank - 1) % size).all()
        if rank == 0:
            got = set()
            for _ in range(size - 1):
                got.add(dist.recv(y, group=g))
                assert (y == y[0]).all()
            assert got == set(range(1, size))
        else:
            dist.send(x, 0, group=g)
        for root in range(size):
            y.fill_(float(rank))
            dist.broadcast(y, root, group=g)
            assert (y == root).all()
            total = x.clone()
            dist.reduce(total, root, group=g)
            assert rank != root or (total == sum(range(size))).all()
            parts = [torch.empty(n) for _ in range(size)] if rank == root else None
            dist.gather(x, parts, root, group=g)
            assert parts is None or [p[-1].item() for p in parts] == list(range(size))
            dist.scatter(y, parts, root, group=g)
            assert (y == rank).all()
    assert fallbacks() == before


def fallbacks():
    return [f for r in sw.metrics()["ranks"] for f in r.get("fallbacks", [])]


def spread(rank, size):
    """The ranks of two hosts take turns."""
    os.environ["SWITCHYARD_HOSTID"] = f"host {rank % 2}"
    try:
        crosses(rank, size, dist.new_group())
    finally:
        del os.environ["SWITCHYARD_HOSTID"]


def test_ranks_of_several_hosts(gloo):
    gloo.run(spread)


SCRIPT = """
import torch.distributed as dist
import test_torch_hosts

dist.init_process_group("gloo")
test_torch_hosts.crosses(dist.get_rank(), dist.get_world_size(), None)
dist.barrier()
dist.destroy_process_group()
print("crossed")
"""


def on_two_hosts(per_host, rate, *command):
    """What torchrun prints on each of two hosts, whose ranks run a command."""
    try:
        net = hosts.Hosts(2, rate)
    except hosts.Unavailable as missing:
        pytest.skip(str(missing))
    with net:
        started = [
            subprocess.Popen(
                [
                    *net.within(host), sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host),
                    "--nproc-per-node", str(per_host), "--master-addr", net.address(0), "--master-port", "29500", *command,
                ],
                env={
                    **os.environ, "PYTHONPATH": str(Path(__file__).parent), "GLOO_SOCKET_IFNAME": f"veth{host}",
                    "UCX_TLS": "tcp,self", "OMP_NUM_THREADS": "1",
                },
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for host in range(2)
        ]  # fmt: skip
        try:
            printed = [process.communicate(timeout=world.HANGS)[0] for process in started]
            for host, process in enumerate(started):
                assert process.returncode == 0, f"host {host}: {printed[host]}"
            return printed
        finally:
            for process in started:
                process.kill()
                process.wait()


@pytest.mark.parametrize("rate", [None, "2gbit"])
def test_torchrun_on_two_hosts(tmp_path, rate):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for out in on_two_hosts(2, rate, str(script)):
        assert out.count("crossed") == 2, out


def test_training_on_two_hosts():
    example = Path(__file__).resolve().parents[3] / "examples" / "moe" / "train.py"
    first, second = on_two_hosts(1, None, str(example), "--steps", "20")
    assert "the losses are the same" in first
    assert "go to torch" not in first + second
