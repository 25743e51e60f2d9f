"""What autograd knows of calls: which tensors they have written."""

from __future__ import annotations

import pytest

import switchyard as sw

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402


def refused(call, w):
    """A call that writes w between the forward and the backward of what needs it."""
    x = torch.ones_like(w, requires_grad=True)
    y, before = (x * w).sum(), w._version
    work = call(w)
    if work is not None and hasattr(work, "wait"):
        work.wait()
    assert w._version > before, "autograd does not know of the write"
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def kept(call, r):
    """A call that only reads r."""
    before = r._version
    work = call(r)
    if work is not None and hasattr(work, "wait"):
        work.wait()
    assert r._version == before


def written_by_calls(rank, size):
    n = 2 * size
    for late in (False, True):
        for d in (dist, sw):
            refused(lambda w, d=d, late=late: d.all_gather_into_tensor(w, torch.ones(2), async_op=late), torch.ones(n))
            refused(lambda w, d=d, late=late: d.reduce_scatter_tensor(w, torch.ones(n), async_op=late), torch.ones(2))
            refused(lambda w, d=d, late=late: d.all_reduce(w, async_op=late), torch.ones(3))
            refused(lambda w, d=d, late=late: d.all_to_all_single(w, torch.ones(n), async_op=late), torch.ones(n))
            refused(lambda w, d=d, late=late: d.all_reduce(w[:, 1], async_op=late), torch.ones(3, 2))
            kept(lambda r, d=d, late=late: d.all_gather_into_tensor(torch.ones(n), r, async_op=late), torch.ones(2))
            kept(lambda r, d=d, late=late: d.all_to_all_single(torch.ones(n), r, async_op=late), torch.ones(n))
        refused(lambda w, late=late: dist.all_to_all(list(w.split(2)), [torch.ones(2)] * size, async_op=late), torch.ones(n))
        refused(lambda w, late=late: dist.all_gather(list(w.split(2)), torch.ones(2), async_op=late), torch.ones(n))
        refused(lambda w, late=late: dist.reduce_scatter(w, [torch.ones(2)] * size, async_op=late), torch.ones(2))
        (kept if rank == 0 else refused)(lambda w, late=late: dist.broadcast(w, 0, async_op=late), torch.ones(2))
        (refused if rank == 0 else kept)(lambda w, late=late: dist.reduce(w, 0, async_op=late), torch.ones(2))
        if rank == 0:
            refused(lambda w, late=late: dist.gather(torch.ones(2), list(w.split(2)), 0, async_op=late), torch.ones(n))
        else:
            kept(lambda r, late=late: dist.gather(r, None, 0, async_op=late), torch.ones(2))
        given = [torch.ones(2)] * size if rank == 0 else None
        refused(lambda w, given=given, late=late: dist.scatter(w, given, 0, async_op=late), torch.ones(2))
    with torch.inference_mode():
        frozen = torch.ones(2)
    dist.all_reduce(frozen)
    assert frozen[0] == size


def test_autograd_hears_of_what_calls_write(backend):
    backend.run(written_by_calls)


def written_by_messages(rank, size):
    other = 1 - rank
    for d in (dist, sw):
        if rank == 0:
            kept(lambda r, d=d: d.send(r, other), torch.ones(2))
            refused(lambda w, d=d: d.recv(w, other), torch.ones(2))
        else:
            refused(lambda w, d=d: d.recv(w, other), torch.ones(2))
            kept(lambda r, d=d: d.send(r, other), torch.ones(2))
    at = sw.empty(2)
    at.fill_(7)
    dist.barrier()
    refused(lambda w: sw.get(w, at, other), torch.ones(2))
    kept(lambda r: sw.put(r, at, other), torch.ones(2))
    dist.barrier()
    sw.free(at)
    output = torch.ones(2 * size)
    before = output._version
    sw.explain(output, torch.ones(2 * size))
    assert output._version == before, "what is explained is not written"


def test_autograd_hears_of_what_messages_write(backend):
    backend.run(written_by_messages)


def by_handed_over_calls(rank, size):
    """What gloo does for the backend."""
    refused(lambda w: dist.all_reduce(w.view(torch.int32), dist.ReduceOp.BXOR), torch.ones(2))
    strided = torch.ones(3, 2)
    refused(lambda w: dist.all_reduce(w.view(torch.int32)[:, 1], dist.ReduceOp.BXOR), strided)


def test_autograd_hears_of_what_gloo_writes(backend):
    backend.run(by_handed_over_calls)
