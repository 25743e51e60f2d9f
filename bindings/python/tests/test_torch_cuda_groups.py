"""Groups and subgroups on GPUs, with a process group of torch and without, and what goes to torch."""

from __future__ import annotations

import warnings

import pytest
import world
from cuda_rig import CUDA, ready

import switchyard as sw
from switchyard import errors

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402


def groups(rank, size):
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    pgs = [dist.new_group(h) for h in halves]
    mine, other = (pgs[0], pgs[1]) if rank in halves[0] else (pgs[1], pgs[0])
    members = halves[0] if rank in halves[0] else halves[1]
    y = torch.empty(len(members), device=CUDA)
    sw.all_to_all_single(y, torch.full((len(members),), float(rank), device=CUDA), group=mine)
    assert y.tolist() == members
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert sw.all_to_all_single(y, y, group=other) is None
    assert len(caught) == 1
    backwards = dist.new_group(list(reversed(range(size))))
    sw.communicator(backwards, device=CUDA)  # made ready
    z = torch.empty(size, device=CUDA)
    x = torch.arange(float(size), device=CUDA) + 10 * rank
    place = dist.get_rank(backwards)
    ready()
    sw.all_to_all_single(z, x, group=backwards)
    assert z.tolist() == [10 * dist.get_global_rank(backwards, p) + place for p in range(size)]
    ready()
    sw.all_to_all_single(z, x)
    assert z.tolist() == [10 * p + rank for p in range(size)]
    dist.destroy_process_group(backwards)
    sub = sw.communicator().split(rank % 2)
    y = torch.empty(sub.size, device=CUDA)
    sw.all_to_all_single(y, torch.full((sub.size,), float(rank), device=CUDA), group=sub)
    assert y.tolist() == [float(p) for p in range(rank % 2, size, 2)]
    sw.synchronize(sub)
    sub.close()
    with pytest.raises(errors.Closed):
        sw.all_to_all_single(y, y.clone(), group=sub)
    ready()


def test_groups_and_subgroups(cuda):
    cuda.run(groups)


def elsewhere(rank, size):
    # What the project has no kernels for goes to torch's backend.
    x = torch.full((5,), rank + 1.0, device=CUDA)
    if dist.get_backend() != "gloo":
        small = torch.full((5,), rank - 3, device=CUDA, dtype=torch.int8)
        sw.all_reduce(small, "max")
        assert small.tolist() == [size - 4] * 5
    torch.cuda._sleep(5_000_000)
    x.fill_(rank)
    sw.barrier()
    assert torch.cuda.current_stream().query()  # as with NCCL's barrier


def test_what_goes_to_torch(cuda):
    cuda.run(elsewhere)


def incapable(rank, size):
    # GPUs that cannot exchange: torch's backend does it, and says so once.
    group = dist.new_group()
    comm = sw.communicator(group)

    def refuse(number, options):
        comm._no_gpus[number] = errors.Unsupported("switchyard: no way to a peer")
        raise comm._no_gpus[number]

    comm._open_gpu = refuse
    x, y = torch.arange(float(size), device=CUDA) + 10 * rank, torch.empty(size, device=CUDA)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            sw.all_to_all_single(y.zero_(), x, group=group)
            assert y.tolist() == [10.0 * p + rank for p in range(size)]
    said = [str(w.message) for w in caught if "switchyard" in str(w.message)]
    assert said == (["switchyard: exchanges of CUDA tensors go to torch: switchyard: no way to a peer"] if rank == 0 else [])
    with pytest.raises(errors.Unsupported, match="no way to a peer"):
        sw.communicator(group, device=CUDA)


def test_gpus_that_cannot_exchange(cuda):
    cuda.run(incapable)


def without_process_group(rank, size):
    assert not dist.is_initialized()
    out = torch.empty(size, device=CUDA)
    sw.all_to_all_single(out, torch.full((size,), float(rank), device=CUDA))
    assert out.tolist() == list(range(size))
    sw.synchronize()
    x = torch.full((2,), rank + 1.0, device=CUDA)
    sw.all_reduce(x)
    assert x.tolist() == [size * (size + 1) / 2] * 2
    with pytest.raises(errors.Unsupported, match="no process group"):
        sw.all_reduce(torch.ones(2, dtype=torch.int16, device=CUDA))
    with pytest.raises(errors.Unsupported, match="cuda:77"):
        sw.communicator()._gpu(77)
    with pytest.raises(errors.Unsupported, match="cuda:77"):  # is not asked for again
        sw.communicator()._gpu(77)
    # The sizes do not agree. Later calls work.
    for n in (1_000_000, 1000):
        rows = [n] * size
        sent = list(rows)
        if rank == 0:
            sent[1] += 1
        sw.barrier()
        sw.all_to_all_single(torch.empty(n * size, device=CUDA), torch.empty(sum(sent), device=CUDA), rows, sent)
        hears = rank == 1 or (rank == 0 and n == 1_000_000)  # the sender of few bytes with its next call
        if hears:
            with pytest.raises(errors.Mismatch, match=f"{4 * n + 4}.*{4 * n}|{4 * n}.*{4 * n + 4}"):
                sw.synchronize()
        torch.cuda.synchronize()
        sw.barrier()
        sw.all_to_all_single(out, torch.full((size,), rank + 5.0, device=CUDA))
        assert out.tolist() == [p + 5 for p in range(size)]
        if rank == 0 and not hears:
            with pytest.raises(errors.Mismatch, match=f"{4 * n + 4}"):
                sw.synchronize()
        sw.synchronize()


def test_torch_without_a_process_group(worlds):
    worlds.get(2, world.cuda_plain).run(without_process_group)
