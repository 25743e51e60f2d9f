"""Every call on torch tensors against gloo's, on the same tensors in the same processes."""

from __future__ import annotations

import ctypes
import re
import resource
import threading
import warnings
from datetime import timedelta

import numpy as np
import pytest
import world

import switchyard as sw
from switchyard import errors

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import _dynamo  # noqa: E402

DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex32",
    "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64",
]  # fmt: skip
# What gloo does not move at all; for these the expectation is made by hand.
NOT_GLOO = {"int16", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"}


def values(rank: int, n: int, shape: tuple[int, ...], dtype: torch.dtype, poison: bool = False) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 * rank + n + poison)
    x = torch.randint(0, 100, (n, *shape), generator=g).double()
    if dtype.is_complex:
        return torch.complex(x, x + 1).to(dtype)
    return x.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor, **tolerance) -> None:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    if a.dtype is torch.bool:  # gloo's "true" can be any byte but 0
        assert torch.equal(a.float(), b.float())
    elif a.dtype.itemsize == 1 or tolerance == {}:
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), (a, b)
    else:
        torch.testing.assert_close(a, b, **tolerance)


def as_gloo(output: torch.Tensor, input: torch.Tensor, *arguments) -> None:
    """gloo's all_to_all_single, of bytes where it does not know the type."""
    if str(output.dtype).removeprefix("torch.") in NOT_GLOO:
        output, input = output.view(torch.uint8), input.view(torch.uint8)
    dist.all_to_all_single(output, input, *arguments)


def moved(rank, size, dtype, shape):
    kind = getattr(torch, dtype)
    send = [[(2 * i + 3 * j) % 4 for j in range(size)] for i in range(size)]
    recv = [send[i][rank] for i in range(size)]
    x = values(rank, sum(send[rank]), shape, kind)
    for arguments, n in (((recv, send[rank]), sum(recv)), ((), None)):
        source = x if arguments else values(rank, 3 * size, shape, kind)
        ours = values(rank, n if n is not None else 3 * size, shape, kind, poison=True)
        theirs = ours.clone()
        as_gloo(theirs, source, *arguments)
        assert sw.all_to_all_single(ours, source, *arguments) is None
        same(ours, theirs)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (1, 1, 7)], ids=str)
