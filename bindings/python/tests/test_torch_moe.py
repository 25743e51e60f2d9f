"""The dispatcher's gradients, and training."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import world as worlds_module

import switchyard as sw

torch = pytest.importorskip("torch")

import moe_layers as layers  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "moe" / "train.py"


def gradients(rank, size, dtype, layout):
    kind = getattr(torch, dtype)
    experts, top_k, hidden, tokens = 2 * size, 2, 8, 6 + rank
    extra = {"align": 4} if layout == "flat" else {"capacity": 64}
    d = sw.Dispatcher(experts, top_k, hidden, max_tokens=32, dtype=kind, layout=layout, **extra)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if kind is torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    torch.manual_seed(0)
    matrices = torch.randn(experts, hidden, hidden).to(kind)
    for seed in range(3):
        torch.manual_seed(10 * seed + rank)
        x = torch.randn(tokens, hidden).to(kind)
        idx = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
        idx[0, 1] = -1
        weights, g = torch.rand(tokens, top_k), torch.randn(tokens, hidden).to(kind)

        def ours(x, weights, m, idx=idx):
            got = d.dispatch(x, idx, weights)
            out = torch.zeros_like(got.rows)
            for e, rows, first in zip(got.experts, got.expert_rows(), got.offsets):
                out = out.index_copy(0, torch.arange(first, first + len(rows)), torch.tanh(rows @ m[e]))
            return d.combine(out, got)

        def reference(x, weights, m, idx=idx):
            y = torch.zeros(tokens, hidden)
            for k in range(top_k):
                rows = torch.stack([torch.tanh(x[t] @ m[max(int(idx[t, k]), 0)]) for t in range(tokens)])
                y = y + (weights[:, k] * (idx[:, k] >= 0))[:, None] * rows.float()
            return y.to(kind)

        answers = []
        for f in (ours, reference):
            leaves = [t.clone().requires_grad_() for t in (x, weights, matrices)]
            y = f(*leaves)
            y.backward(g)
            answers.append((y.detach(), leaves[0].grad, leaves[1].grad, leaves[2].grad))
        for a, b in zip(answers[0][:3], answers[1][:3]):
            torch.testing.assert_close(a, b, **tolerance)
        mine, everybody = answers[0][3].float(), answers[1][3].float()
        sw.all_reduce(mine)  # an expert's gradient is where the expert is
        sw.all_reduce(everybody)
        torch.testing.assert_close(mine, everybody, **tolerance)
    y = d.combine(d.dispatch(x[:0], idx[:0], weights[:0]).rows * 2, d.dispatch(x[:0], idx[:0], weights[:0]))
    assert y.shape == (0, hidden)


@pytest.mark.parametrize(("dtype", "layout"), [("float32", "flat"), ("float32", "padded"), ("bfloat16", "flat")])
def test_gradients(gloo, dtype, layout):
    gloo.run(gradients, dtype, layout)


def lifetimes(rank, size):
    d = sw.Dispatcher(size, 1, 4, max_tokens=8, handles=2)
    x, idx, w = torch.ones(8, 4, requires_grad=True), torch.full((8, 1), rank), torch.ones(8, 1)
    rows = [d.dispatch(x * k, idx, w).rows for k in (1, 2)]  # the handles live in their rows
    with pytest.raises(sw.errors.NoHandle):
        d.dispatch(x, idx, w)
    assert [r[0, 0].item() for r in rows] == [1, 2]
    (rows[0] * 2).sum().backward()
    assert x.grad[0, 0].item() == 2
    rows.pop()
    d.dispatch(x, idx, w)
    for bad in (x.double(), x[:, :2], torch.ones(8)):
        with pytest.raises(sw.errors.InvalidArgument):
            d.dispatch(bad, idx, w)
    for _ in range(20):  # training does not run out of handles
        got = d.dispatch(x, idx, w)
        d.combine(got.rows * 3, got).sum().backward()
        rows = [got.rows]


def test_outputs_live_as_long_as_they_are_needed(gloo):
    gloo.run(lifetimes)


def wide_indices(rank, size):
    x, w = torch.ones(2, 4), torch.ones(2, 1)
    narrow = sw.Dispatcher(size, 1, 4, max_tokens=8, index_dtype=torch.int32)
    for no in (1 << 32, (1 << 32) - 1, -(1 << 32)):
        for idx in (torch.tensor([[0], [no]]), [[0], [no]]):
            with pytest.raises(sw.errors.InvalidArgument, match=f"experts has {no}, and the dispatcher"):
                narrow.dispatch(x, idx, w)
    for dispatcher in (narrow, sw.Dispatcher(size, 1, 4, max_tokens=8)):
        with pytest.raises(sw.errors.InvalidArgument, match=f"experts has {(1 << 64) - 1}, and"):
            dispatcher.dispatch(x, torch.tensor([[0], [(1 << 64) - 1]], dtype=torch.uint64), w)
        with pytest.raises(sw.errors.InvalidType, match=r"experts is torch\.float32, want integers"):
            dispatcher.dispatch(x[:0], torch.empty(0, 1), w[:0])
        for kind in (torch.uint8, torch.int16, torch.int32, torch.uint32, torch.int64, torch.uint64):
            idx = torch.full((2, 1), rank).to(kind)
            assert dispatcher.dispatch(x, idx, w).counts == [2], kind
        assert dispatcher.dispatch(x, torch.tensor([[-1], [rank]]), w).counts == [1]


def test_indices_are_checked_before_they_are_converted(gloo):
    gloo.run(wide_indices)


FORMATS = [{"scale_format": "ue8m0"}, {"scale_format": "power_of_two"}]
SCALES = [{}, {"scale_per_token": True}, *FORMATS, {"scale_columns": True}, {"low_latency": True}]
WAYS = ["weighted", "halves", "given", "unweighted", "weighted"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", list(layers.LAYOUTS))
def test_layers_in_every_layout(gloo, layout, dtype):
    gloo.run(layers.gradients, "cpu", layout, dtype, WAYS, {})


def test_layers_for_few_tokens(gloo):
    for layout in ("slab", "rank_padded"):
        gloo.run(layers.gradients, "cpu", layout, "float32", WAYS, {"low_latency": True, "index_dtype": torch.int32})


@pytest.mark.parametrize("layout", ["flat", "token_major"])
def test_layers_in_compiled_graphs(worlds, layout):
    worlds.get(2, worlds_module.gloo).run(layers.gradients, "cpu", layout, "float32", WAYS, {}, True)


def faked(rank, size, layout, options):
    """Fake kernels give the shapes and the strides of what a dispatch has."""
    from switchyard._torch import moe_ops

    options = {"quantize": True, "combine_dtype": "bfloat16", **options}
    d = sw.Dispatcher(3 * size, 2, 256, max_tokens=8, layout=layout, **options)
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(rank))
    idx = (torch.arange(8)[:, None] + torch.tensor([[0, size]])) % (3 * size)
    arguments = (x, None, idx, torch.rand(8, 2), d.name)
    torch.library.opcheck(moe_ops._dispatch_op, arguments, test_utils="test_faketensor")
    d.close()


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("layout", list(layers.LAYOUTS))
def test_fakes_are_like_dispatches(worlds, layout, columns):
    world = worlds.get(2, worlds_module.gloo)
    for form in ("float32", "ue8m0"):
        world.run(faked, layout, {"scale_columns": columns, "scale_format": form})


@pytest.mark.parametrize("check", ["biased", "again", "lifetimes", "counted", "refused", "overflow"])
def test_dispatches(gloo, check):
    gloo.run(getattr(layers, check), "cpu")


@pytest.mark.parametrize("layout", list(layers.LAYOUTS))
def test_routings_outlive_their_outputs(gloo, layout):
    gloo.run(layers.kept, "cpu", layout)


@pytest.mark.parametrize("layout", list(layers.LAYOUTS))
def test_what_a_dispatch_left_is_the_callers(gloo, layout):
    gloo.run(layers.taken, "cpu", layout)


def taken_whole(rank, size):
    """take() without a length where scales lie in columns of each expert, on ranks with more and with fewer experts."""
    experts, hidden, tokens = 4 * size - 1, 128, 6
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(rank))
    idx = torch.arange(tokens)[:, None] + torch.tensor([[0, experts // 2]])
    for layout in ("slab", "padded"):
        extra = {"capacity": 2 * size * tokens} if layout == "padded" else {}
        extra.update(layout=layout, quantize=True, scale_columns=True, combine_dtype="bfloat16")
        d = sw.Dispatcher(experts, 2, hidden, max_tokens=tokens, **extra)
        assert len(d.local_experts) == (3 if rank == size - 1 else 4)
        there = d.dispatch(x, idx % experts)
        rows, scales, offsets = there.rows.clone(), there.scales.clone(), there.offsets
        left = there.take()
        assert left.scales.shape == scales.shape
        for e, n in enumerate(left.host.counts):
            first = offsets[e]
            assert torch.equal(left.rows[first : first + n].view(torch.uint8), rows[first : first + n].view(torch.uint8))
            assert torch.equal(left.scales[e, :n], scales[e, :n])
        d.close()


def test_results_of_ranks_with_fewer_experts(gloo):
    gloo.run(taken_whole)


def kept_again(rank, size):
    """keep() of what goes by a routing of whose rows the host was not told, as on a GPU after take(n)."""
    d = sw.Dispatcher(2 * size, 2, 8, max_tokens=6, layout="token_major", handles=2)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
    idx = torch.stack([torch.arange(6) % (2 * size), (torch.arange(6) + 1) % (2 * size)], 1)
    d._tells = lambda side, length: False
    left = d.dispatch(x, idx).take(6 * size)
    left.routing.counts = None
    routed = d.route(left.routing)
    again = routed.keep()
    assert again.counts is None
    n = int(left.rank_counts.sum())
    y = d.combine(left.rows[:n], again)
    routed.release()
    torch.testing.assert_close(y, x * torch.where(idx[:, :1] // 2 == idx[:, 1:] // 2, 1, 2))
    d.redispatch(x, d.route(again)).release()
    d.close()


def test_what_is_kept_of_a_routing(gloo):
    gloo.run(kept_again)


@pytest.mark.parametrize("layout", ["flat", "token_major", "rank_padded"])
def test_dispatchers_share_memory(gloo, layout):
    gloo.run(layers.shared, "cpu", layout)


@pytest.mark.parametrize("layout", list(layers.LAYOUTS))
@pytest.mark.parametrize("options", SCALES, ids=str)
def test_float8(worlds, layout, options):
    worlds.get(2, worlds_module.gloo).run(layers.float8, "cpu", layout, options)


@pytest.mark.parametrize("layout", ["flat", "slab"])
def test_two_at_a_time(worlds, layout):
    worlds.get(2, worlds_module.gloo).run(layers.two_at_a_time, "cpu", layout, {"low_latency": layout == "slab"})


def load():
    spec = importlib.util.spec_from_file_location("switchyard_example_train", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def trained(rank, size, impl, steps):
    example = load()
    lines = []
    losses = example.train(example.arguments(["--impl", impl, "--steps", str(steps)]), lines.append)
    return losses, lines[-1]


def test_training_gives_the_same_losses(worlds):
    answers = worlds.get(2, worlds_module.gloo).run(trained, "both", 200)
    losses, line = answers[0]
    assert len(losses["torch"]) == 200
    assert losses["torch"] == losses["switchyard"]  # to the last bit: two ranks add in one order
    assert losses["torch"][-1] < losses["torch"][0] - 0.4
    assert "the losses are the same" in line
    layer, _ = worlds.get(2, worlds_module.gloo).run(trained, "layer", 50)[0]
    apart = [abs(a - b) for a, b in zip(layer["layer"], losses["torch"])]
    assert max(apart) < 1e-2
