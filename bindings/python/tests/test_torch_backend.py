"""Switchyard as a backend of torch.distributed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import world
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
    # Some of the others are gloo's.
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


README = Path(__file__).resolve().parents[1] / "README.md"
R = dist.ReduceOp


def served(rank, size):
    """For every call of the README's table, on host tensors: who served it."""

    def like(*shape, dtype=torch.float32):
        return torch.ones(shape, dtype=dtype)

    sums = [getattr(torch, n) for n in ("bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")]
    sums += [torch.float8_e4m3fn, torch.float8_e5m2]

    def reductions(call):
        for dtype in sums:
            for op in (R.SUM, R.MIN, R.MAX, R.PRODUCT):
                yield lambda dtype=dtype, op=op: call(dtype, op)
        for op in (R.SUM, R.PRODUCT):
            yield lambda op=op: call(torch.int8, op)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            yield lambda dtype=dtype: call(dtype, R.AVG)

    def lists(n=1):
        return [torch.empty(n) for _ in range(size)]

    def scatter(dtype, op):
        dist.reduce_scatter_tensor(torch.empty(2).to(dtype), like(2 * size, dtype=dtype), op)

    def scatter_lists(dtype, op):
        dist.reduce_scatter(torch.empty(2).to(dtype), [like(2, dtype=dtype)] * size, op)

    ours = {
        "`all_to_all_single`": [
            lambda: dist.all_to_all_single(like(size), like(size)),
            lambda: dist.all_to_all_single(like(size), like(size), [1] * size, [1] * size),
        ],
        "`barrier`": [dist.barrier],
        "`all_gather_into_tensor`": [lambda: dist.all_gather_into_tensor(like(size), like(1))],
        "`all_to_all` of lists": [lambda: dist.all_to_all(lists(), lists())],
        "`all_reduce`": [*reductions(lambda dtype, op: dist.all_reduce(torch.ones(2).to(dtype), op))],
        "`reduce_scatter_tensor`": [*reductions(scatter)],
        "`reduce`": [*reductions(lambda dtype, op: dist.reduce(torch.ones(2).to(dtype), 0, op))],
        "`reduce_scatter` of lists": [*reductions(scatter_lists)],
        "`gather`": [lambda: dist.gather(like(1), lists() if rank == 0 else None)],
        "`scatter`": [lambda: dist.scatter(like(1), lists() if rank == 0 else None)],
        "`all_gather` of lists": [lambda: dist.all_gather(lists(), like(1))],
        "`broadcast`": [lambda: dist.broadcast(like(2), 0)],
    }

    def in_a_batch():
        kind = dist.isend if rank == 0 else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(kind, like(1), 1 - rank)]):
            work.wait()

    pairs = {  # which are no collectives, and have no number
        "`send`, `recv`": lambda: dist.send(like(1), 1) if rank == 0 else dist.recv(like(1), 0),
        "any rank": lambda: dist.send(like(1), 1) if rank == 0 else dist.recv(like(1)),
        "`isend`, `irecv`": lambda: (dist.isend(like(1), 1) if rank == 0 else dist.irecv(like(1), 0)).wait(),
        "`batch_isend_irecv`": in_a_batch,
    }
    for name in ("all_gather_single", "reduce_scatter_single"):  # of torch 2.15
        if hasattr(dist, name):
            shapes = ((size,), (1,)) if name == "all_gather_single" else ((1,), (size,))
            ours[name] = [lambda name=name, shapes=shapes: getattr(dist, name)(like(*shapes[0]), like(*shapes[1]))]
    theirs = {
        "other operators": [lambda: dist.all_reduce(like(2, dtype=torch.int32), R.BXOR)],
        "objects": [lambda: dist.all_gather_object([None] * size, rank)],
    }
    comm = sw.communicator()
    for table, one in ((ours, 1), (theirs, 0)):
        for name, calls in table.items():
            for call in calls:
                before = comm._ran.value
                call()
                if name == "objects":  # from torch 2.15 on they are gathered in one tensor
                    continue
                assert comm._ran.value - before == one, f"{name}: {'gloo' if one else 'Switchyard'} has served it"
    wrapped, dist.group.WORLD._wrapped = dist.group.WORLD._wrapped, None
    for call in pairs.values():
        call()
    dist.group.WORLD._wrapped = wrapped
    return [*ours, *theirs, *pairs]


