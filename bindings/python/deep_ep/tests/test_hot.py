"""How far a call is from the kernel: the functions of Python that it passes."""

from __future__ import annotations

import gc
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from layers import dispatched, routing
from switchyard import errors

import deep_ep
from deep_ep import _checks

MOST = 8
#: With an operator for it a dispatch passes fewer.
OPERATED = 5
FEW_OPERATED = 6
#: The names of operators of torch in what makes a dispatcher's calls by them.
OPERATORS = ("_plain", "_weighted", "_scaled", "_lent", "_combine", "_combine_weighted", "_combine_into")


def passed(made, call, most=MOST):
    """How many functions a call passes until it calls the library."""
    count, seen, dispatcher = [0], [], made.dispatcher

    def watch(frame, event, arg):
        count[0] += event == "call"

    def spied(function):
        def spy(*arguments):
            seen.append(count[0] - 2)  # without this one, and without that of the test
            return function(*arguments)

        return spy

    kept, operated = (dispatcher._delivers, dispatcher._calls), dispatcher._operated
    dispatcher._delivers, dispatcher._calls = tuple(map(spied, kept[0])), list(map(spied, kept[1]))
    operators = {} if operated is None else {name: getattr(operated, name) for name in OPERATORS}
    for name, operator in operators.items():
        setattr(operated, name, spied(operator))
    delivers = getattr(made.deliver, "__self__", None)
    deliver = delivers and delivers._call
    if delivers is not None:
        delivers._call = spied(deliver)
    gc.disable()  # it calls functions, too
    sys.setprofile(watch)
    try:
        made = call()
    finally:
        sys.setprofile(None)
        gc.enable()
        dispatcher._delivers, dispatcher._calls = kept
        for name, operator in operators.items():
            setattr(operated, name, operator)
        if delivers is not None:
            delivers._call = deliver
    assert seen[0] <= most, f"{seen[0]} functions"
    return made


def short(rank, size):
    """Dispatches and combines of a shape that was seen before."""
    buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD)
    x, idx, weights = routing(rank, size, 6)
    few, experts = x.bfloat16(), 4 * size
    per_rank, _, per_expert, inside, _ = buffer.get_dispatch_layout(idx, experts)

    def dispatch(worst=0):
        return buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank, is_token_in_rank=inside,
            num_tokens_per_expert=per_expert, num_worst_tokens=worst,
        )  # fmt: skip

    rows, _, _, _, handle, _ = dispatch()
    made = handle.routing.made
    most = MOST if made.dispatcher._operated is None else OPERATED
    passed(made, dispatch, most)
    passed(made, lambda: buffer.combine(rows, handle))
    rows, _, _, _, handle, _ = dispatch(6 * size)
    made = handle.routing.made
    if made.dispatcher._operated is not None:  # Python makes memory for results of a known length before the call
        passed(made, partial(dispatch, 6 * size), most)
    passed(made, lambda: buffer.combine(rows, handle), MOST + 1)  # one of them cuts rows off that did not come
    for expand in (False, True):
        rows, _, _, handle, _ = elastic.dispatch(x, idx, weights, num_experts=experts, do_expand=expand)
        passed(handle._routing.made, lambda: elastic.dispatch(x, idx, weights, num_experts=experts), most)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(few, idx, 6, experts, use_fp8=False)
    made = handle.routing.made
    few_most, back_most = (MOST + 3, MOST) if made.dispatcher._operated is None else (FEW_OPERATED, FEW_OPERATED)
    _, _, handle, _, _ = passed(made, lambda: buffer.low_latency_dispatch(few, idx, 6, experts, use_fp8=False), few_most)
    out, rows = torch.empty(len(few), few.shape[1], dtype=few.dtype), rows.clone()
    for into in (None, out):
        passed(made, lambda: buffer.low_latency_combine(rows, idx, weights, handle, out=into), back_most)  # noqa: B023
    dispatched(buffer, x, idx, weights)  # the ranks are in step
    elastic.destroy()
    buffer.destroy()


def test_a_call_passes_few_functions(pair):
    pair.run(short)


def flat(value):
    """The tensors in what a call returns, but for handles and events."""
    if isinstance(value, (tuple, list)):
        return [x for each in value for x in flat(each)]
    return [value] if isinstance(value, torch.Tensor) else []


def repeated(call, came, looked, looks):
    """The same call twice, which returns the same rows; the second has its arguments looked at this often."""
    made = call()
    looked.clear()
    again = call()
    assert len(looked) == looks
    for a, b in zip(flat(made), flat(again)):
        assert a.dtype is b.dtype
        a, b = (x[:came].contiguous().view(torch.uint8) for x in (a, b))
        assert torch.equal(a, b)
    return again


