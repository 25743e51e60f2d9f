"""Switchyard without torch: numpy arrays, DLPack and buffers on the host."""

from __future__ import annotations

import contextlib
import re
import time
from array import array

import numpy as np
import pytest
import world
from world import free_port

import switchyard as sw
from switchyard import errors

DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
]  # fmt: skip


def counts(size: int) -> np.ndarray:
    """Rows that rank i sends to rank j, some of them none."""
    return np.array([[(3 * i + 2 * j) % 5 for j in range(size)] for i in range(size)])


def rows(rank: int, peer: int, n: int, width: int, dtype: str) -> np.ndarray:
    """Values that belong to one sender, receiver and element."""
    return (np.arange(n * width).reshape(n, width) * 7 + 100 * rank + 10 * peer).astype(dtype)


def uneven(rank, size, dtype):
    c = counts(size)
    x = np.concatenate([rows(rank, p, c[rank, p], 3, dtype) for p in range(size)])
    want = np.concatenate([rows(p, rank, c[p, rank], 3, dtype) for p in range(size)])
    y = np.full(want.shape, 1, dtype)
    sw.all_to_all_single(y, x, c[:, rank].tolist(), c[rank].tolist())
    np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_to_all_with_uneven_splits(plain, dtype):
    plain.run(uneven, dtype)


def equal(rank, size, n):
    x = np.concatenate([rows(rank, p, n, 1, "int64") for p in range(size)])
    y = np.zeros_like(x)
    sw.all_to_all_single(y, x)
    np.testing.assert_array_equal(y, np.concatenate([rows(p, rank, n, 1, "int64") for p in range(size)]))


@pytest.mark.parametrize("n", [0, 1, 5, 1000, 200_000])
def test_all_to_all_with_equal_splits(plain, n):
    plain.run(equal, n)


def nothing(rank, size):
    # Nobody sends to rank 0, and rows of no elements.
    send = [0] + [2] * (size - 1)
    recv = [0] * size if rank == 0 else [2] * size
    x, y = np.full((sum(send), 2), rank, "f4"), np.empty((sum(recv), 2), "f4")
    sw.all_to_all_single(y, x, recv, send)
    np.testing.assert_array_equal(y[:, 0], np.repeat(np.arange(size), recv))
    sw.all_to_all_single(np.empty((size, 0), "f4"), np.empty((size, 0), "f4"))
    sw.all_to_all_single(np.empty((size, 0), "f4"), np.empty((size, 0), "f4"), [1] * size, [1] * size)


def test_all_to_all_of_nothing(plain):
    plain.run(nothing)


def widths(rank, size):
    # Two floats of a row here are two rows there.
    x, y = np.full((size, 2), rank, "f4"), np.empty((2 * size, 1), "f4")
    sw.all_to_all_single(y, x, [2] * size, [1] * size)
    np.testing.assert_array_equal(y[:, 0], np.repeat(np.arange(size), 2))


def test_rows_of_both_sides_may_be_cut_differently(plain):
    plain.run(widths)


def foreign(rank, size):
    class Packed:
        """What has DLPack and nothing else."""

        def __init__(self, a):
            self.a = a

        def __dlpack__(self, **options):
            return self.a.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.a.__dlpack_device__()

    x, y = np.full(size, rank, "i8"), np.empty(size, "i8")
    sw.all_to_all_single(Packed(y), Packed(x))
    assert y.tolist() == list(range(size))
    out = array("q", [0] * size)
    sw.all_to_all_single(out, Packed(x))
    assert out.tolist() == list(range(size))
    got = bytearray(size)
    sw.all_to_all_single(got, bytes([rank] * size))
    assert list(got) == list(range(size))
    with pytest.raises(errors.InvalidArgument, match="read-only"):
        sw.all_to_all_single(bytes(size), bytes(size))


def test_dlpack_and_buffers(plain):
    plain.run(foreign)


def texts_and_times(rank, size):
    # Elements that numpy counts in characters, or has units of.
    texts, times = np.array(["ab", "cde", "f"] * size), np.arange(3 * size).astype("datetime64[s]")
    for x in (texts, times, texts.astype("S3")):
        y = np.zeros_like(x)
        sw.all_to_all_single(y, x)
        assert y.tolist() == x.reshape(size, 3)[rank].tolist() * size


def test_all_to_all_of_texts_and_times(plain):
    plain.run(texts_and_times)


