"""Calls in functions that torch compiles: as parts of one graph where they are operators, else between graphs."""

from __future__ import annotations

import gc

import pytest

import switchyard as sw

torch = pytest.importorskip("torch")
import world  # noqa: E402

#: The calls that are operators, which a graph holds whole.
OPERATORS = (
    "all_to_all_single", "all_to_all_single with splits", "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor",
    "in steps", "dispatch and combine", "unweighted", "halves",
)  # fmt: skip


#: Functions of tokens and weights that have gradients.
DERIVED = ("dispatch and combine", "halves", "host_counts", "expert_rows", "redispatch")


def collectives(rank, size):
    """By name functions of a tensor of four rows for each rank."""
    one = [4] * size

    def all_to_all(x):
        y = torch.empty_like(x)
        sw.all_to_all_single(y, x * 2)
        return y + 1

    def by_splits(x):
        y = torch.empty_like(x)
        sw.all_to_all_single(y, x * 2, one, one)
        return y + 1

    def all_reduce(x):
        y = x * 2
        sw.all_reduce(y)
        return y + 1

    def by_bits(x):
        y = (x * 8).to(torch.int64)
        sw.all_reduce(y, "bor")
        return y + 1

    def reduce_scatter(x):
        y = x.new_empty(4, *x.shape[1:])
        sw.reduce_scatter_tensor(y, x * 2, "max")
        return y + 1

    def all_gather(x):
        y = x.new_empty(4 * size * size, *x.shape[1:])
        sw.all_gather_into_tensor(y, x * 2)
        return y + 1

    def in_steps(x):
        y, z = torch.empty_like(x), x * 2
        works = [sw.all_to_all_single(y, x + 1, async_op=True), sw.all_reduce(z, async_op=True)]
        for work in works:
            work.wait()
        return y + z

    def meeting(x):
        y = x * 2
        sw.barrier()
        return y + 1

    def messages(x):
        y = torch.empty_like(x)
        work = sw.isend(x * 2, (rank + 1) % size)
        sw.recv(y, (rank - 1) % size)
        work.wait()
        return y + 1

    return {
        "all_to_all_single": all_to_all, "all_to_all_single with splits": by_splits, "all_reduce": all_reduce,
        "all_reduce of bits": by_bits, "reduce_scatter_tensor": reduce_scatter, "all_gather_into_tensor": all_gather,
        "in steps": in_steps, "barrier": meeting, "messages": messages,
    }  # fmt: skip


def dispatches(rank, size, d):
    """By name functions of tokens, their experts and their weights."""

    def whole(x, idx, weights):
        got = d.dispatch(x * 2, idx, weights)
        return d.combine(got.rows + 1, got) + 1

    def unweighted(x, idx, weights):
        got = d.dispatch(x * 2, idx)
        return d.combine(got.rows + 1, got, weighted=False) + 1

    def halves(x, idx, weights):
        got = d.dispatch(x * 2, idx, weights, async_op=True).wait()
        return d.combine(got.rows + 1, got, async_op=True).wait() + 1

    def counted(x, idx, weights):
        got = d.dispatch(x * 2, idx, weights)
        host = got.host_counts()
        return d.combine(got.rows + host.rows, got) + sum(host.counts)

    def by_expert(x, idx, weights):
        got = d.dispatch(x * 2, idx, weights)
        rows = torch.zeros_like(got.rows)
        for e, part in enumerate(got.expert_rows()):
            rows[got.host_counts().offsets[e] :][: len(part)] = part * (e + 1)
        return d.combine(rows, got)

    def kept(x, idx, weights):
        got = d.dispatch(x * 2, idx, weights)
        return d.combine(got.rows + 1, got.keep(), token_weights=weights) + 1

    def taken(x, idx, weights):
        left = d.dispatch(x * 2, idx, weights).take()
        return d.combine(left.rows + 1, left.routing, token_weights=weights) + 1

    def routed(x, idx, weights):
        routing = d.dispatch(x * 2, idx, weights).keep()
        got = d.redispatch(x * 3, d.route(routing))
        return d.combine(got.rows + 1, got, weighted=False) + 1

    def again(x, idx, weights):
        got = d.dispatch(x * 2, idx, weights)
        got = d.redispatch(x * 3, got)
        return d.combine(got.rows + 1, got) + 1

    def of_tokens(x, idx, weights):
        got = d.dispatch(x * 2, idx)
        return d.combine(got.rows + 1, got, token_weights=weights) + 1

    def released(x, idx, weights):
        got = d.dispatch(x * 2, idx, weights)
        return d.combine(got.rows + 1, got, release=True) + 1

    def into(x, idx, weights):
        got, y = d.dispatch(x * 2, idx, weights), torch.empty_like(x)
        d.combine(got.rows + 1, got, out=y)
        return y + 1

    def summed(x, idx, weights):
        got = d.dispatch(x * 2, idx, weights)
        y, sums = d.combine(got.rows + 1, got, weights=got.row_weights, sum_weights=True)
        return y + sums.sum(1, keepdim=True)

    outside = {}

    def of_one_before(x, idx, weights):
        got = outside["got"]
        return d.combine(got.rows + x.sum(), got) + 1

    of_one_before.before = lambda x, idx, weights: outside.update(got=d.dispatch(x, idx, weights))
    of_one_before.after = outside.clear
    return {
        "dispatch and combine": whole, "unweighted": unweighted, "halves": halves, "host_counts": counted,
        "expert_rows": by_expert, "keep": kept, "take": taken, "route": routed, "redispatch": again,
        "token_weights": of_tokens, "release": released, "out": into, "sum_weights": summed,
        "a dispatch outside": of_one_before,
    }  # fmt: skip