def test_who_serves_which_call(backend):
    names = backend.run(served)[0]
    table = README.read_text().split("| call | host tensors | CUDA tensors |")[1].split("\n\n")[0]
    for name in set(re.findall(r"`\w+`", table)) - {"`device_ids`"}:  # the test knows every call of the table
        assert any(name in known for known in names), name


def let_go(rank, size):
    """Calls that gloo serves, with tensors that nobody else holds by the time they have run. So gloo's threads free them, for
    which they need the interpreter."""

    calls = [
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), R.BXOR, async_op=True),
        lambda: dist.broadcast(torch.ones(2), 0, async_op=True),
        lambda: dist.reduce(torch.ones(2, dtype=torch.int32), 0, R.BXOR, async_op=True),
    ]
    for call in calls:
        for _ in range(1000):
            call()
        call().wait()


def test_gloo_frees_tensors(backend):
    backend.run(let_go)


def test_nothing_is_deprecated(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(QUIET))
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-W", "error", "-W", "ignore:::torch", str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr.lower()


QUIET = """
    import torch, torch.distributed as dist
    import switchyard as sw
    import switchyard.torch as st
    dist.init_process_group("switchyard")
    x = torch.ones(4, requires_grad=True)
    for call in (dist, sw):
        y = x.detach().clone()
        call.all_to_all_single(torch.empty(4), y)
        call.all_reduce(y)
        call.barrier()
        single = hasattr(dist, "all_gather_single") and call is dist
        (call.all_gather_single if single else call.all_gather_into_tensor)(torch.empty(4), y)
        (call.reduce_scatter_single if single else call.reduce_scatter_tensor)(torch.empty(4), y)
        if call is sw:
            work = call.all_to_all_single(torch.empty(4), y, async_op=True)
            work.wait()
            work.get_future().wait()
    st.all_to_all_single(x).sum().backward()
    st.all_reduce(st.all_gather_into_tensor(st.reduce_scatter_tensor(x))).sum().backward()
    torch.compile(lambda x: st.all_to_all_single(x * 2), backend="aot_eager")(x).sum().backward()
    sw.free(sw.empty(3))
    dist.destroy_process_group()
"""


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


