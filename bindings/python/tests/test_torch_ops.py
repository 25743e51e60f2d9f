"""Gradients, the operators' fake kernels and compiled graphs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import switchyard as sw

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402


def splits(rank: int, size: int) -> tuple[list[int], list[int]]:
    send = [[1 + (i + 2 * j) % 3 for j in range(size)] for i in range(size)]
    return [send[i][rank] for i in range(size)], send[rank]


def gradients(rank, size):
    import torch.distributed.nn.functional as reference
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    import switchyard.torch as st

    recv, send = splits(rank, size)
    weight = torch.arange(sum(recv) * 3.0).view(-1, 3) + rank

    def run(call):
        x = (torch.arange(sum(send) * 3.0).view(-1, 3) * (rank + 1)).requires_grad_()
        y = call(x)
        (y * weight).sum().backward()
        return y.detach(), x.grad

    for a, b in zip(
        run(lambda x: st.all_to_all_single(x, recv, send)),
        run(lambda x: all_to_all_single_autograd(x, recv, send, dist.group.WORLD).wait()),
    ):
        assert torch.equal(a, b)
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    g = torch.randn(4, 2, dtype=torch.float64)
    st.all_reduce(x).backward(g)
    other = x.detach().clone().requires_grad_()
    reference.all_reduce(other).backward(g)
    torch.testing.assert_close(x.grad, other.grad)
    x.grad = None
    st.all_reduce(x, dist.ReduceOp.AVG).backward(g)
    torch.testing.assert_close(x.grad, other.grad / size)
    with pytest.raises(sw.errors.Unsupported, match="no gradient"):
        st.all_reduce(x, "max").backward(g)
    # A gather and the scatter of what it gathered: each is the other's gradient.
    x = torch.randn(2, 3, requires_grad=True)
    y = st.all_gather_into_tensor(x)
    assert y.shape == (2 * size, 3)
    y.backward(torch.ones_like(y) * (rank + 1))
    assert torch.equal(x.grad, torch.full((2, 3), float(sum(range(1, size + 1)))))
    z = torch.randn(2 * size, 3, requires_grad=True)
    for op, factor in (("sum", 1), ("avg", size)):
        z.grad = None
        out = st.reduce_scatter_tensor(z, op)
        out.backward(torch.full_like(out, rank + 1.0))
        assert torch.equal(z.grad[:, 0], torch.arange(1.0, size + 1).repeat_interleave(2) / factor)


def test_gradients(gloo):
    gloo.run(gradients)


def checked(rank, size):
    import switchyard.torch as st

    name = dist.group.WORLD.group_name
    recv, send = splits(rank, size)
    ops = torch.ops.switchyard
    x = torch.randn(sum(send), 3, requires_grad=True)
    even = torch.randn(2 * size, 3, requires_grad=True)
    for op, arguments in (
        (ops.all_to_all_single.default, (x, recv, send, name)),
        (ops.all_to_all_single.default, (even, None, None, name)),
        (ops.all_reduce.default, (even, "sum", name)),
        (ops.reduce_scatter_tensor.default, (even, "sum", name)),
        (ops.all_gather_into_tensor.default, (even, name)),
        (ops.all_to_all_single_.default, (torch.empty(sum(recv), 3), x.detach(), recv, send, name)),
        (ops.all_reduce_.default, (even.detach().clone(), "sum", name)),
        (ops.reduce_scatter_tensor_.default, (torch.empty(2, 3), even.detach(), "sum", name)),
        (ops.all_gather_into_tensor_.default, (torch.empty(2 * size * size, 3), even.detach(), name)),
    ):
        torch.library.opcheck(op, arguments)
    assert st.all_to_all_single(torch.ones(size, 2, dtype=torch.int8)).dtype is torch.int8


def test_opcheck(worlds):
    import world

    worlds.get(2, world.gloo).run(checked)


def compiled(rank, size):
    import torch._dynamo.testing

    import switchyard.torch as st

    recv, send = splits(rank, size)
    linear = torch.nn.Linear(4, 4)
    dist.broadcast(linear.weight.data, 0)
    dist.broadcast(linear.bias.data, 0)

    def layer(x):
        y = st.all_to_all_single(linear(x), recv, send)
        y = st.all_to_all_single(y * 2, send, recv)
        return st.all_reduce(y.relu().sum())

    def in_place(x, y):
        sw.all_to_all_single(y, x + 1, recv, send)
        work = sw.all_reduce(y, async_op=True)
        work.wait()
        return y * 2

    x = torch.randn(sum(send), 4)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fast = torch.compile(layer, backend=counter, fullgraph=True)
    for _ in range(2):
        linear.zero_grad()
        layer(x).backward()
        expected = linear.weight.grad.clone()
        linear.zero_grad()
        torch.testing.assert_close(fast(x), layer(x))
        fast(x).backward()
        torch.testing.assert_close(linear.weight.grad, expected)
    assert counter.frame_count == 1
    equal = torch.ones(sum(recv), 4)
    fast = torch.compile(in_place, backend="aot_eager", fullgraph=True)
    if recv == send:
        torch.testing.assert_close(fast(x, equal.clone()), in_place(x, equal.clone()))
    y, z = torch.empty(size, 2), torch.empty(size, 2)
    source = torch.randn(size, 2)

    def exchange(y):
        sw.all_to_all_single(y, source * 2)
        return y + 1

    torch.testing.assert_close(torch.compile(exchange, backend="aot_eager", fullgraph=True)(y), exchange(z))
    torch.testing.assert_close(y, z)


def test_compiled_graphs(worlds):
    import world

    worlds.get(2, world.gloo).run(compiled)


def without_process_group(rank, size):
    import switchyard.torch as st

    assert not dist.is_initialized()
    x = torch.full((size, 2), float(rank), requires_grad=True)
    y = st.all_to_all_single(x)
    assert y[:, 0].tolist() == list(range(size))
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(size, 2))
    out = torch.empty(size)
    sw.all_to_all_single(out, torch.full((size,), float(rank)))
    assert out.tolist() == list(range(size))
    with pytest.raises(sw.errors.Unsupported, match="no process group"):
        sw.all_reduce(torch.ones(2, dtype=torch.int16))


def test_torch_without_a_process_group(worlds):
    import world

    worlds.get(2, world.plain).run(without_process_group)


def replicas(rank, size):
    import switchyard.torch as st

    def train(hook, dtype):
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1)).to(dtype)
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)
        if hook:
            model.register_comm_hook(None, st.average_hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(4):
            g = torch.Generator().manual_seed(10 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(16, 8, generator=g).to(dtype)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    for dtype in (torch.float32, torch.bfloat16):
        ours = train(True, dtype)
        for p in ours:  # the same bits on every rank
            highest, lowest = p.clone(), p.clone()
            sw.all_reduce(highest, "max")
            sw.all_reduce(lowest, "min")
            assert torch.equal(highest, lowest)
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.05}
        for a, b in zip(ours, train(False, dtype)):
            torch.testing.assert_close(a, b, **tolerance)


def test_hook_of_distributed_data_parallel(gloo):
    gloo.run(replicas)


def test_the_module_lists_its_own_names():
    import switchyard.torch as st

    assert dir(st) == sorted(st.__all__)


def test_the_compiler_is_not_imported():
    """It takes as long as the rest of torch, and most programs do not compile."""
    code = "import sys, switchyard.torch; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0