def test_all_to_all_of_rows(gloo, shape):
    gloo.run(moved, "float32", shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_to_all_of_every_type(gloo, dtype):
    gloo.run(moved, dtype, (3,))


def published(rank, size):
    # The examples of torch's documentation, which four ranks are made for.
    out = torch.empty(4, dtype=torch.int64)
    sw.all_to_all_single(out, torch.arange(4) + 4 * rank)
    assert out.tolist() == [rank, 4 + rank, 8 + rank, 12 + rank]
    inputs = [[0, 1, 2, 3, 4, 5], list(range(10, 19)), [20, 21, 22, 23, 24], [30, 31, 32, 33, 34, 35, 36]]
    input_splits = [[2, 2, 1, 1], [3, 2, 2, 2], [2, 1, 1, 1], [2, 2, 2, 1]]
    output_splits = [[2, 3, 2, 2], [2, 2, 1, 2], [1, 2, 1, 2], [1, 2, 1, 1]]
    expected = [
        [0, 1, 10, 11, 12, 20, 21, 30, 31],
        [2, 3, 13, 14, 22, 32, 33],
        [4, 15, 16, 23, 34, 35],
        [5, 17, 18, 24, 36],
    ]
    out = torch.empty(len(expected[rank]), dtype=torch.int64)
    sw.all_to_all_single(out, torch.tensor(inputs[rank]), output_splits[rank], input_splits[rank])
    assert out.tolist() == expected[rank]
    x = torch.tensor([1 + 1j, 2 + 2j, 3 + 3j, 4 + 4j], dtype=torch.cfloat) + 4 * rank * (1 + 1j)
    got = torch.empty(4, dtype=torch.cfloat)
    sw.all_to_all_single(got, x)
    assert got.tolist() == [(4 * p + rank + 1) * (1 + 1j) for p in range(4)]


def test_the_examples_of_torch(worlds):
    import world

    worlds.get(4, world.gloo).run(published)


def sizes(rank, size, dtype):
    kind = getattr(torch, dtype)
    for n in (0, 1, 2, 3, 5, 15, 17, 1000, 4099, 70_001, 600_000):
        x = values(rank, n * size, (), kind)
        ours = values(rank, n * size, (), kind, poison=True)
        theirs = ours.clone()
        dist.all_to_all_single(theirs, x)
        sw.all_to_all_single(ours, x)
        same(ours, theirs)
        # One element in, so that nothing is aligned.
        shifted = torch.empty(n * size + 1, dtype=kind)[1:]
        source = torch.empty(n * size + 3, dtype=kind)[3:].copy_(x)
        sw.all_to_all_single(shifted, source)
        same(shifted, theirs)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
def test_all_to_all_of_every_size(gloo, dtype):
    gloo.run(sizes, dtype)


def zero_rows(rank, size):
    for shape, arguments in (((0,), ()), ((0, 3), ()), ((0, 3), ([0] * size, [0] * size)), ((2 * size, 0), ())):
        sw.all_to_all_single(torch.empty(shape), torch.empty(shape), *arguments)
        dist.all_to_all_single(torch.empty(shape), torch.empty(shape), *arguments)
    # All to rank 0.
    send = [3] + [0] * (size - 1)
    recv = [3] * size if rank == 0 else [0] * size
    for call in (sw.all_to_all_single, dist.all_to_all_single):
        out = torch.full((sum(recv), 2), -1.0)
        call(out, torch.full((3, 2), float(rank)), recv, send)
        assert out[:, 1].tolist() == ([float(p) for p in range(size) for _ in range(3)] if rank == 0 else [])
        # Splits on one side only.
        out = torch.empty(2 * size)
        call(out, torch.arange(2.0 * size), None, [2] * size)
        call(out, torch.arange(2.0 * size), [2] * size, [])


def test_zero_splits(gloo):
    gloo.run(zero_rows)


def reduced(rank, size, dtype):
    kind = getattr(torch, dtype)
    tolerance = {"rtol": 2e-2 if kind.itemsize == 2 else 1e-5, "atol": 1e-2 if kind.itemsize == 2 else 1e-5}
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT]
    if kind.is_floating_point:
        ops.append(dist.ReduceOp.AVG)
    for op in ops:
        for shape in ((7,), (), (0,), (3, 5), (30_001,), (400, 500)):
            n = 1
            for s in shape:
                n *= s
            x = (values(rank, n, (), kind) % 3 if kind is not torch.bool else values(rank, n, (), kind)).view(shape)
            ours, theirs = x.clone(), x.clone()
            dist.all_reduce(theirs, op)
            sw.all_reduce(ours, op)
            same(ours, theirs, **tolerance)
            if op != dist.ReduceOp.PRODUCT:
                name = str(op).rsplit(".", 1)[-1].lower()
                again = x.clone()
                sw.all_reduce(again, name)
                same(again, ours)
    if kind is not torch.bool:
        x = values(rank, 6 * size, (2,), kind) % 3
        ours, theirs = torch.empty(6, 2, dtype=kind), torch.empty(6, 2, dtype=kind)
        dist.reduce_scatter_tensor(theirs, x)
        sw.reduce_scatter_tensor(ours, x)
        same(ours, theirs, **tolerance)
    x = values(rank, 6, (2,), kind)
    ours, theirs = torch.empty(6 * size, 2, dtype=kind), torch.empty(6 * size, 2, dtype=kind)
    dist.all_gather_into_tensor(theirs, x)
    sw.all_gather_into_tensor(ours, x)
    same(ours, theirs)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"])
def test_reductions_and_gathers(gloo, dtype):
    gloo.run(reduced, dtype)


def complex_numbers(rank, size):
    x = values(rank, 5, (), torch.complex64)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        ours, theirs = x.clone(), x.clone()
        dist.all_reduce(theirs, op)
        sw.all_reduce(ours, op)
        torch.testing.assert_close(ours, theirs)
    for call in (sw.all_reduce, dist.all_reduce):
        with pytest.raises(ValueError, match=r"does not support .*MAX on complex tensors"):
            call(x, dist.ReduceOp.MAX)
    out = torch.empty(5 * size, dtype=torch.complex64)
    sw.all_gather_into_tensor(out, x)
    assert torch.equal(out[5 * rank : 5 * rank + 5], x)
    part = torch.empty(5, dtype=torch.complex64)
    sw.reduce_scatter_tensor(part, out)
    torch.testing.assert_close(part, out[5 * rank : 5 * rank + 5] * size)
    conjugate = torch.ones(size, dtype=torch.complex64).conj()
    for call in (sw.all_to_all_single, dist.all_to_all_single):
        with pytest.raises(RuntimeError, match="conj"):
            call(torch.empty(size, dtype=torch.complex64), conjugate)


