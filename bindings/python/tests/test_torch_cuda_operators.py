"""Calls of CUDA tensors that are operators of torch: bits and errors of Python's, streams, graphs."""

from __future__ import annotations

import pytest
import test_torch_operators as host

import switchyard as sw

torch = pytest.importorskip("torch")

from switchyard._torch import operators  # noqa: E402

pytestmark = host.needs_them


def test_exchanges_are_those_of_python(cuda):
    cuda.run(host.exchanged, "cuda")


def test_dispatches_are_those_of_python(cuda):
    cuda.run(host.paired, "cuda")


def test_deliveries_are_those_of_python(cuda):
    cuda.run(host.delivered, "cuda")


def test_refusals_are_those_of_python(cuda):
    cuda.run(host.refused, "cuda")


def test_rows_that_the_host_was_told_of_are_usual(cuda):
    cuda.run(host.shortened, "cuda")


def test_nothing_is_left(cuda):
    cuda.run(host.many, "cuda")


def ordered(rank, size):
    """Calls follow what the current stream has, eager and in a graph, and results are torch's allocator's."""
    d = sw.Dispatcher(2 * size, 2, 512, max_tokens=64, dtype="bfloat16", low_latency=True, device="cuda")
    x, idx, weights = host.tokens(rank, d, 64, "cuda")
    sent, got = torch.zeros(size, 1024, device="cuda"), torch.zeros(size, 1024, device="cuda")
    d.dispatch(x, idx).release()
    sw.all_to_all_single(got, sent)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    def calls():
        sent.add_(1)
        x.mul_(2)
        sw.all_to_all_single(got, sent)
        out = d.dispatch(x, idx, weights)
        return d.combine(out.rows, out, release=True)

    want = x * weights.sum(1, keepdim=True)
    with torch.cuda.stream(side), host.Counting(d._operated, "dispatch", "combine") as counting:
        torch.cuda._sleep(20_000_000)
        y = calls()
        assert counting.served == 2
        torch.testing.assert_close(y.float(), 2 * want.float(), rtol=0.05, atol=0.05)
        assert (got == 1).all()
        half = d.dispatch(x, idx, weights, async_op=True)  # halves are operators, too
        assert half.between_halves
        pending = d.combine(half.wait().rows, half, async_op=True)
        torch.testing.assert_close(pending.wait().float(), 2 * want.float(), rtol=0.05, atol=0.05)
        del half, pending
        assert counting.served == 4
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            y = calls()
        assert counting.served == 6
        sw.barrier()
        for n in (2, 3):
            graph.replay()
            torch.cuda.synchronize()
            torch.testing.assert_close(y.float(), (2**n) * want.float(), rtol=0.05, atol=0.05)
            assert (got == n).all()
    del graph, y
    torch.cuda.synchronize()
    sw.barrier()
    d.close()


def test_calls_are_in_the_order_of_streams(cuda):
    cuda.run(ordered)


def asynchronous(rank, size):
    """Calls with async_op are operators too: behind what the current stream has, with tensors kept, and the same bits."""
    x = torch.randn(4 * size, 3, device="cuda", generator=torch.Generator("cuda").manual_seed(rank))
    part, even = x[:4].clone(), [4] * size
    calls = [
        (lambda y, **how: sw.all_to_all_single(y, x, **how), x),
        (lambda y, **how: sw.all_to_all_single(y, x, even, even, **how), x),
        (lambda y, **how: sw.all_reduce(y, **how), x),
        (lambda y, **how: sw.reduce_scatter_tensor(y, x, **how), part),
        (lambda y, **how: sw.all_gather_into_tensor(y, part, **how), x),
    ]
    wants = []
    for call, like in calls:
        y = like.clone()
        call(y)
        wants.append(y.clone())
    made = operators.exchanges(sw.communicator(), x.get_device())
    for (call, like), want in zip(calls, wants):
        y = torch.empty_like(like)
        with host.Counting(made, "aside") as counting:
            torch.cuda._sleep(20_000_000)
            y.copy_(like)
            work = call(y, async_op=True)
            assert counting.served == counting.asked == 1
        assert work.result()[0] is y
        version = y._version
        for _ in range(3):  # nobody holds their tensors
            other = torch.full_like(like, 5)
            call(other, async_op=True)
            del other
            torch.full_like(like, -1)
        work.wait()
        assert torch.equal(y, want)
        assert y._version == version
    # Python makes what is unusual, refuses what is wrong, and what is captured stays on the graph's stream.
    y = torch.empty(3, 4 * size, device="cuda").T
    with host.Counting(made, "aside") as counting:
        sw.all_to_all_single(y.contiguous(), x, async_op=True, max_sms=4).wait()
        with pytest.raises(sw.Error):
            sw.all_to_all_single(y[:, :2].contiguous(), x, async_op=True)
        assert counting.served == 0
    got = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        sw.all_to_all_single(got, x, async_op=True).wait()
    sw.barrier()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, wants[0])
    del graph
    sw.barrier()


def test_calls_beside_others(cuda):
    cuda.run(asynchronous)


def flat(rank, size):
    """Memory of torch and of the library stays the same."""
    d = sw.Dispatcher(2 * size, 2, 512, max_tokens=64, dtype="bfloat16", device="cuda")
    x, idx, weights = host.tokens(rank, d, 64, "cuda")
    sent, got = torch.zeros(2 * size, 1024, device="cuda"), torch.zeros(2 * size, 1024, device="cuda")

    def steps(n):
        for _ in range(n):
            sw.all_to_all_single(got, sent, [2] * size, [2] * size)
            out = d.dispatch(x, idx, weights)
            d.combine(out.rows, out, release=True)
            del out
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), host.library().live()

    steps(20)
    before = steps(20)
    assert steps(1000) == before
    d.close()


def test_memory_stays_the_same(cuda):
    cuda.run(flat)