def wrong(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


def checked(rank, size, sent, looks, looked, alone):
    """Calls of tokens whose checks are remembered, unless they are looked at each time."""
    buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD)
    x, idx, weights = routing(rank, size, 6)
    experts, most = 4 * size, {"num_experts": 4 * size, "num_max_tokens_per_rank": 6}
    came = len(flat(dispatched(buffer, sent, idx, weights)[0])[0])

    def twice(call):
        return repeated(call, came, looked, looks)

    one = twice(lambda: dispatched(buffer, sent, idx, weights))[4]
    worst = twice(lambda: dispatched(buffer, sent, idx, weights, num_worst_tokens=6 * size))[4]
    twice(lambda: buffer.dispatch(sent, handle=one))
    twice(lambda: buffer.dispatch(sent, handle=worst))
    twice(lambda: elastic.dispatch(sent, idx, weights, num_experts=experts))
    twice(lambda: elastic.dispatch(sent, idx, weights, **most))
    last = twice(lambda: elastic.dispatch(sent, idx, weights, do_cpu_sync=False, **most))[3]
    stats = torch.zeros(4, dtype=torch.int32)
    twice(lambda: elastic.dispatch(sent, idx, weights, stats, **most))
    twice(lambda: elastic.dispatch(sent, None, weights, stats, handle=last))
    assert torch.equal(stats, 4 * last.num_unaligned_recv_tokens_per_expert)
    for bad in (stats[:3], stats.float(), [1]):
        wrong(lambda: elastic.dispatch(sent, idx, weights, bad, **most), ValueError, "cumulative_local_expert")  # noqa: B023
    twice(lambda: elastic.dispatch(sent, None, weights, handle=last))

    short = x[:5]
    wrong(lambda: buffer.dispatch(short, handle=one), ValueError, "has 5 tokens, those of the handle are 6")
    wrong(lambda: buffer.dispatch(sent, handle=one, topk_idx=idx), ValueError, "do not go with a handle")
    wrong(lambda: buffer.dispatch(sent, handle=one, topk_weights=weights), ValueError, "do not go with a handle")
    wrong(lambda: buffer.dispatch(sent, handle=(1,)), TypeError, "handle is tuple")
    wrong(lambda: dispatched(buffer, sent, idx, weights, num_worst_tokens=5), ValueError, "num_worst_tokens is 5")
    wrong(lambda: elastic.dispatch(sent, idx, handle=last), ValueError, "do not go with a handle")
    wrong(lambda: elastic.dispatch(sent, handle=last, do_cpu_sync=True), ValueError, "do not go with a handle")
    wrong(lambda: elastic.dispatch(sent, handle=last, num_experts=0), ValueError, "num_experts is 0, that of")
    wrong(lambda: elastic.dispatch(sent, handle=last, expert_alignment=4), ValueError, "expert_alignment is 4")
    wrong(lambda: elastic.dispatch(sent, handle=last, do_expand=True), ValueError, "do_expand with a handle")
    wrong(lambda: elastic.dispatch(short, handle=last), ValueError, r"topk_idx has shape \(6, 3\)")
    wrong(lambda: elastic.dispatch(sent, handle=(1,)), TypeError, "handle is tuple")
    for other in (deep_ep.Buffer(alone), deep_ep.ElasticBuffer(alone)):
        handle = one if isinstance(other, deep_ep.Buffer) else last
        wrong(lambda: other.dispatch(sent, handle=handle), ValueError, "of another group")  # noqa: B023
        other.destroy()
    elastic.destroy()
    wrong(lambda: elastic.dispatch(sent, handle=last), errors.Closed, "destroyed")
    wrong(lambda: elastic.dispatch(sent, idx, weights, **most), errors.Closed, "destroyed")
    buffer.destroy()
    wrong(lambda: buffer.dispatch(sent, handle=one), errors.Closed, "destroyed")


def remembered(rank, size):
    x, _, _ = routing(rank, size, 6)
    q, looked, tokens = x.to(torch.float8_e4m3fn), [], _checks.tokens
    alone = [dist.new_group([r]) for r in range(size)][rank]

    def look(call, given):
        looked.append(call)
        return tokens(call, given)

    _checks.tokens = look
    whole = torch.randint(99, (6, 2), dtype=torch.int32)
    try:
        for sent in (x, x.bfloat16(), (q, torch.rand(6, 2)), (q, torch.rand(6, 1)), (q, whole[:, :1].contiguous())):
            checked(rank, size, sent, 0, looked, alone)
        # Scales that are sent as another type, or copied, and another kind of sequence.
        for sent in ((q, whole), (q, torch.rand(2, 6).t()), [q, torch.rand(6, 2)]):
            checked(rank, size, sent, 1, looked, alone)
    finally:
        _checks.tokens = tokens


def test_checks_are_remembered(pair):
    pair.run(remembered)