def test_complex_tensors(gloo):
    gloo.run(complex_numbers)


def elsewhere(rank, size):
    # What Switchyard does not do goes to gloo, with gloo's results and errors.
    x = torch.tensor([rank + 1, 6])
    sw.all_reduce(x, dist.ReduceOp.BAND)
    assert x[1] == 6
    for dtype, op in ((torch.int16, dist.ReduceOp.SUM), (torch.float32, dist.ReduceOp.BOR)):
        said = []
        for call in (dist.all_reduce, sw.all_reduce):
            with pytest.raises(RuntimeError) as caught:
                call(torch.ones(2).to(dtype), op)
            said.append(str(caught.value))
        assert said[0] == said[1] or (dtype is torch.int16 and said[0].splitlines()[0] in said[1]), said


def test_what_goes_to_gloo(gloo):
    gloo.run(elsewhere)


def transposed(rank, size):
    # Elements in another order, but all of them.
    x = (torch.arange(6.0).view(2, 3) + rank).t()
    theirs = x.contiguous()
    dist.all_reduce(theirs)
    sw.all_reduce(x)
    assert torch.equal(x, theirs)


def test_all_reduce_of_transposed_tensors(gloo):
    gloo.run(transposed)


def strided(rank, size):
    # Tensors that are not contiguous, and such with a pending negation, have the numbers that they seem to have.
    x = torch.arange(4.0 * size).view(2 * size, 2) + 100 * rank
    images = torch.arange(24.0 * size).view(size, 3, 2, 4) + 100 * rank
    whole = torch.empty_like(x)
    dist.all_to_all_single(whole, x)
    negative = torch._neg_view(-x)
    imaginary = torch.complex(x, -x).conj().imag  # with gaps, too
    assert negative.is_neg()
    assert imaginary.is_neg()
    assert not imaginary.is_contiguous()
    for output, source in (
        (torch.zeros(2, 2 * size).t(), x),
        (torch.zeros(4 * size, 2)[::2], x),
        (torch._neg_view(torch.zeros(2 * size, 2)), x),
        (torch.zeros(2 * size, 2), negative),
        (torch.zeros(2 * size, 2), imaginary),
    ):
        for async_op in (False, True):
            output.zero_()
            work = sw.all_to_all_single(output, source, async_op=async_op)
            if async_op:
                work.wait()
            assert torch.equal(output, whole)
    splits = np.array([2] * size)
    output = torch.zeros_like(x)
    sw.all_to_all_single(output, x, splits, splits)
    assert torch.equal(output, whole)
    sw.all_to_all_single(output.zero_(), x, torch.tensor(splits), splits)
    assert torch.equal(output, whole)
    last = images.to(memory_format=torch.channels_last)
    for source in (images, last):
        for output in (torch.zeros_like(images), torch.zeros_like(last)):
            expected = torch.zeros_like(images)
            dist.all_to_all_single(expected, images)
            sw.all_to_all_single(output, source)
            assert torch.equal(output, expected)
            wanted = torch.zeros(size * size, 3, 2, 4)
            everything = wanted.to(memory_format=torch.channels_last, copy=True)
            dist.all_gather_into_tensor(wanted, images)
            sw.all_gather_into_tensor(everything, source)
            assert torch.equal(everything, wanted)
            part, expected = output[:1], torch.zeros_like(images[:1])
            dist.reduce_scatter_tensor(expected, images)
            sw.reduce_scatter_tensor(part, source)
            assert torch.equal(part, expected)
    total = x.clone()
    dist.all_reduce(total)
    for source in (torch.empty(4 * size, 2)[::2].copy_(x), torch._neg_view(-x), x.t().contiguous().t()):
        work = sw.all_reduce(source, async_op=True)
        work.wait()
        assert torch.equal(source, total)
    with pytest.raises(ValueError, match="output is on cpu, input on meta"):
        sw.all_to_all_single(whole, x.to("meta"))
    for narrow in (torch.int16, torch.uint32):
        with pytest.raises(errors.Unsupported, match=r"all_reduce: tensor is .* which neither Switchyard nor gloo reduces"):
            sw.all_reduce(torch.ones(2, dtype=narrow))
    parameter = torch.nn.Parameter(torch.zeros(2, 2 * size)).t()  # whose gradients nobody wants here
    with torch.no_grad():
        sw.all_to_all_single(parameter, x)
    assert torch.equal(parameter, whole)


