"""Calls that the library makes as operators of torch are those that Python makes: bits, errors, and what they leave behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import switchyard as sw
from switchyard import errors

torch = pytest.importorskip("torch")

from switchyard._core.native import library  # noqa: E402
from switchyard._torch import calls, operators  # noqa: E402
from switchyard._torch.moe_bare import bring, deliver, delivery, lease  # noqa: E402

FLOAT8 = "float8_e4m3fn"

ABI = Path(__file__).resolve().parents[1] / "abi"
#: torch from this version on has all that operators need.
SINCE = (2, 11)


def has_them() -> bool:
    return tuple(map(int, torch.__version__.split(".")[:2])) >= SINCE


needs_them = pytest.mark.skipif(not has_them(), reason=f"operators need torch {SINCE[0]}.{SINCE[1]}")


@contextlib.contextmanager
def by_python(d=None):
    """Calls without operators, of groups and of a dispatcher."""
    comm = sw.communicator()
    kept, operators._operators = operators._operators, lambda: None
    known, operated = comm._exchanges, d and d._operated
    comm._exchanges = {}
    if d:
        d._operated = None
    try:
        yield
    finally:
        operators._operators, comm._exchanges = kept, known
        if d:
            d._operated = operated


class Counting:
    """How many calls operators have made, of those that were asked of them."""

    def __init__(self, made, *names):
        self.made, self.asked, self.served = made, 0, 0
        self.kept = {name: getattr(made, name) for name in names}

    def __enter__(self):
        for name, method in self.kept.items():
            setattr(self.made, name, self.counted(method))
        return self

    def counted(self, method):
        def call(*arguments):
            self.asked += 1
            answer = method(*arguments)
            self.served += answer is not None and answer is not False
            return answer

        return call

    def __exit__(self, *_):
        for name in self.kept:
            delattr(self.made, name)


def splits(rank, size, seed):
    rows = torch.randint(0, 5, (size, size), generator=torch.Generator().manual_seed(seed)).tolist()
    return [rows[k][rank] for k in range(size)], rows[rank]


def both(output, *arguments):
    """What an exchange leaves in an output, by operators and by Python, or its error."""
    results = []
    for how in (contextlib.nullcontext, by_python):
        into = output.clone()
        with how():
            try:
                sw.all_to_all_single(into, *arguments)
                results.append(into)
            except (sw.Error, RuntimeError) as err:
                results.append((type(err), str(err)))
    return results


def exchanged(rank, size, device):
    usual = torch.ones(size, 2, device=device)
    sw.all_to_all_single(torch.empty_like(usual), usual)  # the ranks have met
    made = operators.exchanges(sw.communicator(), usual.get_device())
    seed = 0
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.int64, torch.float8_e4m3fn):
        for tail in ((), (3,), (1, 2, 2)):
            seed += 1
            received, sent = splits(rank, size, seed)
            x = torch.arange(sum(sent) * int(torch.Size(tail).numel()), device=device)
            x = (x + 31 * rank).to(torch.uint8).view(sum(sent), *tail).to(dtype)
            empty = torch.zeros(sum(received), *tail, device=device).to(dtype)
            with Counting(made, "make") as counting:
                one, other = both(empty, x, received, sent)
            assert counting.asked == counting.served == 1
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            assert torch.equal(*both(empty[:0], x[:0], [0] * size, [0] * size))
            equal = x.new_zeros(2 * size, *tail)
            assert torch.equal(*(o.view(torch.uint8) for o in both(torch.zeros_like(equal), equal)))
    # Python makes or refuses what is unusual.
    x, y = torch.randn(2 * size, 4, device=device), torch.zeros(2 * size, 4, device=device)
    one = [2] * size
    served = []
    unusual = [
        (y.T, x.T), (y, x.to(torch.complex64)), (torch.zeros_like(x, dtype=torch.complex64), x.to(torch.complex64)),
        (y[:, :3], x[:, :3]), (y[0, 0], x), (y.flatten(), x), (y, x.double()), (y, x, one, None), (y, x, [], one),
        (y, x, [2.0] * size, one), (y, x, one, [3, *one[1:]]), (y, x, [-1, 5, *one[2:]], one), (y, x, [*one, 0], one),
        (y, x, one, "22"), (y, x, [1 << 70, *one[1:]], one), (y[:1], x[:1]), (y[:, :0], x[:, :0]),
        (torch.zeros_like(x).requires_grad_(), x), (y, torch.complex(x, x).conj().imag),
    ]  # fmt: skip
    for arguments in unusual:
        with Counting(made, "make") as counting:
            answers = both(*arguments)
        served.append(counting.served)
        if isinstance(answers[0], tuple):
            assert answers[0] == answers[1], arguments
        else:
            assert torch.equal(*answers), arguments
    assert sum(served) <= 3, served
    sw.barrier()
    # Autograd is told.
    written = y._version
    sw.all_to_all_single(y, x)
    assert y._version == written + 1
    with torch.inference_mode():
        z = torch.zeros_like(y)
        sw.all_to_all_single(z, x)
    assert torch.equal(z, y)


@needs_them
def test_exchanges_are_those_of_python(gloo):
    gloo.run(exchanged, "cpu")


def answers_of(call, output, *arguments):
    """What a call leaves in an output, by operators and by Python, or its error."""
    results = []
    for how in (contextlib.nullcontext, by_python):
        into = output.clone()
        with how():
            try:
                assert call(into, *arguments) is None
                results.append(into)
            except (sw.Error, RuntimeError) as err:
                results.append((type(err), str(err)))
    return results


def reduced(rank, size, device):
    """Reductions and gathers of all types and operators, and of tensors that operators leave to Python."""
    for call in (sw.all_reduce, lambda x: sw.all_gather_into_tensor(x.new_empty(size, *x.shape), x)):
        call(torch.ones(2, device=device))  # the ranks have met, and a GPU is ready for reductions
    made = operators.exchanges(sw.communicator(), torch.ones(1, device=device).get_device())
    g = torch.Generator().manual_seed(rank)

    def alike(served, name, call, output, *arguments):
        with Counting(made, name) as counting:
            one, other = answers_of(call, output, *arguments)
        assert counting.served == served, (name, output.dtype, arguments)
        if isinstance(one, tuple):
            assert one == other
        else:
            assert torch.equal(*(t.flatten().view(torch.uint8) for t in (one, other))), (name, output.dtype)

    for dtype in calls.DTYPE_NAMES:
        x = torch.randint(-3, 4, (size, 3, 5), generator=g).to(dtype).to(device)
        for op in ("sum", "avg", "min", "max", "prod", torch.distributed.ReduceOp.SUM):
            if calls._KINDS[dtype, calls.op_name(op)] is not None:
                alike(True, "reduce", sw.all_reduce, x, op)
                alike(True, "scatter", sw.reduce_scatter_tensor, x[0], x, op)
        alike(True, "gather", sw.all_gather_into_tensor, x.new_empty(size, *x.shape), x)
    x, y = torch.ones(2 * size, 4, device=device), torch.ones(2, 4, device=device)
    alike(True, "reduce", sw.all_reduce, x[0, 0])
    alike(True, "reduce", sw.all_reduce, x[:0])
    for unusual in (x.T, torch.complex(x, x), x.to(torch.int16)):
        alike(False, "reduce", sw.all_reduce, unusual)
    alike(False, "scatter", sw.reduce_scatter_tensor, y, torch.complex(x, x).conj().imag)
    for output, input in ((y.T, x), (y, x.T), (y, x[1:]), (y, x.double()), (y[:1], x)):
        alike(False, "scatter", sw.reduce_scatter_tensor, output, input)
        alike(False, "gather", sw.all_gather_into_tensor, input, output)
    # Autograd is told.
    for call, arguments in ((sw.all_reduce, (x,)), (sw.reduce_scatter_tensor, (y, x)), (sw.all_gather_into_tensor, (x, y))):
        written = arguments[0]._version
        call(*arguments)
        assert arguments[0]._version == written + 1
        with torch.inference_mode():
            call(torch.zeros_like(arguments[0]), *arguments[1:])


@needs_them
def test_reductions_are_those_of_python(gloo):
    gloo.run(reduced, "cpu")


def disagreeing(rank, size):
    """The error of the library itself, which comes while the operator waits."""
    x = torch.ones(2 + rank, 1 << 16)
    sent, received = [1 + (rank == k) for k in range(size)], [1] * size
    received[rank] = sent[rank]
    received[(rank + 1) % size] += 1  # which nobody sends
    texts = []
    for how in (contextlib.nullcontext, by_python):
        with how(), pytest.raises(sw.errors.Mismatch) as caught:
            sw.all_to_all_single(torch.empty(sum(received), 1 << 16), x[: sum(sent)].contiguous().resize_(sum(sent), 1 << 16),
                                 received, sent)  # fmt: skip
        texts.append(str(caught.value))
    y = torch.empty(size)
    sw.all_to_all_single(y, torch.full((size,), float(rank)))
    assert y.tolist() == list(range(size))


@needs_them
def test_errors_of_the_library_come_through(gloo):
    gloo.run(disagreeing)


def tokens(rank, d, n, device, seed=0):
    g = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(n, d.hidden, generator=g).to(getattr(torch, d.dtype)).to(device)
    idx = torch.rand(n, d.experts, generator=g).topk(d.top_k)[1].to(getattr(torch, d.index_dtype)).to(device)
    return x, idx, torch.rand(n, d.top_k, generator=g).to(device)


def scales_of(d, n, device):
    """Scales of tokens of float8."""
    if d.dtype != FLOAT8:
        return None
    g = torch.Generator().manual_seed(n)
    words = torch.randint(1, 100, (n, d._scale_words), generator=g)
    return words.to(torch.int32 if d._exponents else torch.float32).to(device)


def parts(d, got):
    """All that a dispatch has left, as far as it is defined."""
    host = got.host_counts() if d._counted else None
    rows = got.rows.view(torch.uint8) if d._float8 else got.rows
    return (rows if host is None else rows[: host.rows]).clone(), host


def paired(rank, size, device):
    for options in (
        {"layout": "flat", "align": 4}, {"layout": "padded", "capacity": 64}, {"layout": "token_major"},
        {"layout": "rank_padded", "dtype": "bfloat16"}, {"layout": "flat", "dtype": "float16", "row_weights": True},
        {"layout": "flat", "dtype": "bfloat16", "quantize": True, "index_dtype": "int32"},
        {"layout": "token_major", "dtype": FLOAT8, "scale_format": "ue8m0"}, {"layout": "flat", "dtype": FLOAT8},
        {"layout": "padded", "dtype": FLOAT8, "scale_per_token": True, "scale_columns": True},
    ):  # fmt: skip
        options = {"dtype": "float32", **options}
        hidden = 256
        if options["dtype"] is FLOAT8:
            options["combine_dtype"] = "bfloat16"
        d = sw.Dispatcher(2 * size, 2, hidden, max_tokens=16, host_counts=True, device=device, **options)
        defined = d.layout != "rank_padded"  # padding there is not
        x, idx, _ = tokens(rank, d, 2, device)
        d.dispatch(x, idx, scales=scales_of(d, 2, device)).release()  # the first call makes the operators known
        for n in (9 + rank, 1, 0 if rank else 3):
            x, idx, weights = tokens(rank, d, n, device, n)
            scales = scales_of(d, n, device)
            for given in (weights, None):
                answers = []
                for how in (lambda d: Counting(d._operated, "dispatch", "combine"), by_python):
                    with how(d) as counting:
                        got = d.dispatch(x, idx, given, scales=scales)
                        rows, host = parts(d, got)
                        came = None if scales is None else got.scales.clone()
                        made = got.rows.to(getattr(torch, d.combine_dtype)) if d._float8 else got.rows
                        y = d.combine(made, got)
                        routed = d.combine(made, got.keep(), token_weights=None if d.by_token else weights)
                        unweighted = d.combine(made, got, weighted=False, release=True)
                        answers.append((rows, host, came, y, routed, unweighted))
                        assert counting is None or counting.served == 4
                    with pytest.raises(sw.errors.Freed):
                        d.combine(made, got)
                    del got, made
                one, other = answers
                assert one[1] == other[1]
                assert not defined or torch.equal(one[0], other[0])
                if scales is not None and d.layout != "padded":  # whose padding has none
                    n = one[1].rows
                    assert torch.equal(one[2][:n], other[2][:n])
                assert all(map(torch.equal, one[3:], other[3:]))
        d.close()


@needs_them
def test_dispatches_are_those_of_python(gloo):
    gloo.run(paired, "cpu")


def shortened(rank, size, device):
    """As many rows as the host was told of are combined by an operator, where the dispatch has not said so, as on a GPU."""
    d = sw.Dispatcher(2 * size, 2, 8, max_tokens=16, dtype="float32", layout="token_major", host_counts=True, device=device)
    x, idx, weights = tokens(rank, d, 9, device)
    d.dispatch(x, idx, weights).release()  # the first call makes the operators known
    got = d.dispatch(x, idx, weights)
    rows = got.rows[: got.host_counts().rows].clone()
    want = d.combine(rows, got)
    got._output.counts = None
    assert rows.shape[0] == got.host_counts().rows < d.max_rows
    with Counting(d._operated, "combine") as counting:
        y = d.combine(rows, got, release=True)
    assert counting.served == counting.asked == 1
    assert torch.equal(y, want)
    del got
    d.close()


@needs_them
def test_rows_that_the_host_was_told_of_are_usual(gloo):
    gloo.run(shortened, "cpu")


def refuse_alike(d, call, *arguments):
    """The call is refused with operators and without, in the same words."""
    said = []
    for how in (contextlib.nullcontext, by_python):
        with how(d), pytest.raises(sw.Error) as caught:
            call(*arguments)
        said.append((type(caught.value), re.sub(r"call \d+", "call", str(caught.value))))
    assert said[0] == said[1]


def refused(rank, size, device):
    d = sw.Dispatcher(2 * size, 2, 8, max_tokens=4, handles=2, device=device)
    x, idx, weights = tokens(rank, d, 3, device)
    d.dispatch(x, idx, weights).release()
    twice = torch.cat([x, x]), torch.cat([idx, idx]), None
    wrong = [
        (x[:, :4], idx, weights), (x.double(), idx, weights), (x[0], idx, weights), (x, idx[:2], weights),
        (x, idx, weights[:2]), (x, idx.float(), weights), (x.tolist(), idx, weights), (x, weights, idx), twice,
    ]  # fmt: skip
    for arguments in wrong:
        refuse_alike(d, d.dispatch, *arguments)
    got = d.dispatch(x, idx, weights)
    many = torch.zeros(d.max_rows + 1, 8, device=device)
    for rows in (got.rows[:, :4], got.rows.double(), got.rows[0], got.rows[None], many):
        refuse_alike(d, d.combine, rows, got)
    # What operators convert no more than Python does: strides, types of indices, gradients.
    want = d.combine(got.rows, got)
    strided = torch.zeros(3, 16, device=device)[:, ::2].copy_(x)
    again = d.dispatch(strided, idx.to(torch.int32), weights.double())
    assert torch.equal(d.combine(again.rows, again), want)
    again.release()
    del again
    leaf = weights.clone().requires_grad_()
    again = d.dispatch(x, idx, leaf)
    d.combine(again.rows, again).sum().backward()
    assert leaf.grad is not None
    # No handle is left, but for those in a cycle, which are found.
    del again, leaf
    cycle = [d.dispatch(x, idx, weights)]
    cycle.append(cycle)
    del cycle
    again = d.dispatch(x, idx, weights)
    with pytest.raises(sw.errors.NoHandle):
        d.dispatch(x, idx, weights)
    del again, got, rows
    gc.collect()
    d.close()


@needs_them
def test_refusals_are_those_of_python(gloo):
    gloo.run(refused, "cpu")


def leased(rank, size, device):
    """Dispatches whose results are lent, with the choices of each expert in memory of their own, and combines by them."""
    d = sw.Dispatcher(2 * size, 2, 128, max_tokens=16, layout="slab", dtype="bfloat16", handles=2, device=device)
    x, idx, weights = tokens(rank, d, 5 + rank, device)
    got = d.dispatch(x, idx)  # the first call makes the operators known
    known, out = list(got.counts), torch.empty_like(x)
    want = d.combine(got.rows.clone(), got, token_weights=weights)
    got.release()
    asked, held = d._operated.lease, None
    for made in (lambda: asked(x, idx, None, False), lambda: lease(d, x, idx, False), lambda: asked(x, idx, None, False)):
        got, counts = made()
        assert counts.tolist() == known
        version = out._version
        for into in (None, out):
            y = bring(d, d._torch.lent(got._output)[0], got, token_weights=weights, out=into)
            assert torch.equal(y, want)
        assert y is out
        assert out._version > version
        got, held = None, got  # two of three have an output
    # A call of which anything is unusual has done nothing, and the one that is made next gives an output back.
    other, _ = lease(d, x, idx, False)
    ends = held._output
    unusual = (x[0], idx), (x.float(), idx), (x, idx.int()), (torch.cat([x, x, x, x]), torch.cat([idx, idx, idx, idx]))
    for wrong in unusual:
        assert asked(*wrong, ends, False) is None
    assert asked(x, idx, ends, True) is None  # a half, on the host
    rows = d._torch.lent(held._output)[0].view(-1, 128).clone()
    assert torch.equal(d.combine(rows, held, token_weights=weights), want)
    third, counts = asked(x, idx, ends, False)
    assert counts.tolist() == known
    with pytest.raises(errors.Freed):
        d.combine(rows, held, token_weights=weights)
    # One whose rows somebody holds stays, and the call finds no output.
    kept = third.rows
    with pytest.raises(errors.NoHandle):
        asked(x, idx, third._output, False)
    del other, third, kept
    assert asked(x, idx, None, False)[1].tolist() == known
    d.close()


@needs_them
def test_leases_are_those_of_python(gloo):
    gloo.run(leased, "cpu")


#: The number of the word in an operator's description of dispatches that says how long the host waits.
WAIT = operators._ABOUT - 1


def came(d, made, came):
    """A result as far as it is defined: rows that came, and where they came from."""
    rows = made.rows.view(torch.uint8) if d._float8 else made.rows
    whole = [made.indices, made.row_weights, made.counts, made.offsets, made.rank_counts]
    return [rows[:came], *whole, *(x if x is None else x[:came] for x in (made.scales, made.sources))]


def same(one, other):
    assert [x is None for x in one] == [x is None for x in other]
    for x, y in zip(one, other):
        if x is not None:
            assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
            assert torch.equal(x, y)


def delivered(rank, size, device):
    """Deliveries: all that they leave, of all lengths, and combines by it."""
    float8 = torch.float8_e4m3fn
    for options in (
        {"sources": True}, {"dtype": "bfloat16", "index_dtype": "int32"}, {"dtype": float8, "scale_format": "float32"},
        {"dtype": float8, "scale_format": "ue8m0"}, {"dtype": float8, "scale_per_token": True},
        {"quantize": True, "scale_columns": True, "dtype": "bfloat16"}, {"layout": "flat", "row_weights": True},
        {"layout": "flat", "quantize": True, "dtype": "bfloat16", "sources": True},
        {"layout": "padded", "quantize": True, "scale_columns": True, "dtype": "bfloat16"},
    ):  # fmt: skip
        options = {"layout": "token_major", "dtype": "float32", "combine_dtype": "float32", **options}
        if options["dtype"] != "float32":
            options["combine_dtype"] = "bfloat16"
        d = sw.Dispatcher(2 * size, 2, 256, max_tokens=16, handles=1, host_counts=True, device=device, **options)
        make, weighs = delivery(d), d.by_token or d._weighs_rows
        x, idx, _ = tokens(rank, d, 2, device)
        words = 0 if d.dtype != "float8_e4m3fn" else 1 if d._scale_per_token else d._scale_words
        kind = torch.int32 if d._exponents else torch.float32
        make(x, idx, None, torch.ones(2, words, dtype=kind, device=device) if words else None, None, False)
        make.__self__._python = None  # from the second call on it has none to make
        for n in (9 + rank, 0 if rank else 3):
            x, idx, weights = tokens(rank, d, n, device, n)
            scales = (100 * torch.rand(n, words, device=device)).to(kind) if words else None
            for given in (weights, None) if weighs else (None,):
                for length in (None, d.max_rows) if d._whole else (None, 4, 0, size * 16):
                    for copies in (False, length is None):
                        known = x, idx, given, scales, length, copies
                        other = deliver(d, *known)
                        one = make(*known)
                        rows = deliver(d, *known[:4], None, False).host.rows
                        rows = min(rows, len(one.rows))
                        assert one.host == other.host
                        assert len(one.rows) == len(other.rows)
                        if d.layout == "padded":  # whose padding is not defined
                            same([one.counts, one.offsets, one.rank_counts], [other.counts, other.offsets, other.rank_counts])
                        else:
                            same(*(came(d, made, rows) for made in (one, other)))
                        if copies:
                            assert torch.equal(one.lists.choices().view(-1), idx.view(-1))
                        if length is None:
                            back = torch.randn(len(one.rows), d.hidden, device=device).to(getattr(torch, d.combine_dtype))
                            back = back[: one.host.rows] if one.host else back
                            same(*([bring(d, back, made.routing)] for made in (one, other)))
        assert d._alive() == 0
        d.close()


@needs_them
def test_deliveries_are_those_of_python(gloo):
    gloo.run(delivered, "cpu")


def late(rank, size, device):
    """Deliveries that wait for long, find no memory for their output at first, or are refused."""
    d = sw.Dispatcher(2 * size, 2, 8, max_tokens=4, handles=1, layout="token_major", sources=True, device=device)
    x, idx, weights = tokens(rank, d, 3, device)
    make = delivery(d)
    make(x, idx, weights, None, None, True)
    by = make.__self__
    wait, by._about[WAIT] = by._about[WAIT], 0
    for length in (None, 5):
        given = x, idx, weights, None, length, True
        one, other = make(*given), deliver(d, *given)
        assert one.host == other.host
        n = min(one.host.rows, len(one.rows))
        same(came(d, one, n), came(d, other, n))
        assert torch.equal(one.lists.choices().view(-1), idx.view(-1))
    by._about[WAIT] = wait
    cycle = [d.dispatch(x, idx, weights)]
    cycle.append(cycle)
    del cycle
    assert make(*given).host == one.host
    got = d.dispatch(x, idx, weights)

    def either(*arguments):
        return (make if d._operated else by._python)(*arguments)

    refuse_alike(d, either, *given)
    got.release()
    wrong = idx.clone()
    if rank == 0:
        wrong[-1, 0] = 2 * size
    refuse_alike(d, either, x, wrong, *given[2:])
    assert d._alive() == 0
    live = library().live()
    for _ in range(50):
        make(*given)
        make(x, idx, None, None, None, False)
    assert library().live() == live
    d.close()


@needs_them
def test_deliveries_that_wait_or_fail(gloo):
    gloo.run(late, "cpu")


def many(rank, size, device):
    d = sw.Dispatcher(2 * size, 2, 8, max_tokens=4, handles=2, device=device)
    x, idx, weights = tokens(rank, d, 3, device)
    rows = None

    def step():
        nonlocal rows
        got = d.dispatch(x, idx, weights)
        d.combine(got.rows, got, release=True)
        got = d.dispatch(x, idx)
        rows = got.rows  # holds the output
        del got
        assert d._alive() == 1
        rows = None

    step()
    live = library().live()
    for _ in range(100):
        step()
    assert library().live() == live
    assert d._alive() == 0
    d.close()


@needs_them
def test_nothing_is_left(gloo):
    gloo.run(many, "cpu")


def in_a_child(rank, size):
    x = torch.ones(size)
    sw.all_to_all_single(torch.empty(size), x)
    assert sw.communicator()._exchanges[-1] is not None
    pid = os.fork()
    if not pid:
        code = 1
        try:
            sw.all_to_all_single(torch.empty(size), x)
        except sw.errors.Forked:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


@needs_them
def test_a_call_after_fork_raises(gloo):
    gloo.run(in_a_child)


@needs_them
def test_the_library_has_registered_them():
    assert library().operators() is None
    assert torch.ops.switchyard.all_to_all.default._schema.arguments[0].alias_info.is_write


@pytest.mark.skipif(has_them(), reason="this torch has them")
def test_an_older_torch_has_none():
    assert library().operators()
    assert operators._operators() is None


def test_numbers_of_types_are_those_of_the_header():
    (types,) = re.findall(r'^#define SWITCHYARD_TYPES "(.*)"$', (ABI / "switchyard.h").read_text(), re.MULTILINE)
    assert tuple(types.split()) == operators._TYPES


@needs_them
def test_declarations_are_those_of_torch(tmp_path):
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    include = Path(torch.__file__).parent / "include"
    if not (include / "torch/csrc/stable/c/shim.h").exists():
        pytest.skip("this torch came without headers")
    source = tmp_path / "declared.cpp"
    source.write_text(
        "#define TORCH_TARGET_VERSION 0x020b000000000000\n#define USE_CUDA\n#include <torch/csrc/stable/c/shim.h>\n"
        f'#include <type_traits>\n#include "{ABI}/torch.h"\n'
        "#define SAME(result, name, arguments) static_assert(std::is_same_v<decltype(&name), result (*) arguments>, #name);\n"
        "TORCH_FUNCTIONS(SAME)\nTORCH_GPU_FUNCTIONS(SAME)\n"
    )
    done = subprocess.run([compiler, "-std=c++17", "-fsyntax-only", f"-I{include}", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