def compiled(function, fullgraph=False):
    """A function as torch compiles it."""
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=fullgraph)


def called(about, function, *arguments):
    """What a function returns, with what comes before it and after it."""
    getattr(about, "before", lambda *_: None)(*arguments)
    try:
        return function(*arguments)
    finally:
        getattr(about, "after", lambda: None)()


def bits(rank, size):
    import torch._dynamo

    torch._dynamo.config.capture_dynamic_output_shape_ops = True  # there are as many rows as came
    d = sw.Dispatcher(2 * size, 2, 8, max_tokens=16, handles=4, row_weights=True)
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(4 * size, 8, generator=g)
    idx = torch.rand(4 * size, 2 * size, generator=g).topk(2)[1]
    weights = torch.rand(4 * size, 2, generator=g)
    cases = [(name, f, (x,)) for name, f in collectives(rank, size).items()]
    cases += [(name, f, (x, idx, weights)) for name, f in dispatches(rank, size, d).items()]
    for name, function, arguments in cases:
        want = called(function, function, *arguments)
        fast = compiled(function)
        for _ in range(2):
            assert torch.equal(called(function, fast, *arguments), want), name
        fast = compiled(function, fullgraph=True)
        if name in OPERATORS:
            assert torch.equal(fast(*arguments), want), name
        else:
            with pytest.raises(torch._dynamo.exc.Unsupported, match="switchyard has no operator for this call"):
                called(function, fast, *arguments)
        if name in DERIVED:
            assert all(map(torch.equal, gradients(function, *arguments), gradients(compiled(function), *arguments))), name
    torch._dynamo.reset()
    gc.collect()
    assert d._alive() == 0
    d.close()


def gradients(function, x, idx, weights):
    """Those of tokens and weights."""
    leaves = [t.clone().requires_grad_() for t in (x, weights)]
    function(leaves[0], idx, leaves[1]).square().sum().backward()
    return [leaf.grad for leaf in leaves]


def test_compiled_calls_have_the_bits_of_others(worlds):
    worlds.get(2, world.gloo).run(bits)


def told(rank, size):
    """Autograd hears of what is written in a graph and between graphs, and errors are those of other calls."""
    d = sw.Dispatcher(2 * size, 2, 8, max_tokens=16)
    x, idx = torch.ones(2 * size, 8), torch.arange(4 * size).view(-1, 2) % (2 * size)

    def in_a_graph(x, y):
        sw.all_to_all_single(y, x * 2)
        return y + 1

    def between_graphs(x, y):
        got = d.dispatch(x * 2, idx)
        d.combine(got.rows + 1, got, out=y)
        return y + 1

    for function in (in_a_graph, between_graphs):
        y = torch.ones(2 * size, 8)
        leaf = torch.ones(2 * size, 8, requires_grad=True)
        product = leaf * y
        compiled(function)(x, y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()

    def bounded(x):
        sw.all_to_all_single(torch.empty_like(x), x * 2, max_sms=4)

    def streamed(x):
        sw.all_reduce(x * 2, stream="none")

    def wrong(x):
        d.combine(x[:, :4] * 2, d.dispatch(x, idx), token_weights=x)

    for function in (bounded, streamed, wrong):
        said = []
        for call in (function, compiled(function)):
            with pytest.raises(sw.Error) as caught:
                call(x)
            said.append((type(caught.value), str(caught.value)))
            del caught
        assert said[0] == said[1]
    torch._dynamo.reset()


def test_what_is_written_and_refused_is_told(worlds):
    worlds.get(2, world.gloo).run(told)