def test_tensors_in_another_order(gloo):
    gloo.run(strided)


def wrong(rank, size):
    n = 2 * size
    x, y = torch.zeros(n), torch.zeros(n)
    each = [2] * size
    A, R, G = "all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor"
    skew = torch.zeros(2, n).t()[:, :1].expand(n, 2)
    # The call, whether gloo refuses it too, and what both say.
    cases = [
        (A, (y, x, each[:-1], each), True, "Number of tensor splits not equal to group size"),
        (A, (y, x, each, [*each, 0]), True, "Number of tensor splits not equal to group size"),
        (A, (y, x, [1] * size, each), True, "Split sizes doesn't match total dim 0 size"),
        (A, (y, x, each, [3] * size), True, "Split sizes doesn't match total dim 0 size"),
        (A, (y, x, [n + 1, -1] + [0] * (size - 2), each), False, "negative"),
        (A, (torch.zeros(n, 2), torch.zeros(2, n).t()), True, "Tensors must be contiguous"),
        (A, (y, skew), True, "Tensors must be contiguous"),
        (A, (y, x.double()), True, "different dtypes"),
        (A, (y, x.to(torch.complex64)), True, "."),
        (A, ([1], x), True, "Expected parameter `output` of type torch.Tensor"),
        (A, (y, None), True, "Expected parameter `input` of type torch.Tensor"),
        (A, (y, x, [2.0] * size, each), True, "."),
        (A, (y, x, torch.tensor(each).double(), each), True, "."),
        (A, (y, x, torch.tensor([each]), each), True, "."),
        (A, (torch.zeros(n + 1), torch.zeros(n + 1)), False, "dim 0 does not divide equally across group size"),
        (A, (torch.zeros(()), torch.zeros(())), False, "dimension"),
        (R, (torch.zeros(3), x), False, "world size"),  # which ends the process in gloo of torch 2.8
        (R, (torch.zeros(2, dtype=torch.float64), x), False, "same type"),
        (G, (torch.zeros(2 * n * size + 1), x), True, "."),
        (G, (torch.zeros(n * size, dtype=torch.float64), x), True, "."),
        (G, ([1], x), True, "Expected parameter `output_tensor` of type torch.Tensor"),
    ]
    for name, arguments, gloo_too, text in cases:
        with pytest.raises((ValueError, RuntimeError, TypeError), match=text) as ours:
            getattr(sw, name)(*arguments)
        if gloo_too:
            with pytest.raises((ValueError, RuntimeError, TypeError), match=text) as theirs:
                getattr(dist, name)(*arguments)
            if text != ".":  # where gloo says what torch says, the type is torch's too
                assert isinstance(ours.value, theirs.type), (name, arguments, ours.value)
    shared = torch.zeros(1).expand(n)
    for call in (lambda: sw.all_reduce(shared), lambda: sw.all_to_all_single(shared, x), lambda: sw.reduce_scatter_tensor(
        torch.zeros(1).expand(2), x), lambda: sw.all_gather_into_tensor(torch.zeros(1).expand(n * size), x)):
        with pytest.raises(errors.InvalidArgument, match="elements share memory"):
            call()
    with pytest.raises(ValueError, match="output and input overlap"):
        sw.all_to_all_single(x, x)
    wide, other = torch.zeros(2 * size, 3, dtype=torch.cfloat), torch.zeros(2 * size, 2, dtype=torch.cfloat)
    text = rf"output has rows of shape \(3,\), input of \(2,\): rank {rank} sends 4 elements to itself and receives 6"
    with pytest.raises(ValueError, match=text):
        sw.all_to_all_single(wide, other)
    more = [n + (p == rank) for p in range(size)]
    with pytest.raises(ValueError, match=rf"input_split_sizes\[{rank}\] is {n} and output_split_sizes\[{rank}\] is {n + 1}"):
        sw.all_to_all_single(torch.zeros(n * size + 1), torch.zeros(n * size), more, [n] * size)
    for nothing in (None, [1]):
        with pytest.raises(TypeError, match=r"free: tensor is (None|a list), want one of"):
            sw.free(nothing)
    # Nothing was sent: everybody can go on.
    sw.all_to_all_single(y, x)
    dist.all_to_all_single(y, x)