def sharded(device, rank, size):
    """A model in shards against the same model whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def make():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 6)).to(device)

    whole, shards = make(), make()
    mesh = init_device_mesh(device, (size,))
    for layer in (shards[0], shards[2], shards):
        fully_shard(layer, mesh=mesh)
    for step in range(3):
        x = torch.randn(size * 4, 8, generator=torch.Generator().manual_seed(step)).to(device)
        for model, rows in ((whole, x), (shards, x[rank * 4 : rank * 4 + 4])):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
    for mine, all_of_it in zip(shards.parameters(), whole.parameters()):
        torch.testing.assert_close(mine.full_tensor(), all_of_it, rtol=1e-4, atol=1e-5)


def sharded_on_the_host(rank, size):
    comm = sw.communicator()
    before = comm._ran.value
    sharded("cpu", rank, size)
    assert comm._ran.value - before >= 3 * (3 + 2)  # gathers before the layers, reduce-scatters behind them


def test_fully_sharded_data_parallel(backend):
    backend.run(sharded_on_the_host)


def coalesced(device, rank, size):
    """Several calls as one, by torch's own manager."""
    manager = dist.distributed_c10d._coalescing_manager
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    for async_ops in (False, True):
        sums = [torch.full((n,), rank + 1.0, device=device) for n in (3, 1000, 70_000)]
        with manager(async_ops=async_ops) as cm:
            for x in sums:
                dist.all_reduce(x)
        if async_ops:
            cm.wait()
        assert [x[-1].item() for x in sums] == [size * (size + 1) / 2] * 3
        wholes = [torch.empty(n * size, device=device) for n in (2, 5000)]
        with manager(async_ops=async_ops) as cm:
            for x in wholes:
                gather(x, torch.full((x.numel() // size,), float(rank), device=device))
        if async_ops:
            cm.wait()
        assert [x.view(size, -1)[:, -1].tolist() for x in wholes] == [[*map(float, range(size))]] * 2
        parts = [torch.empty(n, device=device) for n in (2, 5000)]
        with manager(async_ops=async_ops) as cm:
            for x in parts:
                scatter(x, torch.full((x.numel() * size,), rank + 1.0, device=device))
        if async_ops:
            cm.wait()
        assert [x[-1].item() for x in parts] == [size * (size + 1) / 2] * 2


def lists(device, rank, size):
    """all_to_all of lists, of other lengths for every pair of ranks and of types that the library knows nothing of."""
    for dtype in (torch.float32, torch.int16, torch.complex64):
        for async_op in (False, True):
            given = [torch.full((1 + rank + 2 * p, 3), 10 * rank + p, dtype=dtype, device=device) for p in range(size)]
            got = [torch.empty((1 + p + 2 * rank, 3), dtype=dtype, device=device) for p in range(size)]
            work = dist.all_to_all(got, given, async_op=async_op)
            if async_op:
                work.wait()
            for p, x in enumerate(got):
                assert (x == 10 * p + rank).all().item(), (dtype, p)


def several(rank, size):
    comm = sw.communicator()
    before = comm._ran.value
    coalesced("cpu", rank, size)
    lists("cpu", rank, size)
    assert comm._ran.value - before == 2 * (3 + 2 + 2) + 6


def test_coalesced_calls_and_lists(backend):
    backend.run(several)


def once(rank, size):
    """Reductions and gathers as those on GPUs, here of the host: one look at the operator, one try by an operator of torch."""
    from switchyard._core.native import library
    from switchyard._torch import calls, cuda

    x, parts, gathered = torch.full((2 * size,), rank + 1.0), torch.empty(2), torch.empty(2 * size)
    dist.all_reduce(torch.ones(1))  # the ranks have met
    total = size * (size + 1) / 2
    counts = {"op_name": 0, "soonest": 0}

    def counted(name):
        function = getattr(calls, name)

        def call(*arguments):
            counts[name] += 1
            answer = function(*arguments)
            assert name == "op_name" or (answer is not None) is (library().operators() is None)
            return answer

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "ours", lambda output, input: True)
        for name in counts:
            patch.setattr(calls, name, counted(name))
        if library().operators() is not None:  # this torch has none of them
            patch.setattr(dist.group.WORLD, "_gpu_of", lambda tensors: None, raising=False)
        for make, names in (
            (lambda: dist.all_reduce(x), 1),
            (lambda: dist.reduce_scatter_tensor(parts, x), 1),
            (lambda: dist.all_gather_into_tensor(gathered, parts), 0),
        ):
            counts.update(op_name=0, soonest=0)
            make()
            assert counts == {"op_name": names, "soonest": 1}, counts
    for made, want in ((x, total), (parts, size * total), (gathered, size * total)):
        assert (made == want).all()


def test_reductions_try_an_operator_once(backend):
    backend.run(once)


def refused(rank, size):
    with pytest.raises(ValueError, match="contiguous"):
        dist.all_to_all_single(torch.empty(size, 2), torch.empty(2, size).t())
    with pytest.raises(RuntimeError, match="Split sizes"):
        dist.all_to_all_single(torch.empty(size), torch.empty(size), [2] * size, [1] * size)
    lists = [torch.empty(2 + (p == rank)) for p in range(size)], [torch.empty(2)] * size
    text = rf"output_tensor_list\[{rank}\] has shape \(3,\), input_tensor_list\[{rank}\] \(2,\): what a rank sends to itself"
    with pytest.raises(ValueError, match=text):
        dist.all_to_all(*lists)
    with pytest.raises(RuntimeError, match=r"all_reduce: tensor is torch.int16 on cpu, .*Invalid scalar type"):
        dist.all_reduce(torch.ones(1, dtype=torch.int16))
    with pytest.raises(RuntimeError, match=r"switchyard: reduce_scatter_tensor: tensor is torch.int8"):
        dist.reduce_scatter_tensor(torch.ones(1, dtype=torch.int8), torch.ones(size, dtype=torch.int8), dist.ReduceOp.AVG)
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
    import beside
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
        ('"gloo"', ["-m", "switchyard.torch", "-m"], "SwitchyardProcessGroup SwitchyardProcessGroup --some flag"),
        ('"gloo"', [], "ProcessGroup ProcessGroup --some flag"),
    ],
    ids=["by name", "gloo replaced", "default replaced", "a module", "gloo left alone"],
)
def test_a_script_runs_unchanged(tmp_path, arguments, runner, expected):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("{arguments}", arguments))
    script.with_name("beside.py").write_text("")  # what lies next to a script it can import
    module = runner[-1:] == ["-m"] and len(runner) > 2
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, *runner, "script" if module else str(script), "--some", "flag"],
            cwd=tmp_path if module else None, env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    answers = [p.communicate(timeout=600) for p in processes]
    assert [p.returncode for p in processes] == [0, 0], answers
    assert answers[0][0].strip().splitlines()[-1] == expected  # gloo may say something before


