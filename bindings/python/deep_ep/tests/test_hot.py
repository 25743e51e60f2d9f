"""How far a call is from the kernel: the functions of Python that it passes."""

from __future__ import annotations

import sys
from functools import partial

import torch.distributed as dist
from layers import dispatched, routing

import deep_ep

MOST = 8
#: With an operator for it a dispatch passes fewer.
OPERATED = 5
#: The names of operators of torch in what makes a dispatcher's calls by them.
OPERATORS = ("_plain", "_weighted", "_told", "_combine", "_combine_weighted")


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
    sys.setprofile(watch)
    try:
        made = call()
    finally:
        sys.setprofile(None)
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
    passed(made, partial(dispatch, 6 * size), most)
    passed(made, lambda: buffer.combine(rows, handle))
    for expand in (False, True):
        rows, _, _, handle, _ = elastic.dispatch(x, idx, weights, num_experts=experts, do_expand=expand)
        passed(handle._routing.made, lambda: elastic.dispatch(x, idx, weights, num_experts=experts), most)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(few, idx, 6, experts, use_fp8=False)
    made = handle.routing.made
    # Two of them give the output of a dispatch before the last one back.
    passed(made, lambda: buffer.low_latency_dispatch(few, idx, 6, experts, use_fp8=False), MOST + 2)
    dispatched(buffer, x, idx, weights)  # the ranks are in step
    elastic.destroy()
    buffer.destroy()


def test_a_call_passes_few_functions(pair):
    pair.run(short)
