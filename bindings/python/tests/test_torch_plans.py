"""Plans of collectives, for torch tensors of the host."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from test_plans import all_reduce, all_to_all, noted, spoiled

import switchyard as sw
from switchyard import errors

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402


def chosen(rank, size, path):
    group = dist.new_group(timeout=timedelta(seconds=60))
    comm = sw.communicator(group, plans=[path, all_to_all(size)], algorithm="own")
    assert comm.size == size
    for x in (torch.ones(9), torch.ones(3, 5, dtype=torch.int64), torch.ones(2, 3).t()):
        assert sw.explain(x, x, group=group, call="all_reduce").startswith("plan own (forced)")
        sw.all_reduce(x, group=group)
        assert (x == size).all()
        dist.all_reduce(x, group=group)  # Switchyard's where the group is of its backend
        assert (x == size * size).all()
    assert noted("own")
    x = torch.arange(4 * size, dtype=torch.float64).reshape(4 * size, 1) + 100 * rank
    y, want = torch.zeros_like(x), torch.zeros_like(x)
    dist.all_gather(parts := [torch.zeros_like(x) for _ in range(size)], x, group=group)
    torch.cat([part[4 * rank : 4 * rank + 4] for part in parts], out=want)
    assert sw.all_to_all_by_plan(y, x, group) is None
    assert torch.equal(y, want)
    sw.all_to_all_by_plan(x, x, group, async_op=True).wait()
    assert torch.equal(x, want)
    assert sw.explain(y, x, group=group, call="all_to_all_by_plan").startswith("plan direct")
    for call, output, input in (("reduce_scatter_tensor", y[:4], x), ("all_gather_into_tensor", x, y[:4])):
        assert "one-shot" in sw.explain(output, input, group=group, call=call)
    with pytest.raises(errors.InvalidArgument, match="as many rows"):
        sw.all_to_all_by_plan(y[1:], x[1:], group)
    with pytest.raises(errors.InvalidType, match="dtype"):
        sw.all_to_all_by_plan(y.float(), x, group)
    with pytest.raises(errors.Unsupported, match="on meta: plans are for dense tensors, both of the host"):
        sw.all_to_all_by_plan(y, x.to("meta"), group)
    with pytest.raises(errors.InvalidArgument, match="is in use"):
        sw.communicator(group, plans=[path])
    dist.barrier()


def a_file(tmp_path, size):
    path = tmp_path / "own.json"
    path.write_text(json.dumps(all_reduce(size)))
    return path


def test_a_process_group_has_plans(gloo, tmp_path):
    gloo.run(chosen, a_file(tmp_path, gloo.size))


def test_a_group_of_the_backend_has_plans(backend, tmp_path):
    backend.run(chosen, a_file(tmp_path, 2))


def refused(rank, size):
    for plan, said in spoiled(size):
        group = dist.new_group(timeout=timedelta(seconds=60))
        with pytest.raises(errors.InvalidArgument) as e:
            sw.communicator(group, plans=[plan if rank == 0 else all_reduce(size)])
        assert said in str(e.value)
        assert ("rank 0 refused: " in str(e.value)) == (rank != 0)
        dist.barrier()
        x = torch.ones(3)
        sw.communicator(group, plans=[all_reduce(size)], algorithm="own")
        sw.all_reduce(x, group=group)
        assert x.tolist() == [size] * 3


def test_wrong_plans_are_refused_on_all_ranks(gloo):
    gloo.run(refused)


def test_no_plans_without_a_process_group():
    with pytest.raises(errors.InvalidArgument, match=r"plans and algorithm are options of switchyard\.init"):
        sw.communicator(plans=[])