def test_wrong_arguments(gloo):
    gloo.run(wrong)


def defaults(rank, size):
    comm = sw.init(0, 1, default=False)
    d = sw.Dispatcher(4, 2, 8, group=comm, device="cpu")
    _dynamo.config.capture_dynamic_output_shape_ops = True  # there are as many rows as came
    x, idx, weights = torch.ones(3, 8), torch.tensor([[0, 1]] * 3), torch.ones(3, 2)

    def layer(x):
        got = d.dispatch(x, idx, weights)
        return d.combine(got.rows * 2, got)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            for shape in (0, (2, 3)):
                assert sw.empty(shape, dtype=torch.float32, group=comm, device="cpu").device.type == "cpu"
            for call in (layer, compiled):
                y = call(x)
                assert y.device.type == "cpu"
                assert torch.equal(y, 4 * x)
    finally:
        torch.set_default_dtype(torch.float32)


def test_torchs_default_device_and_type_change_nothing(worlds):
    worlds.get(2, world.gloo).run(defaults)


def hints(rank, size):
    x, many = torch.ones(2 * size, requires_grad=True), torch.ones(2 * size * size)
    for name, arguments in (
        ("all_to_all_single", (torch.ones(2 * size), x)),
        ("all_reduce", (x * 1,)),
        ("reduce_scatter_tensor", (torch.ones(2), x)),
        ("all_gather_into_tensor", (many, x)),
    ):
        text = rf"switchyard\.{name} has no gradient, and its input needs one: use switchyard\.torch\.{name}"
        with pytest.warns(UserWarning, match=text) as caught:
            getattr(sw, name)(*arguments)
        assert caught[0].filename == __file__
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error")
            getattr(sw, name)(*arguments)


def test_a_gradient_that_is_lost_is_said(worlds):
    worlds.get(2, world.gloo).run(hints)


def averages_of_integers(rank, size):
    x, many = torch.ones(2, dtype=torch.int32), torch.ones(2 * size, dtype=torch.int32)
    calls = [
        lambda: sw.all_reduce(x, "avg"),
        lambda: sw.all_reduce(x, dist.ReduceOp.AVG, async_op=True),
        lambda: sw.reduce_scatter_tensor(x, many, "avg"),
    ]
    if dist.get_backend() == "switchyard":
        calls += [
            lambda: dist.all_reduce(x, dist.ReduceOp.AVG),
            lambda: dist.reduce(x, 0, dist.ReduceOp.AVG),
            lambda: dist.reduce_scatter_tensor(x, many, dist.ReduceOp.AVG),
            lambda: dist.reduce_scatter(x, list(many.split(2)), dist.ReduceOp.AVG),
        ]
    for call in calls:
        with pytest.raises(errors.Unsupported, match=r"torch\.int32 on cpu; op 'avg' takes floats"):
            call()
        dist.broadcast(x, 0)  # the process group is as it was
    sw.all_reduce(x)
    assert x.tolist() == [size] * 2


def test_averages_of_integers_are_refused_before_anything_is_enqueued(gloo, backend):
    gloo.run(averages_of_integers)
    backend.run(averages_of_integers)