def reductions(rank, size, dtype):
    all_of = [np.array([p + 1, 2, 3 * p, 1], "float64").astype(dtype) for p in range(size)]
    for op, reduce in (("sum", np.add), ("prod", np.multiply), ("min", np.minimum), ("max", np.maximum)):
        x = all_of[rank].copy()
        sw.all_reduce(x, op)
        np.testing.assert_array_equal(x, reduce.reduce(all_of, dtype=dtype), err_msg=op)
    if dtype.startswith("float"):
        x = all_of[rank].copy()
        sw.all_reduce(x, "avg")
        np.testing.assert_allclose(x, np.add.reduce(all_of) / size, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "float16", "float32", "float64"])
def test_all_reduce(plain, dtype):
    plain.run(reductions, dtype)


def same_bits(rank, size):
    x = np.array([100, -100], "int8")
    sw.all_reduce(x)
    assert x.tolist() == np.array([100 * size, -100 * size]).astype("int8").tolist()
    b = np.array([rank == 0, True, False])
    sw.all_reduce(b)
    assert b.tolist() == [True, True, False]
    b = np.array([rank == 0, True, False])
    sw.all_reduce(b, "prod")
    assert b.tolist() == [False, True, False]
    for dtype, op in (("int16", "sum"), ("int8", "max"), ("int32", "avg"), ("complex64", "sum"), ("float32", "band")):
        with pytest.raises(errors.Unsupported):
            sw.all_reduce(np.ones(2, dtype), op)


def test_all_reduce_of_small_types(plain):
    plain.run(same_bits)


def gather_and_scatter(rank, size):
    x = np.arange(6, dtype="f4").reshape(2, 3) + 10 * rank
    everything = np.concatenate([np.arange(6, dtype="f4").reshape(2, 3) + 10 * p for p in range(size)])
    for shape in ((2 * size, 3), (size, 2, 3), (6 * size,)):
        y = np.empty(shape, "f4")
        sw.all_gather_into_tensor(y, x)
        np.testing.assert_array_equal(y.reshape(everything.shape), everything)
    y = np.empty((2, 3), "f4")
    sw.reduce_scatter_tensor(y, everything)
    np.testing.assert_array_equal(y, everything[2 * rank : 2 * rank + 2] * size)


def test_all_gather_and_reduce_scatter(plain):
    plain.run(gather_and_scatter)


def asynchronous(rank, size):
    works, outputs = [], []
    for k in range(40):  # more than the queue's first size
        x, y = np.full(size * 100, 1000 * k + rank), np.zeros(size * 100, int)
        works.append(sw.all_to_all_single(y, x, async_op=True))
        outputs.append(y)
    del x, y
    for k, (work, y) in enumerate(zip(works, outputs)):
        assert work.wait() is True
        assert work.is_completed()
        assert work.exception() is None
        assert work.wait() is True  # any number of times
        assert y.tolist() == np.repeat(1000 * k + np.arange(size), 100).tolist()
    work = sw.barrier(async_op=True)
    assert work.wait()


def test_asynchronous_calls(plain):
    plain.run(asynchronous)


def forgotten(rank, size):
    # Nobody holds the work or its arrays: they live until it has run.
    total = np.zeros(1)
    for k in range(30):
        sw.all_to_all_single(np.empty(size * 50_000), np.full(size * 50_000, k, float), async_op=True)
    sw.all_reduce(total)


def test_forgotten_work_keeps_its_memory(plain):
    plain.run(forgotten)


def subgroups(rank, size):
    world = sw.communicator()
    sub = world.split(rank % 2, key=-rank)
    members = [r for r in reversed(range(size)) if r % 2 == rank % 2]
    assert (sub.rank, sub.size) == (members.index(rank), len(members))
    y = np.empty(sub.size, int)
    sw.all_to_all_single(y, np.full(sub.size, rank), group=sub)
    assert y.tolist() == members
    none = world.split(-1 if rank == 0 else 0)
    assert (none is None) == (rank == 0)
    if none is not None:
        x = np.ones(3)
        sw.all_reduce(x, group=none)
        assert x.tolist() == [size - 1] * 3
        none.close()
        with pytest.raises(errors.Closed):
            sw.all_reduce(x, group=none)
    sub.close()


def test_subgroups(plain):
    plain.run(subgroups)


