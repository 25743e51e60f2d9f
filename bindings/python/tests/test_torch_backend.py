"""Switchyard as a backend of torch.distributed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from world import free_port

import switchyard as sw

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402


def everything(rank, size):
    assert dist.get_backend() == "switchyard"
    comm = sw.communicator()
    before = comm._ran.value
    x = torch.arange(2.0 * size) + 10 * rank
    y = torch.empty(2 * size)
    dist.all_to_all_single(y, x)
    assert y.view(size, 2)[:, 0].tolist() == [10 * p + 2 * rank for p in range(size)]
    z = torch.tensor([rank + 1.0])
    dist.all_reduce(z)
    assert z.item() == sum(range(1, size + 1))
    work = dist.all_reduce(z, async_op=True)
    assert work.wait()
    out = torch.empty(size)
    dist.all_gather_into_tensor(out, torch.tensor([float(rank)]))
    assert out.tolist() == list(range(size))
    part = torch.empty(1)
    dist.reduce_scatter_tensor(part, out)
    assert part.item() == rank * size
    dist.barrier()
    assert comm._ran.value - before == 6  # all of them were ours
    # What it does not have is gloo's.
    z = torch.tensor([float(rank)])
    dist.broadcast(z, 1)
    assert z.item() == 1
    z = torch.tensor([rank], dtype=torch.int32)
    dist.all_reduce(z, dist.ReduceOp.BXOR)
    assert z.item() == (0 ^ 1)
    lists = [torch.empty(2) for _ in range(size)]
    dist.all_gather(lists, torch.full((2,), float(rank)))
    assert [t[0].item() for t in lists] == list(range(size))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": p} for p in range(size)]
    if rank == 0:
        dist.send(torch.ones(3), 1)
    elif rank == 1:
        z = torch.zeros(3)
        dist.recv(z, 0)
        assert z.tolist() == [1, 1, 1]
    dist.reduce(z := torch.ones(1), 0)
    assert z.item() == (size if rank == 0 else z.item())
    gathered = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.tensor([float(rank)]), gathered)
    dist.scatter(torch.empty(1), [torch.ones(1)] * size if rank == 0 else None)
    outs = [torch.empty(1) for _ in range(size)]
    dist.all_to_all(outs, [torch.tensor([float(rank)])] * size)
    assert [t.item() for t in outs] == list(range(size))
    scattered = torch.empty(1)
    dist.reduce_scatter(scattered, [torch.ones(1)] * size)
    assert scattered.item() == size
    group = dist.new_group([1, 0])
    assert isinstance(group, dist.ProcessGroup)
    z = torch.ones(1)
    dist.all_reduce(z, group=group)
    assert z.item() == 2
    dist.destroy_process_group(group)


def test_every_collective(backend):
    backend.run(everything)


def functional(rank, size):
    import torch.distributed._functional_collectives as fc

    comm = sw.communicator()
    before = comm._ran.value
    world = dist.group.WORLD
    x = torch.arange(float(size)) + 10 * rank
    assert fc.all_reduce(x, "sum", world).tolist() == sum(torch.arange(float(size)) + 10 * p for p in range(size)).tolist()
    assert fc.all_gather_tensor(torch.tensor([float(rank)]), 0, world).tolist() == list(range(size))
    assert fc.reduce_scatter_tensor(torch.ones(size), "sum", 0, world).tolist() == [size]
    y = fc.all_to_all_single(x, [1] * size, [1] * size, world)
    assert y.tolist() == [10 * p + rank for p in range(size)]
    assert comm._ran.value - before == 4


def test_functional_collectives(backend):
    backend.run(functional)


def data_parallel(rank, size):
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    parallel = DistributedDataParallel(model)
    comm = sw.communicator()
    before = comm._ran.value
    g = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = torch.randn(4, 8, generator=g)
        parallel.zero_grad()
        parallel(x).sum().backward()
    assert comm._ran.value > before
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    everybody = torch.empty(size, grads.numel())
    dist.all_gather_into_tensor(everybody, grads)
    assert torch.equal(everybody[0], everybody[1])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()


def test_distributed_data_parallel(backend):
    backend.run(data_parallel)


def refused(rank, size):
    with pytest.raises(ValueError, match="contiguous"):
        dist.all_to_all_single(torch.empty(size, 2), torch.empty(2, size).t())
    with pytest.raises(RuntimeError, match="Split sizes"):
        dist.all_to_all_single(torch.empty(size), torch.empty(size), [2] * size, [1] * size)
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        dist.all_reduce(torch.ones(1, dtype=torch.int16))
    dist.barrier()


def test_errors(backend):
    backend.run(refused)


SCRIPT = """
    # It knows nothing of Switchyard.
    import sys
    import torch, torch.distributed as dist
    dist.init_process_group({arguments})
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    y = torch.empty(2)
    dist.all_to_all_single(y, torch.full((2,), float(dist.get_rank())))
    assert y.tolist() == [0, 1] and x.item() == 3
    group = dist.new_group()
    dist.barrier(group=group)
    if dist.get_rank() == 0:
        print(type(dist.group.WORLD).__name__, type(group).__name__, *sys.argv[1:])
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("arguments", "runner", "expected"),
    [
        ('"switchyard"', [], "SwitchyardProcessGroup SwitchyardProcessGroup --some flag"),
        ('"gloo"', ["-m", "switchyard.torch"], "SwitchyardProcessGroup SwitchyardProcessGroup --some flag"),
        ("", ["-m", "switchyard.torch"], "SwitchyardProcessGroup SwitchyardProcessGroup --some flag"),
        ('"gloo"', [], "ProcessGroup ProcessGroup --some flag"),
    ],
    ids=["by name", "gloo replaced", "default replaced", "gloo left alone"],
)
def test_a_script_runs_unchanged(tmp_path, arguments, runner, expected):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("{arguments}", arguments))
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, *runner, str(script), "--some", "flag"],
            env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    answers = [p.communicate(timeout=100) for p in processes]
    assert [p.returncode for p in processes] == [0, 0], answers
    assert answers[0][0].strip() == expected