def split(rank, size):
    pg = dist.group.WORLD
    if not getattr(pg._get_backend(torch.device("cpu")), "supports_splitting", False):
        g = pg.split_group([1, 0], group_name="turned")  # which torch's own function asks for
    else:
        g = dist.split_group(split_ranks=[[1, 0]])
        assert dist.get_backend(g) == "switchyard"
    assert (g.rank(), g.size(), g.name()) == (1 - rank, 2, "switchyard")
    x = torch.full((2,), rank + 1.0)
    g.allreduce([x]).wait()
    assert x.tolist() == [3, 3]
    gathered = torch.empty(2)
    g._allgather_base(gathered, torch.full((1,), float(rank))).wait()
    assert gathered.tolist() == [1, 0]
    alone = pg.split_group([0], group_name="alone")
    assert (alone is None) == (rank == 1)
    assert pg.get_group_store() is not None
    for ranks in ([0, 0], [2], [-1]):
        with pytest.raises(sw.errors.InvalidArgument, match="split_group: ranks"):
            pg.split_group(ranks)
    with pytest.raises(sw.errors.Unsupported, match="merge_remote_group: groups of this backend keep their ranks"):
        pg.merge_remote_group(dist.HashStore(), 2, pg.get_group_store())
    with pytest.raises(sw.errors.Unsupported, match="reconfigure: groups of this backend keep their ranks"):
        pg.reconfigure(None)
    assert not pg.supports_reconfigure


def test_groups_are_split(backend):
    backend.run(split)


def patience(rank, size):
    """A timeout that is set for a group is that of the calls behind it."""
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    for place in ("before the ranks meet", "after"):
        g = dist.new_group()
        if place == "after":
            sw.all_reduce(torch.ones(1), group=g)
        set_timeout(timedelta(seconds=1), g)
        if rank == 0:
            start = time.monotonic()
            with pytest.raises(sw.errors.TimedOut):
                sw.all_reduce(torch.ones(1), group=g)
            assert time.monotonic() - start < 50  # and not the 60 s of the group
        dist.barrier()


def test_a_timeout_is_set(backend):
    backend.run(patience)


def refused_timeouts(rank, size):
    """A group keeps no timeout that it refuses."""
    g = dist.new_group()
    for place in ("before the ranks meet", "after"):
        if place == "after":
            sw.all_reduce(torch.ones(1), group=g)
        for kind, words, timeout in (
            (TypeError, "timeout is an int, want a timedelta", 3),
            (TypeError, "timeout is a str, want a timedelta", "3s"),
            (TypeError, "timeout is None, want a timedelta", None),
            (ValueError, "timeout is -1.0, want a positive number of seconds", timedelta(seconds=-1)),
        ):
            with pytest.raises(kind, match=f"set_timeout: {words}"):
                g.set_timeout(timeout)
            if timeout is not None:  # which is the parent's
                with pytest.raises(kind, match=f"split_group: {words}"):
                    g.split_group([0], timeout)
        turned = g.split_group([1, 0], group_name=f"turned {place}")
        x = torch.ones(1)
        turned.allreduce([x]).wait()
        assert x.item() == 2


def test_what_is_no_timeout_is_refused(backend):
    backend.run(refused_timeouts)


def test_a_timeout_of_torchs_group_is_set(worlds):
    worlds.get(2, world.gloo).run(patience)