def wrong(rank, size):
    x, y = np.zeros(2 * size, "f4"), np.empty(2 * size, "f4")
    each = [2] * size
    for output, input, recv, send, text in (
        (y, x, each[:-1], each, "Number of tensor splits not equal to group size"),
        (y, x, each, [1] * size, "Split sizes doesn't match total dim 0 size"),
        (y, x, [2 * size + 1, -1] + [0] * (size - 2), each, "negative"),
        (y, np.zeros(2 * size + 1, "f4"), None, None, "divide equally"),
        (y, np.zeros(2 * size, "f8"), None, None, "different dtypes"),
        (y, np.zeros(4 * size, "f4")[::2], None, None, "contiguous"),
        (np.zeros(4 * size, "f4")[::2], x, None, None, "contiguous"),
        (y, np.float32(1), None, None, "no dimension"),
    ):
        with pytest.raises(ValueError, match=text) as caught:
            sw.all_to_all_single(output, input, recv, send)
        assert isinstance(caught.value, RuntimeError)
    objects, floats = np.empty(size, object), np.array(each, float)
    for output, input, recv in ((y, 3, None), (y, x, [2.0] * size), (y, x, "22"), (y, x, floats), (objects, x, None)):
        with pytest.raises(TypeError):
            sw.all_to_all_single(output, input, recv, each)
    with pytest.raises(ValueError, match=r"world.size"):
        sw.all_gather_into_tensor(np.empty(3, "f4"), x)
    with pytest.raises(ValueError, match=r"world.size"):
        sw.reduce_scatter_tensor(np.empty(3, "f4"), x)
    with pytest.raises(ValueError, match="output and input overlap"):
        sw.all_to_all_single(x, x)
    sw.all_to_all_single(y, x)  # nothing has been sent, so all ranks go on


def test_wrong_arguments_are_refused(plain):
    plain.run(wrong)


def unlike(rank, size):
    # What a rank sends to itself is not what it receives from itself. The words are those of the tensors.
    both = "what a rank sends to itself it receives"
    x, own = np.zeros(2 * size, "f4"), [2] * size
    more = [3 if p == rank else 2 for p in range(size)]
    parts = f"input_split_sizes[{rank}] is 2 and output_split_sizes[{rank}] is 3: {both}"
    equal = f"input of shape ({2 * size},) has 2 rows for each rank and "
    shapes = f"output has rows of shape (3,), input of (2,): rank {rank} sends 4 elements to itself and receives 6"
    rows = np.zeros((2 * size, 3), "f4"), np.zeros((2 * size, 2), "f4")
    for output, input, recv, send, text in (
        (np.zeros(2 * size + 1, "f4"), x, more, own, parts),
        (np.zeros(2 * size + 1, "f4"), x, iter(more), iter(own), parts),
        (np.zeros(2 * size + 1, "f4"), x, more, None, f"{equal}output_split_sizes[{rank}] is 3: {both}"),
        (np.zeros(3 * size, "f4"), x, None, None, f"{equal}output of shape ({3 * size},) has 3 rows for each rank: {both}"),
        (*rows, None, None, shapes),
        (*rows, own, own, shapes),
        (np.zeros((2 * size, 0), "f4"), rows[1], own, own, "output has rows of shape (0,), input of (2,)"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)) as caught:
            sw.all_to_all_single(output, input, recv, send)
        assert "byte" not in str(caught.value)
    gathered, other = np.zeros(size, "f4"), (rank + 1) % size
    with pytest.raises(ValueError, match="output_tensor and input_tensor overlap"):
        sw.all_gather_into_tensor(gathered, gathered[other : other + 1])
    sw.barrier()


def test_what_a_rank_sends_to_itself_it_receives(plain):
    plain.run(unlike)


def disagree(rank, size, n):
    # Rank 0 sends rank 1 more than it expects. The receiver sees that at once, and the sender where it has to wait for it.
    # A sender that need not wait learns it by the end of its next call.
    send = [n] * size
    send[1] += 1 if rank == 0 else 0
    x, y = np.zeros(sum(send), "f4"), np.empty(n * size, "f4")
    text = f"sends {4 * n + 4} bytes to rank 1, which expects {4 * n}"
    work = sw.all_to_all_single(y, x, [n] * size, send, async_op=True)
    late = False
    if rank == 0 and n < 100_000:
        with contextlib.suppress(errors.Mismatch):
            work.wait()
        late = work.exception() is None
        assert late or text in str(work.exception())
    elif rank < 2:
        for _ in range(2):
            with pytest.raises(errors.Mismatch, match=text):
                work.wait()
        assert isinstance(work.exception(), errors.Mismatch)
    else:
        work.wait()
    with pytest.raises(errors.Mismatch, match=text) if late else contextlib.nullcontext():
        sw.barrier()
    sw.barrier()  # later calls work