def asynchronous(rank, size):
    x = torch.arange(2.0 * size) + 100 * rank
    ours, theirs = torch.empty(2 * size), torch.empty(2 * size)
    work = sw.all_to_all_single(ours, x, async_op=True)
    reference = dist.all_to_all_single(theirs, x, async_op=True)
    assert isinstance(work, dist.Work)
    assert work.wait() == reference.wait() is True
    assert work.wait(timedelta(seconds=1)) is True
    assert work.is_completed()
    assert work.exception() is None
    assert work.result()[0] is ours
    assert torch.equal(ours, theirs)
    # From several threads, and in the order of the calls.
    outputs = [torch.empty(size * 20_000) for _ in range(10)]
    works = [sw.all_to_all_single(o, torch.full_like(o, k * size + rank), async_op=True) for k, o in enumerate(outputs)]
    done = []

    def wait(k: int) -> None:
        works[k].wait()
        done.append(outputs[k].view(size, -1)[:, 0].tolist() == [float(k * size + p) for p in range(size)])

    threads = [threading.Thread(target=wait, args=(k % 10,)) for k in range(20)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert done == [True] * 20
    y = torch.full((3,), float(rank))
    future = sw.all_reduce(y, async_op=True).get_future()
    assert future.wait()[0].tolist() == [sum(range(size))] * 3
    assert future.then(lambda f: f.value()[0] + 1).wait().tolist() == [sum(range(size)) + 1.0] * 3
    part = torch.empty(2)
    assert sw.reduce_scatter_tensor(part, torch.ones(2 * size), async_op=True).wait()
    whole = torch.empty(2 * size)
    assert sw.all_gather_into_tensor(whole, part, async_op=True).wait()
    assert whole.tolist() == [size] * 2 * size
    assert sw.barrier(async_op=True).wait()
    assert sw.barrier() is None


def test_async_op(gloo):
    gloo.run(asynchronous)


def late(rank, size):
    # A wait with a timeout that a peer does not make; the call goes on.
    x = torch.ones(2)
    if rank == 0:
        work = sw.all_reduce(x, async_op=True)
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait(timedelta(milliseconds=50))
        assert not work.is_completed()
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        sw.all_reduce(x)
    assert x.tolist() == [size, size]


def test_wait_with_a_timeout(gloo):
    gloo.run(late)


def groups(rank, size):
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    pgs = [dist.new_group(h) for h in halves]
    mine, other = (pgs[0], pgs[1]) if rank in halves[0] else (pgs[1], pgs[0])
    members = halves[0] if rank in halves[0] else halves[1]
    y = torch.empty(len(members))
    sw.all_to_all_single(y, torch.full((len(members),), float(rank)), group=mine)
    assert y.tolist() == members
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in (sw.all_to_all_single, dist.all_to_all_single):
            assert call(y, y, group=other) is None
        assert sw.all_reduce(y, group=other) is None
    texts = [re.sub(r"\d+", "n", str(w.message)) for w in caught]
    assert len(texts) == 3
    assert texts[0] == texts[1]
    # One after the other in any order: each group has its own.
    backwards = dist.new_group(list(reversed(range(size))))
    z = torch.tensor([float(rank)])
    sw.all_reduce(z, group=backwards)
    sw.all_reduce(z)
    assert z.item() == size * sum(range(size))
    assert sw.communicator(mine).size == len(members)
    dist.destroy_process_group(backwards)
    again = dist.new_group()
    sw.all_reduce(z, group=again)
    assert z.item() == size * size * sum(range(size))
    sub = sw.communicator().split(rank % 2)
    z = torch.tensor([1.0])
    sw.all_reduce(z, group=sub)
    assert z.item() == sub.size
    sub.close()


def test_groups_and_subgroups(gloo):
    gloo.run(groups)


def symmetric(rank, size):
    y = sw.empty(size, 1000)
    assert isinstance(y, torch.Tensor)
    assert y.dtype is torch.float32
    z = sw.empty((2, 3), dtype=torch.bfloat16)
    assert z.shape == (2, 3)
    x = sw.empty(size, 1000)
    for k in range(5):
        x.fill_(rank + k)
        y.fill_(-1)
        sw.barrier()
        sw.all_to_all_single(y, x)
        assert y[:, 7].tolist() == [p + k for p in range(size)]
        part = y[1:].flatten()[: 500 * size]  # a view, somewhere inside
        sw.all_reduce(part)
    sw.verify()
    sw.free(z)
    sw.free(y)
    with pytest.raises(errors.Freed):
        sw.free(y)
    sw.free(x)
    sw.verify()


def test_symmetric_tensors(gloo):
    gloo.run(symmetric)


def arrays(rank, size):
    # numpy arrays in a torch process group.
    import numpy as np

    y = np.empty(size, int)
    sw.all_to_all_single(y, np.full(size, rank))
    assert y.tolist() == list(range(size))


def test_arrays_in_a_process_group(gloo):
    gloo.run(arrays)


def without_gpus(rank, size):
    if torch.cuda.is_available():
        return
    for call in (lambda: sw.communicator(device="cuda"), lambda: sw.empty(3, device="cuda"), lambda: sw.mem_pool(1 << 20)):
        with pytest.raises(errors.Unsupported, match="no CUDA here"):
            call()
    with pytest.raises(errors.Unsupported, match="no symmetric heap on meta"):
        sw.empty(3, device="meta")
    with pytest.raises(errors.InvalidArgument, match="want a CUDA device"):
        sw.communicator(device="cpu")
    with pytest.raises(errors.InvalidArgument, match="an array on cuda"):
        sw.empty(3, dtype="f4", device="cuda")
    sw.check()  # there is nothing that could be wrong
    sw.synchronize()


def test_what_needs_a_gpu_says_so(gloo):
    gloo.run(without_gpus)


def refused_by_core(rank, size):
    # The library itself, on a machine without a driver: an error on every rank, and the group goes on.
    if torch.cuda.is_available():
        return
    comm = sw.communicator()
    for _ in range(2):
        with pytest.raises(errors.Unsupported, match="on rank 0"):
            comm._gpu(0)
    sw.barrier()


def test_a_machine_without_a_driver(gloo):
    gloo.run(refused_by_core)


def test_what_calls_on_gpus_pass_on(monkeypatch):
    # As far as it can be seen without one: splits in memory of the device, and the limits of a call.
    from types import SimpleNamespace

    from switchyard._core.abi import HEAD
    from switchyard._core.splits import Shapes
    from switchyard._torch import cuda

    device = -1  # what torch calls the host
    gpu = SimpleNamespace(device=device, _shapes=Shapes(2, 3))
    x, y = torch.zeros(10, 2), torch.zeros(20, 4)
    send, recv = torch.tensor([1, 5, 2]), torch.tensor([3, 0, 4])
    monkeypatch.setattr(cuda, "_on_gpu", lambda sizes: isinstance(sizes, torch.Tensor))
    address, (numbers, live) = cuda.shape_of(gpu, y, x, recv, send, None)
    assert address == numbers.buffer_info()[0]
    # As alltoallv.Splits.Live has it: bytes to send, where from, bytes to receive, where to.
    assert live.flatten().tolist() == [8, 40, 16, 0, 8, 48, 48, 0, 64, 0, 48, 48]
    assert live.is_contiguous()
    assert numbers.tolist() == [1, 320, 80, live.data_ptr(), 0, 0, 0, 0, *[26] * 6]
    limits = cuda.shape_of(gpu, y, x, recv, send, (None, 8, 0, None))[1][0]
    assert limits[5:8].tolist() == [8, -1, 0]
    for bad, text in (
        ((recv.to(torch.int32), send), "output_split_sizes is torch.int32"),
        ((recv, send[:2]), r"input_split_sizes is torch.int64 of shape \(2,\)"),
        (([3, 0, 4], send), "output_split_sizes is not on the GPU"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            cuda.shape_of(gpu, y, x, *bad, None)
    with pytest.raises(ValueError, match="peer_displs with split sizes on the GPU"):
        cuda.shape_of(gpu, y, x, recv, send, ([0, 0, 0], None, None, None))
    shape = cuda.shape_of(gpu, x, x, [2, 4, 4], [1, 5, 4], ([0, 7, 1], None, 3, True))[1][0]
    assert shape.tolist() == [8, 80, 80, 0, 1, 0, 3, 1, 1, 5, 4, 2, 4, 4, 0, 7, 1]
    known = gpu._shapes.find(x.shape, x.shape, 4, [2, 4, 4], [1, 5, 4])[1]
    assert known.tolist() == [8, 80, 80, 0, 0, 0, 0, 0, 1, 5, 4, 2, 4, 4]  # the remembered one is as it was
    assert len(known) == HEAD + 6
    for options, text in (({"max_sms": 0}, "max_sms is 0"), ({"copy_sms": -1}, "copy_sms is -1"), ({"max_sms": 2.5}, "is 2.5")):
        with pytest.raises(errors.InvalidArgument, match=text):
            sw.all_to_all_single(x, x, **options)


def test_a_tensor_over_memory_of_others_leaves_nothing_behind():
    from switchyard._torch.tensors import description, tensor_on

    memory = bytearray(b"switchyard")
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    about = description(at, torch.device("cpu"), torch.uint8, len(memory))
    assert bytes(tensor_on(about.buffer_info()[0]).numpy()) == memory

    def resident():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * resource.getpagesize()

    for _ in range(1000):
        tensor_on(about.buffer_info()[0])
    before = resident()
    for _ in range(100_000):
        tensor_on(about.buffer_info()[0])
    assert resident() - before < 4 << 20
