"""Messages, puts, gets and signals between two ranks, on host tensors, in groups of torch's and of Switchyard's."""

from __future__ import annotations

import random

import pytest

import switchyard as sw

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

KINDS = [torch.uint8, torch.bfloat16, torch.float64, torch.complex64, torch.bool]


def tensors(rank, size):
    rnd = random.Random(7)
    for i in range(60):
        src, dst = rnd.sample(range(size), 2)
        shape = [rnd.randrange(1, 40) for _ in range(rnd.randrange(4))]
        want = (torch.arange(torch.Size(shape).numel()) % 2 + i).reshape(shape).to(rnd.choice(KINDS))
        strange = rnd.random() < 0.3  # not row by row
        if rank == src:
            x = want.T.contiguous().T if strange and want.dim() == 2 else want
            (sw.send if i % 2 else lambda *a: sw.isend(*a).wait())(x, dst, None, i)
        elif rank == dst:
            got = torch.zeros_like(want)
            if strange:
                got = torch.zeros(shape[::-1], dtype=want.dtype).permute(tuple(range(len(shape)))[::-1])
            if i % 3:
                assert sw.recv(got, src if i % 3 == 1 else None, tag=i) == src
            else:
                work = sw.irecv(got, src, tag=i)
                work.wait()
                assert work.source_rank() == src
            assert torch.equal(got, want), (i, shape)
    # Both kinds of entries, and all send first.
    mine, got = torch.full((100_000,), float(rank)), [torch.zeros(100_000) for _ in range(size)]
    others = [p for p in range(size) if p != rank]
    (work,) = sw.batch_isend_irecv(
        [sw.P2POp(sw.isend, mine, p) for p in others] + [dist.P2POp(dist.irecv, got[p], p) for p in others]
    )
    work.wait()
    assert [got[p][-1].item() for p in others] == others
    for wrong in (None, 3, "ab"):
        with pytest.raises(TypeError, match=r"p2p_op_list is .*, want a list of P2POp"):
            sw.batch_isend_irecv(wrong)
    dist.barrier()


def subgroups(rank, size):
    group = dist.new_group([size - 1, 0])
    if rank in (0, size - 1):
        peer, x = size - 1 - rank, torch.full((3,), rank)
        sw.send(x, peer, group)
        assert sw.recv(x, group=group) == peer  # as WORLD numbers it
        assert x.tolist() == [peer] * 3
        with pytest.raises(ValueError, match=f"rank {size} is not in the group"):
            sw.send(x, size, group)
    dist.barrier()


def symmetric(rank, size):
    x, after, before = sw.empty(3, dtype=torch.int32), (rank + 1) % size, (rank - 1) % size
    x.fill_(-1)
    sw.barrier()
    sw.put(torch.tensor([rank], dtype=torch.int32), x[1:2], after)
    sw.signal(after)
    sw.wait(before)
    assert x.tolist() == [-1, before, -1]
    got = torch.zeros(3, dtype=torch.int32)
    sw.get(got, x, after)
    assert (got[0], got[2]) == (-1, -1)
    sw.barrier()
    for words, call in (
        ("tensor of shape .* has strides", lambda: sw.put(torch.ones(4, 4).T, x, after)),
        ("stream is 3: streams are for CUDA tensors", lambda: sw.put(x, x, after, stream=3)),
        ("stream is 3: streams are for CUDA tensors", lambda: sw.signal(after, stream=3)),
        ("stream is 3: streams are for CUDA tensors", lambda: sw.send(x, after, stream=3)),
        ("stream is 3: streams are for CUDA tensors", lambda: sw.isend(x, after, stream=3)),
        ("stream is 3: streams are for CUDA tensors", lambda: sw.recv(x, before, stream=3)),
        ("stream is 3: streams are for CUDA tensors", lambda: sw.irecv(x, before, stream=3)),
        ("stream is 3: streams are for CUDA tensors", lambda: sw.batch_isend_irecv([sw.P2POp(sw.isend, x, after)], stream=3)),
        ("stream is 3: streams are for CUDA tensors", lambda: sw.all_reduce(x, stream=3)),
        ("stream is 3: streams are for CUDA tensors", lambda: sw.all_to_all_single(x, x, stream=3)),
        ("stream is 3: streams are for CUDA tensors", lambda: sw.all_gather_into_tensor(x, x, stream=3)),
        ("stream is 3: streams are for CUDA tensors", lambda: sw.reduce_scatter_tensor(x, x, stream=3)),
        ("tensor has 4 bytes, at 12", lambda: sw.get(got[:1], x, after)),
        ("get: tensor is float32, at int32", lambda: sw.get(got.view(torch.float32), x, after)),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    sw.free(x)


@pytest.mark.parametrize("case", [tensors, subgroups, symmetric], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["gloo", "backend"])
def test_pairs_of_tensors(worlds, kind, case):
    import world

    worlds.get(3, getattr(world, kind)).run(case)
