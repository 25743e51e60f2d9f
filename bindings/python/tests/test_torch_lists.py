"""Collectives of lists and of a root on host tensors, which the backend of torch.distributed serves itself."""

from __future__ import annotations

import contextlib

import pytest
from world import backend as on_backend

import switchyard as sw

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402


@pytest.fixture(params=[2, 3], ids="{} ranks".format)
def ranks(worlds, request):
    return worlds.get(request.param, on_backend)


SHAPES = [(), (1,), (0,), (5,), (3, 4), (1000, 33)]
DTYPES = [torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.complex64]


def of(rank, shape, dtype):
    return torch.full(shape, 1 + rank, dtype=dtype)


def against_a_model(rank, size):
    comm = sw.communicator()
    before, calls = comm._ran.value, 0
    total = size * (size + 1) // 2
    for shape in SHAPES:
        for dtype in DTYPES:
            want, mine = [of(p, shape, dtype) for p in range(size)], of(rank, shape, dtype)
            # Lists whose tensors do not lie row by row, as far as there are rows.
            got = [torch.zeros(shape[::-1], dtype=dtype).permute(tuple(range(len(shape)))[::-1]) for _ in range(size)]
            dist.all_gather(got, mine)
            assert all(map(torch.equal, got, want)), ("all_gather", shape, dtype)
            out = torch.zeros(shape, dtype=dtype)
            dist.reduce_scatter(out, [mine + p for p in range(size)])
            assert torch.equal(out, torch.full(shape, total + rank * size, dtype=dtype)), ("reduce_scatter", shape, dtype)
            calls += 2
            for root in range(size):
                for x in got:
                    x.zero_()
                dist.gather(mine, got if rank == root else None, root)
                assert rank != root or all(map(torch.equal, got, want)), ("gather", shape, dtype, root)
                out = torch.zeros(shape, dtype=dtype)
                dist.scatter(out, want if rank == root else None, root)
                assert torch.equal(out, mine), ("scatter", shape, dtype, root)
                calls += 2
                if dtype.is_complex:  # torch does not reduce these to a root
                    continue
                kept = mine.clone()
                dist.reduce(kept, root)
                assert torch.equal(kept, torch.full(shape, total, dtype=dtype) if rank == root else mine), (
                    "reduce",
                    shape,
                    dtype,
                )
                calls += 1
    assert comm._ran.value - before == calls  # none was gloo's


def at_the_same_time(rank, size):
    got = [[torch.zeros(7) for _ in range(size)] for _ in range(20)]
    sums = [torch.zeros(7) for _ in range(20)]
    parts = [torch.zeros(7) for _ in range(20)]
    work = []
    for i in range(20):
        mine = torch.full((7,), float(rank + i))
        work.append(dist.all_gather(got[i], mine, async_op=True))
        work.append(dist.reduce_scatter(sums[i], [mine] * size, async_op=True))
        root = i % size
        work.append(dist.scatter(parts[i], [mine] * size if rank == root else None, root, async_op=True))
    for each in work:
        each.wait()
    for i in range(20):
        assert [x[0].item() for x in got[i]] == [p + i for p in range(size)]
        assert sums[i][0].item() == sum(p + i for p in range(size))
        assert parts[i][0].item() == i % size + i


def disagreements(rank, size):
    for list_of, call in (
        ("output_tensors", lambda x: dist.all_gather(x, torch.ones(3))),
        ("input_tensors", lambda x: dist.reduce_scatter(torch.ones(3), x)),
    ):
        with pytest.raises(ValueError, match=rf"{list_of}\[1\] has 2 elements, this rank's tensor 3"):
            call([torch.ones(3), torch.ones(2), *[torch.ones(3)] * (size - 2)])
        with pytest.raises(ValueError, match=f"{list_of} has {size + 1} tensors for {size} ranks"):
            call([torch.ones(3)] * (size + 1))
    # What the root expects and what rank 1 sends are of different sizes, too large for packets: both get both in this call.
    n, out = 1 << 20, [torch.zeros(1 << 20) for _ in range(size)]
    if rank < 2:
        with pytest.raises(sw.errors.Error, match=f"{4 * n}.*{4 * n + 20}|{4 * n + 20}.*{4 * n}"):
            dist.gather(torch.ones(n + 5 * rank), out if rank == 0 else None)
    else:
        with contextlib.suppress(sw.errors.Error):
            dist.gather(torch.ones(n))
    out = [torch.zeros(3) for _ in range(size)]
    dist.gather(torch.full((3,), float(rank)), out if rank == 0 else None)
    assert rank != 0 or [x[0].item() for x in out] == list(range(size))


def a_rank_that_hears_late(rank, size):
    """Rank 1 sends 20 bytes where rank 0 expects 12, so little that it need not wait. It hears of that in its next call at the
    latest, which all others make as if nothing had been wrong."""
    for n in range(20):
        out = [torch.zeros(3) for _ in range(size)]
        late = None
        if rank == 0:
            with pytest.raises(sw.errors.Mismatch, match="sends 20 bytes to rank 0, which expects 12"):
                dist.gather(torch.ones(3), out)
        elif rank == 1:
            try:
                dist.gather(torch.ones(5))
            except sw.errors.Mismatch as err:
                late = err
        else:
            dist.gather(torch.ones(3))
        mine, all_equal = torch.full((3,), float(rank + n)), [float(p + n) for p in range(size)]
        if rank == 1 and late is None:
            with pytest.raises(sw.errors.Mismatch, match="sends 20 bytes to rank 0, which expects 12"):
                dist.gather(mine)
        else:
            dist.gather(mine, out if rank == 0 else None)
            assert rank != 0 or [x[0].item() for x in out] == all_equal
        dist.gather(mine, out if rank == 0 else None)
        assert rank != 0 or [x[0].item() for x in out] == all_equal


@pytest.mark.parametrize(
    "case", [against_a_model, at_the_same_time, disagreements, a_rank_that_hears_late], ids=lambda f: f.__name__
)
def test_lists(ranks, case):
    ranks.run(case)