def out_of_step(rank, size):
    comm = sw.communicator().split(0)
    x = np.ones(size)
    calls = [lambda: sw.all_to_all_single(np.zeros(size), x, group=comm), lambda: sw.all_reduce(x, group=comm)]
    mine = calls[rank % 2]
    with pytest.raises(errors.OutOfStep, match="which this rank has not made") as caught:
        mine()
    assert caught.value.rank != rank
    assert not isinstance(caught.value, errors.Mismatch)
    with pytest.raises(errors.OutOfStep, match="an earlier call failed"):
        mine()
    comm._abandon(0)
    sw.barrier()  # the group that it was split from is as it was


def test_ranks_in_calls_of_different_kinds_are_out_of_step(worlds):
    worlds.get(2, world.plain).run(out_of_step)


@pytest.mark.parametrize("n", [1, 1000, 100_000])
def test_ranks_that_disagree_learn_it(plain, n):
    plain.run(disagree, n)


def refuse(rank, size, port):
    # Rank 1 refuses a call before the library sees it. The others hear of that at once, and why.
    comm = sw.init(rank, size, f"127.0.0.1:{port}", timeout=60, validate=True, default=False)
    n, bad = 2 * size, rank == 1
    x, y, z = np.ones(n, "f4"), np.zeros(n, "f4"), np.zeros(n * size, "f4")
    began = time.monotonic()
    for text, kind, run in (
        ("output_split_sizes sums to", ValueError, lambda: sw.all_to_all_single(y, x, [2 + bad] * size, [2] * size, comm)),
        ("output is float64", TypeError, lambda: sw.all_to_all_single(y.astype("f8" if bad else "f4"), x, group=comm)),
        ("input_split_sizes is", TypeError, lambda: sw.all_to_all_single(y, x, None, "x" if bad else None, comm, True).wait()),
        ("want one of sum", ValueError, lambda: sw.all_reduce(x, "median" if bad else "sum", comm)),
        ("is complex64; op 'sum' takes", NotImplementedError, lambda: sw.all_reduce(x.astype("c8") if bad else x, group=comm)),
        ("must be the same size", ValueError, lambda: sw.reduce_scatter_tensor(y[: 2 - bad], x, group=comm)),
        ("output tensor size must", ValueError, lambda: sw.all_gather_into_tensor(z[bad:], x, comm)),
    ):
        with pytest.raises(kind if bad else (errors.InvalidArgument, errors.Unsupported), match=text) as caught:
            run()
        if not bad:
            assert "rank 1 refused: " in str(caught.value)
            assert caught.value.rank == 1
            assert isinstance(caught.value, errors.Unsupported) is (kind is NotImplementedError)
        assert (x == 1).all()
        assert (y == 0).all()
    assert time.monotonic() - began < 50
    sw.all_to_all_single(y, x, group=comm)
    assert (y == 1).all()
    comm.close()


def test_with_validate_all_ranks_hear_what_one_refuses(worlds):
    worlds.get(3, world.plain).run(refuse, free_port())


def symmetric(rank, size):
    y = sw.empty(size, 3, dtype=np.float64)
    assert (y.shape, y.dtype) == ((size, 3), np.float64)
    before = sw.empty(5, dtype="int16")
    y.fill(-1)
    sw.barrier()
    sw.all_to_all_single(y, np.full((size, 3), rank, float))
    assert y[:, 0].tolist() == list(range(size))
    sw.all_to_all_single(y[1:2].reshape(-1)[:0], np.empty(0))
    sw.verify()
    sw.free(before)
    with pytest.raises(errors.Freed):
        sw.free(before)
    large = sw.empty(100 << 20, dtype="u1")  # more than the heap has at first
    large[::1000] = rank
    sw.free(large)
    assert sw.empty(0, dtype="f4").shape == (0,)
    sw.free(y)
    sw.verify()


def test_symmetric_arrays(plain):
    plain.run(symmetric)


def diverge(rank, size):
    comm = sw.communicator().split(0)
    if rank == 0:
        extra = sw.empty(7, dtype="f4", group=comm)
        del extra
    with pytest.raises(errors.Diverged, match="alloc"):
        sw.verify(group=comm)
    comm.close()


def test_verify_finds_what_ranks_did_differently(plain):
    plain.run(diverge)


def reference(x, idx, weights, experts, rank, size, function):
    """What a token gets from its experts, computed where it is."""
    y = np.zeros_like(x)
    for t in range(len(x)):
        for k, e in enumerate(idx[t]):
            if e >= 0:
                y[t] += weights[t, k] * function(e, x[t])
    return y


