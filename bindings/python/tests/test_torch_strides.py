"""Tensors whose numbers do not lie one after the other, in every call of the backend."""

from __future__ import annotations

import pytest

import switchyard as sw

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

R = dist.ReduceOp
#: Operators of the library, and of gloo alone.
OPS = [(torch.float32, R.SUM), (torch.int32, R.BXOR), (torch.bool, R.BOR)]


def column(values, dtype):
    """A column of a matrix, and a check that its neighbours stay what they are."""
    m = torch.full((len(values), 3), 9, dtype=torch.int64)
    m[:, 1] = torch.tensor(values)
    m = m.to(dtype)
    edge = m[:, ::2].clone()

    def same(expected):
        assert m[:, 1].tolist() == torch.tensor(expected).to(dtype).tolist(), (m, expected, dtype)
        assert torch.equal(m[:, ::2], edge)

    return m[:, 1], same


def one(value, dtype):
    """One element of a matrix, whose stride is 3."""
    m = torch.zeros(3, 3, dtype=dtype)
    m[1, 1] = value
    x = m[1:2, 1]
    assert (x.stride(), x.is_contiguous()) == ((3,), True)
    return x


def combined(values, op):
    answer = values[0]
    for v in values[1:]:
        answer = answer + v if op == R.SUM else answer ^ v if op == R.BXOR else answer | v
    return answer


def done(work):
    if work is not None:
        work.wait()


def reductions(rank, size):
    for dtype, op in OPS:
        rows = [[int(dtype is not torch.bool) * p + (p + i) % 2 for i in range(2)] for p in range(size)]
        sums = [combined([r[i] for r in rows], op) for i in range(2)]
        for late in (False, True):
            for d in (dist, sw):
                if d is sw and op == R.BOR:
                    continue
                x, same = column(rows[rank], dtype)
                done(d.all_reduce(x, op, async_op=late))
                same(sums)
            x, same = column(rows[rank], dtype)
            done(dist.reduce(x, 1, op, async_op=late))
            if rank == 1:
                same(sums)
            x, same = column(rows[rank][:1] * size, dtype)
            y, kept = column([0], dtype)
            done(dist.reduce_scatter_tensor(y, x, op, async_op=late))
            kept([combined([r[0] for r in rows], op)])
            y, kept = column([0, 0], dtype)
            done(dist.reduce_scatter(y, [column(rows[rank], dtype)[0] for _ in range(size)], op, async_op=late))
            kept(sums)
            x = one(rows[rank][0], dtype)
            done(dist.all_reduce(x, op, async_op=late))
            assert x.item() == sums[0]
    # Ranks whose numbers lie in another order are combined by their place in the tensor.
    m = torch.arange(6.0).view(2, 3)
    x = m.clone() if rank else m.t().contiguous().t()
    dist.all_reduce(x)
    assert torch.equal(x, size * m)


def test_reductions_of_strided_tensors(backend):
    backend.run(reductions)


def moves(rank, size):
    dtypes = (torch.float32, torch.bool, torch.complex64)
    for dtype in dtypes:
        for late in (False, True):
            x, same = column([rank, 1], dtype)
            done(dist.broadcast(x, 1, async_op=late))
            same([1, 1])
            x, same = column([0] * size, dtype)
            done(dist.all_gather_into_tensor(x, one(rank, dtype), async_op=late))
            same([*range(size)])
            outs = [column([0], dtype) for _ in range(size)]
            done(dist.all_gather([o[0] for o in outs], one(rank, dtype), async_op=late))
            for p, (_, same) in enumerate(outs):
                same([p])
            outs = [column([0], dtype) for _ in range(size)]
            done(dist.gather(one(rank, dtype), [o[0] for o in outs] if rank == 0 else None, 0, async_op=late))
            for p, (_, same) in enumerate(outs):
                same([p if rank == 0 else 0])
            y, same = column([0], dtype)
            done(dist.scatter(y, [one(p, dtype) for p in range(size)] if rank == 0 else None, 0, async_op=late))
            same([rank])
            y = one(0, dtype)
            done(dist.scatter(y, [one(p, dtype) for p in range(size)] if rank == 0 else None, 0, async_op=late))
            assert y.item() == torch.tensor(rank).to(dtype).item()
            outs = [column([0], dtype) for _ in range(size)]
            done(dist.all_to_all([o[0] for o in outs], [one(rank, dtype) for _ in range(size)], async_op=late))
            for p, (_, same) in enumerate(outs):
                same([p])
            outs = [column([0, 0], dtype) for _ in range(size)]
            done(dist.all_to_all([o[0] for o in outs], [column([rank, 1], dtype)[0] for _ in range(size)], async_op=late))
            for p, (_, same) in enumerate(outs):
                same([p, 1])
        if rank == 0:
            dist.send(column([3, 1], dtype)[0], 1)
        elif rank == 1:
            x, same = column([0, 0], dtype)
            dist.recv(x, 0)
            same([3, 1])


def test_moves_of_strided_tensors(backend):
    backend.run(moves)


def apart(rank, size):
    """A group whose calls all go to gloo."""
    import switchyard._core.joining as joining

    own = joining.place
    joining.place = lambda: f"host/{rank % 2}"  # two users
    try:
        g = dist.new_group(backend="switchyard")
        for late in (False, True):
            for d in (dist, sw):
                x, same = column([rank, 1], torch.float32)
                done(d.all_reduce(x, group=g, async_op=late))
                same([sum(range(size)), size])
                x, same = column([0] * size, torch.float32)
                done(d.all_gather_into_tensor(x, one(rank, torch.float32), group=g, async_op=late))
                same([*range(size)])
            x, same = column([rank, 1], torch.float32)
            done(dist.broadcast(x, 1, group=g, async_op=late))
            same([1, 1])
            outs = [column([0, 0], torch.float32) for _ in range(size)]
            ins = [column([rank, 1], torch.float32)[0] for _ in range(size)]
            done(dist.all_to_all([o[0] for o in outs], ins, group=g, async_op=late))
            for p, (_, same) in enumerate(outs):
                same([p, 1])
        dist.destroy_process_group(g)
    finally:
        joining.place = own


def test_strided_tensors_of_groups_that_gloo_serves(backend):
    backend.run(apart)


def by_gloo(rank, size):
    """A process group of gloo's own, which is asked where the library does not have the operator."""
    for late in (False, True):
        x, same = column([rank, 1], torch.int32)
        done(sw.all_reduce(x, "bxor", async_op=late))
        same([combined([*range(size)], R.BXOR), combined([1] * size, R.BXOR)])


def test_strided_tensors_of_calls_that_go_to_gloo(gloo):
    gloo.run(by_gloo)


def shared_elements(rank, size):
    x = torch.ones(1).expand(3)
    with pytest.raises(sw.errors.InvalidArgument, match="elements share memory"):
        dist.all_reduce(x)
    with pytest.raises(sw.errors.InvalidArgument, match="elements share memory"):
        dist.all_reduce(torch.ones(1, dtype=torch.int32).expand(3), R.BXOR)
    dist.barrier()


def test_elements_that_share_memory_are_not_written(backend):
    backend.run(shared_elements)
