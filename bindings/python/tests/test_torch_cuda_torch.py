"""torch's operators, compiled graphs, backends and training on GPUs."""

from __future__ import annotations

import pytest
import test_torch_backend as backend
import test_torch_moe as moe
import test_torch_operators as host
import world
from cuda_rig import CUDA, ready, reference

import switchyard as sw
from switchyard import errors

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from switchyard._torch.operators import exchanges  # noqa: E402


def replicas(rank, size):
    import switchyard.torch as st

    def train(hook):
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(8, 3000), torch.nn.Tanh(), torch.nn.Linear(3000, 1)).cuda()
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
        if hook:
            model.register_comm_hook(None, st.average_hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(4):
            g = torch.Generator().manual_seed(10 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(16, 8, generator=g).cuda()).square().mean().backward()
            optimizer.step()
        return [p.detach().cpu() for p in model.parameters()]

    if dist.get_backend() == "nccl":
        for a, b in zip(train(True), train(False)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_hook_of_distributed_data_parallel(cuda):
    cuda.run(replicas)


def operators(rank, size):
    import switchyard.torch as st

    name = dist.group.WORLD.group_name
    send = [[1 + (i + 2 * j) % 3 for j in range(size)] for i in range(size)]
    recv, send = [send[i][rank] for i in range(size)], send[rank]
    ops = torch.ops.switchyard
    x = torch.randn(sum(send), 3, device=CUDA, requires_grad=True)
    for op, arguments in (
        (ops.all_to_all_single.default, (x, recv, send, name)),
        (ops.all_to_all_single_.default, (torch.empty(sum(recv), 3, device=CUDA), x.detach(), recv, send, name)),
    ):
        torch.library.opcheck(op, arguments)
    # The gradient of an exchange is the exchange back.
    weight = torch.arange(sum(recv) * 3.0, device=CUDA).view(-1, 3) + rank
    (st.all_to_all_single(x, recv, send) * weight).sum().backward()
    back = torch.empty_like(x)
    reference(back, weight, send, recv)
    assert torch.equal(x.grad, back)

    def layer(x):
        y = st.all_to_all_single(x * 2, recv, send)
        z = torch.empty_like(x)
        sw.all_to_all_single(z, y.relu(), send, recv)
        return z + 1

    x = torch.randn(sum(send), 3, device=CUDA)
    ready()
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


def test_operators_and_compiled_graphs(cuda):
    cuda.run(operators)


def as_backend(rank, size):
    import torch.distributed._functional_collectives as fc

    assert dist.get_backend() == "switchyard"
    x = torch.arange(2.0 * size, device=CUDA) + 10 * rank
    y = torch.empty(2 * size, device=CUDA)
    dist.all_to_all_single(y, x)
    assert y.view(size, 2)[:, 0].tolist() == [10 * p + 2 * rank for p in range(size)]
    work = dist.all_to_all_single(y.zero_(), x, [2] * size, [2] * size, async_op=True)
    work.wait()
    assert y.view(size, 2)[:, 1].tolist() == [10 * p + 2 * rank + 1 for p in range(size)]
    z = fc.all_to_all_single(x, [2] * size, [2] * size, dist.group.WORLD)
    assert z.tolist() == y.tolist()
    c = torch.empty(size, device=CUDA, dtype=torch.cfloat)
    dist.all_to_all_single(c, torch.full_like(c, rank + 1j))
    assert c.tolist() == [p + 1j for p in range(size)]
    gpu = sw.communicator()._gpu(torch.cuda.current_device())
    assert len(gpu._shapes) >= 1  # what was unusual was ours, too
    dist.barrier()
    assert not gpu.reduces  # exchanges do without
    with pytest.raises(errors.Error, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        dist.all_reduce(torch.ones(3, device=CUDA))
    with pytest.raises(ValueError, match="contiguous"):
        dist.all_to_all_single(torch.empty(size, 2, device=CUDA), torch.empty(2, size, device=CUDA).t())
    h = torch.tensor([rank + 1.0])  # host tensors next to them
    dist.all_reduce(h)
    assert h.item() == size * (size + 1) / 2
    if torch.cuda.device_count() >= size:
        g = h.cuda()
        dist.all_reduce(g)
        dist.broadcast(g, 0)
        assert g.item() == h.item() * size
    graph = torch.cuda.CUDAGraph()
    dist.barrier()
    with torch.cuda.graph(graph):
        dist.all_to_all_single(y, x)
    x.add_(100)
    graph.replay()
    assert y.view(size, 2)[:, 0].tolist() == [100 + 10 * p + 2 * rank for p in range(size)]
    dist.barrier()


def test_backend(worlds):
    worlds.get(2, world.cuda_backend).run(as_backend)


def by_operators(rank, size):
    """Calls of the backend are operators, as those of switchyard are."""
    x, part = torch.arange(4.0 * size, device=CUDA) + rank, torch.arange(4.0, device=CUDA) + rank
    dist.all_to_all_single(torch.empty_like(x), x)
    dist.all_reduce(x.clone())
    made = exchanges(sw.communicator(), torch.cuda.current_device())
    total = sum(range(size))
    wants = [
        (lambda y, **how: dist.all_to_all_single(y, x, **how), x,
         torch.cat([torch.arange(4.0) + 4 * rank + p for p in range(size)])),
        (lambda y, **how: dist.all_to_all_single(y, x, [4] * size, [4] * size, **how), x,
         torch.cat([torch.arange(4.0) + 4 * rank + p for p in range(size)])),
        (lambda y, **how: dist.all_reduce(y.copy_(x), **how), x, torch.arange(4.0 * size) * size + total),
        (lambda y, **how: dist.reduce_scatter_tensor(y, x, **how), part, (torch.arange(4.0) + 4 * rank) * size + total),
        (lambda y, **how: dist.all_gather_into_tensor(y, part, **how), x,
         torch.cat([torch.arange(4.0) + p for p in range(size)])),
    ]  # fmt: skip
    for call, like, want in wants:
        for how in ({}, {"async_op": True}):
            y = torch.zeros_like(like)
            names = ("aside",) if how else ("make", "reduce", "scatter", "gather")
            with host.Counting(made, *names) as counting:
                work = call(y, **how)
                assert counting.served == counting.asked == 1
            if how:
                work.wait()
                assert work.is_completed() or work.result()[0] is y
            assert y.tolist() == want.tolist()


@host.needs_them
def test_backend_by_operators(worlds):
    worlds.get(2, world.cuda_backend).run(by_operators)


def as_backend_several(rank, size):
    pg = dist.group.WORLD
    gpu = sw.communicator()._gpu(torch.cuda.current_device())
    reduces = gpu.reduces  # after tests before this one
    wrapped, pg._wrapped = pg._wrapped, None  # all of it is ours
    try:
        backend.lists(CUDA, rank, size)
        assert gpu.reduces == reduces
        backend.coalesced(CUDA, rank, size)
        assert gpu.reduces
    finally:
        pg._wrapped = wrapped
    dist.barrier()
    if torch.cuda.device_count() < size:
        return  # NCCL refuses to share a GPU
    # Calls between the old style's start and end: what is NCCL's is one batch, what is ours goes at once.
    x, y = torch.arange(float(size), device=CUDA) + 10 * rank, torch.empty(size, device=CUDA)
    manager = dist.distributed_c10d._coalescing_manager
    with manager(device=torch.device(CUDA, torch.cuda.current_device()), async_ops=True) as cm:
        dist.all_to_all_single(y, x)
    cm.wait()
    assert y.tolist() == [10 * p + rank for p in range(size)]
    got, given = torch.zeros(5, device=CUDA), torch.full((5,), float(rank), device=CUDA)
    after, before = (rank + 1) % size, (rank - 1) % size
    with manager(device=torch.device(CUDA, torch.cuda.current_device()), async_ops=True) as cm:
        dist.isend(given, after)
        dist.irecv(got, before)
    cm.wait()
    assert got.tolist() == [before] * 5


def test_backend_on_lists_and_coalesced_calls(worlds):
    worlds.get(2, world.cuda_backend).run(as_backend_several)


def as_backend_sharded(rank, size):
    pg = dist.group.WORLD
    dist.barrier()
    wrapped, pg._wrapped = pg._wrapped, None
    try:
        backend.sharded(CUDA, rank, size)
    finally:
        pg._wrapped = wrapped
    dist.barrier()


def test_fully_sharded_data_parallel(worlds):
    if torch.cuda.device_count() < 2:
        pytest.skip("ranks that share a GPU would wait for each other in the middle of a step")
    worlds.get(2, world.cuda_backend).run(as_backend_sharded)


def trained(rank, size, steps):
    example = moe.load()
    if size > 2:
        # A sum of two has one order, a sum of more has several: NCCL and Switchyard round it differently. So both runs sum
        # gradients and losses by Switchyard, in one order (R2), and what differs is the exchange, which moves bytes.
        class OneOrder(example.Trainer):
            def __init__(self, args, impl):
                super().__init__(args, impl)
                self.module = sw

        example.Trainer = OneOrder
    losses = {}
    for impl in ("torch", "switchyard"):
        arguments = ["--device", CUDA, "--impl", impl, "--steps", str(steps), "--batch", "4", "--length", "32"]
        losses.update(example.train(example.arguments(arguments), lambda line: None))
    return losses


def test_training_gives_the_same_losses(cuda):
    losses = cuda.run(trained, 200, timeout=600)[0]
    assert len(losses["torch"]) == 200
    assert losses["torch"] == losses["switchyard"]  # to the last bit
    assert losses["torch"][-1] < losses["torch"][0] - 0.2
