"""What autograd knows of calls: which tensors they have written, and which gradients can be differentiated again."""

from __future__ import annotations

import pytest

import switchyard as sw

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

import switchyard.layers as layers  # noqa: E402


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


REFUSED = "have no gradients: second derivatives through it are not there"


def second_derivatives(rank, size):
    hidden, tokens = 8, 4
    d = sw.Dispatcher(2 * size, 2, hidden, max_tokens=16)
    idx = torch.arange(2 * tokens).view(tokens, 2) % (2 * size)
    matrix = torch.randn(hidden, hidden)

    def layer(x, weights, act=torch.tanh):
        got = d.dispatch(x, idx, weights)
        return d.combine(act(got.rows @ matrix), got)

    # The penalty of the gradients of tokens goes through experts that are not linear.
    x = torch.randn(tokens, hidden, requires_grad=True)
    y = layer(x, torch.ones(tokens, 2))
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(sw.errors.Unsupported, match=REFUSED):
        (y.sum() + (dx**2).sum()).backward()
    # What is linear has no second derivative that would be missing.
    y = layer(x, torch.ones(tokens, 2), lambda rows: 2 * rows)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert not dx.requires_grad
    # The gradients of rows depend on the weights, and those of weights on the rows.
    weights = torch.rand(tokens, 2, requires_grad=True)
    y = layer(x, weights, lambda rows: 2 * rows)
    dx, dw = torch.autograd.grad(y.sum(), (x, weights), create_graph=True)
    for part in (dx, dw):
        with pytest.raises(sw.errors.Unsupported, match=REFUSED):
            (part**2).sum().backward(retain_graph=True)
    # Given weights, and those that come with the rows.
    beside = sw.Dispatcher(2 * size, 2, hidden, max_tokens=16, row_weights=True)
    got = beside.dispatch(x, idx, weights)
    y = beside.combine(got.rows * got.row_weights[:, None], got, weighted=False)
    dx, dw = torch.autograd.grad(y.sum(), (x, weights), create_graph=True)
    with pytest.raises(sw.errors.Unsupported, match="gradients of a dispatch " + REFUSED):
        ((dx**2).sum() + (dw**2).sum()).backward()
    # First derivatives stay what they are, also where a graph of them is made.
    firsts = []
    for graph in (False, True):
        x.grad = None
        layer(x, torch.ones(tokens, 2)).sum().backward(create_graph=graph)
        firsts.append(x.grad.detach().clone())
    torch.testing.assert_close(*firsts)
    model = layers.MoE(d, 16)
    y = model(x, idx, torch.ones(tokens, 2))
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(sw.errors.Unsupported, match=REFUSED):
        (dx**2).sum().backward()


def test_second_derivatives_are_refused(gloo):
    gloo.run(second_derivatives)


def compiled(rank, size):
    import switchyard._torch.moe_ops  # noqa: F401

    hidden, tokens = 8, 4
    d = sw.Dispatcher(2 * size, 2, hidden, max_tokens=16)
    idx = torch.arange(2 * tokens).view(tokens, 2) % (2 * size)
    x = torch.randn(tokens, hidden, requires_grad=True)
    rows, handle, *_ = torch.ops.switchyard.dispatch(x, None, idx, None, d.name)
    y = torch.ops.switchyard.combine(torch.tanh(rows), handle, None, None, None, None, 0, tokens, d.name)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="switchyard"):
        (dx**2).sum().backward()


def test_second_derivatives_of_operators_are_refused(gloo):
    gloo.run(compiled)


def exchanged(rank, size):
    import switchyard.torch as st

    x = torch.randn(2 * size, 3, requires_grad=True)
    for call in (st.all_to_all_single, st.all_reduce, st.all_gather_into_tensor, st.reduce_scatter_tensor):
        (dx,) = torch.autograd.grad(call(torch.tanh(x)).pow(2).sum(), x, create_graph=True)
        (again,) = torch.autograd.grad((dx**2).sum(), x)
        assert torch.isfinite(again).all()
        assert again.abs().sum() > 0


def test_second_derivatives_of_collectives(gloo):
    gloo.run(exchanged)