def mixture(rank, size, layout, redundant):
    rng = np.random.default_rng(rank)
    experts, top_k, hidden, tokens = 6, 2, 8, 5 + 3 * rank
    placement = [[e % size, (e + 1) % size] for e in range(experts)] if redundant else None
    extra = {"capacity": 64} if layout == "padded" else {"align": 4}
    d = sw.Dispatcher(experts, top_k, hidden, max_tokens=32, layout=layout, placement=placement, **extra)
    for _ in range(3):
        x = rng.standard_normal((tokens, hidden)).astype("f4")
        idx = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)])
        idx[0, 1] = -1
        weights = rng.random((tokens, top_k))
        got = d.dispatch(x, idx, weights)
        assert got.rows.shape == (got.num_rows, hidden)
        out = got.rows.copy()
        for expert, part, first in zip(got.experts, got.expert_rows(), got.offsets):
            out[first : first + len(part)] = part * (expert + 1)
        y = d.combine(out, got)
        np.testing.assert_allclose(y, reference(x, idx, weights, experts, rank, size, lambda e, r: (e + 1) * r), rtol=1e-4)
        routing, made = got.keep(), out
        del got, part, out
        way, again = d.route(routing), np.full_like(y, np.nan)
        assert d.combine(made, way, out=again) is again
        np.testing.assert_array_equal(again, y)
        np.testing.assert_array_equal(d.combine(d.redispatch(x, way).rows, way, weighted=False), (idx >= 0).sum(1)[:, None] * x)
        for bad in (again[:1], again.T, again.astype("f8"), [1]):
            with pytest.raises((errors.InvalidArgument, errors.InvalidType), match="out is"):
                d.combine(made, way, out=bad)
        del way
        got = d.dispatch(x, idx, weights)
        rows, counts, came = got.rows.copy(), got.counts, got.num_rows
        left = got.take(came + 2)
        np.testing.assert_array_equal(left.rows[:came], rows)
        assert left.rows.shape == (came + 2, hidden)
        assert (left.counts.tolist(), left.host.rows) == (counts, came)
        np.testing.assert_array_equal(d.combine(made, left.routing), y)
        np.testing.assert_array_equal(d.combine(made, left.routing, token_weights=weights), y)
    assert sum(d.traffic()) > 0
    d.close()


@pytest.mark.parametrize("redundant", [False, True])
@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_dispatcher(plain, layout, redundant):
    plain.run(mixture, layout, redundant)


def too_many(rank, size):
    d = sw.Dispatcher(size, 1, 4, max_tokens=8, layout="padded", capacity=2, handles=1)
    x, idx, weights = np.ones((8, 4), "f4"), np.zeros((8, 1), int), np.ones((8, 1))
    with pytest.raises(errors.Overflow):
        d.dispatch(x, idx, weights)
    few = d.dispatch(x[:1], np.full((1, 1), rank), weights[:1])
    with pytest.raises(errors.NoHandle):
        d.dispatch(x[:1], np.full((1, 1), rank), weights[:1])
    with pytest.raises(errors.InvalidArgument, match=r"alive: 1\. .*`release\(\)`"):
        d.close()
    del few
    again = d.dispatch(x[:1], np.full((1, 1), rank), weights[:1])
    del again
    narrow = sw.Dispatcher(size, 1, 4, max_tokens=8, index_dtype="int32")
    for no in (1 << 32, (1 << 32) - 1, -(1 << 32)):
        with pytest.raises(errors.InvalidArgument, match=f"experts has {no}, and the dispatcher takes indices of int32"):
            narrow.dispatch(x[:2], np.array([[0], [no]]), weights[:2])
    with pytest.raises(errors.InvalidArgument, match=f"experts has {(1 << 64) - 1}, and the dispatcher takes indices of int64"):
        d.dispatch(x[:1], np.array([[(1 << 64) - 1]], np.uint64), weights[:1])
    narrow.close()
    with pytest.raises(errors.InvalidArgument, match=f"size is {4 << 80}, want an integer of 64 bits"):
        sw.empty(1 << 40, 1 << 40, dtype=np.float32)
    for bad in ((x[:, :3], idx, weights), (x, idx[:3], weights), (x.astype("f8"), idx, weights), (x[:1], [[size]], [[1.0]])):
        with pytest.raises(errors.InvalidArgument):
            d.dispatch(*bad)
    d.close()


def test_dispatcher_refuses(plain):
    plain.run(too_many)
