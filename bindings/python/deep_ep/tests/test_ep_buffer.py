"""EPBuffer, plans of tensors, and what is refused of DeepEP 2.5."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from layers import HIDDEN, applied, routing, want

import deep_ep


def deferred(rank, size):
    """Results that the events of calls return, next to those of calls that return them."""
    plan = deep_ep.BufferAllocator()
    weights_of = plan.allocate((3, 5), torch.bfloat16)
    buffer = deep_ep.EPBuffer(dist.group.WORLD, num_max_tokens_per_rank=32, hidden=HIDDEN, lb_allocation_plan_or_num_bytes=plan)
    assert buffer.num_lb_bytes == plan.num_bytes == deep_ep.get_num_allocation_alignment()
    assert weights_of.fill_(2).sum() == 30
    x, idx, weights = routing(rank, size, 20 - rank)
    args = {"num_experts": 4 * size, "async_with_compute_stream": True}
    *made, event = buffer.dispatch(x, idx, weights, **args)
    assert event.wait() is None
    event = buffer.dispatch(x, idx, weights, defer_epilogue=True, **args)
    rows, indices, beside, handle = event.wait()
    assert event.wait() is None
    for a, b in zip(made, (rows, indices, beside)):
        assert torch.equal(a, b)
    assert handle.topk_idx is idx
    again = buffer.dispatch(x, handle=handle, async_with_compute_stream=True, defer_epilogue=True)
    assert torch.equal(again.current_stream_wait(release_handle=True)[0], rows)
    assert again.event is None
    out = applied(rows, indices, beside, rank, size)
    event = buffer.combine(out, handle, beside, async_with_compute_stream=True, defer_epilogue=True)
    y, sums = event.wait()
    torch.testing.assert_close(y, want(x, idx, weights, size), rtol=1e-4, atol=1e-5)
    assert torch.equal(sums, weights)
    for kind, text, call in (
        (AssertionError, "do_handle_copy", lambda: buffer.dispatch(x, idx, do_handle_copy=True, **args)),
        (AssertionError, "defer_epilogue needs", lambda: buffer.dispatch(x, handle=handle, defer_epilogue=True)),
        (AssertionError, "defer_epilogue needs", lambda: buffer.combine(out, handle, defer_epilogue=True)),
        (NotImplementedError, "EPBuffer.lb_prefetch_weights", lambda: buffer.lb_prefetch_weights([], [], idx)),
        (NotImplementedError, "EPBuffer.lb_reduce_grads", lambda: buffer.lb_reduce_grads(x, x, idx)),
        (NotImplementedError, "EPBuffer.lb_get_theoretical_num_sms", lambda: buffer.lb_get_theoretical_num_sms()),
    ):
        with pytest.raises(kind, match=text):
            call()
    buffer.destroy()


def test_results_come_from_the_event(pair):
    pair.run(deferred)


def test_a_plan_of_tensors():
    plan = deep_ep.BufferAllocator()
    made = [plan.allocate((1 << 19, 3), torch.float32), plan.allocate(0, torch.bfloat16), plan.allocate((7,), torch.int64)]
    assert all(t.is_meta for t in made)
    assert [first for _, first in plan.allocations] == [0, 6 << 20, 6 << 20]
    with pytest.raises(AssertionError, match=r"storage is \(5,\) of torch.uint8, want 8388608 bytes"):
        plan.materialize(torch.zeros(5, dtype=torch.uint8))
    storage = torch.zeros(plan.num_bytes, dtype=torch.uint8)
    plan.materialize(storage)
    made[2].fill_(-1)
    assert int(storage.sum()) == 7 * 8 * 255
    assert made[0].shape == (1 << 19, 3)
    for call in (lambda: plan.allocate(1, torch.int32), lambda: plan.materialize(storage)):
        with pytest.raises(AssertionError, match="have their memory already"):
            call()


@pytest.mark.parametrize("name", ["BucketBuffer", "BucketSession", "EngramBuffer", "PPBuffer"])
def test_buffers_for_other_ends_are_refused(name):
    absent = getattr(deep_ep, name)
    for call in (lambda: absent(None, 1 << 21), lambda: absent.get_buffer_size_hint(None)):
        with pytest.raises(NotImplementedError, match=f"deep_ep: {name}: .* is not supported"):
            call()


@pytest.mark.parametrize("buffer", [deep_ep.ElasticBuffer, deep_ep.EPBuffer])
def test_arguments_that_an_estimate_takes(buffer):
    names = list(inspect.signature(buffer.get_theoretical_num_sms).parameters)[3:]
    assert names == ["num_scaleout_topk", "rdma_gbs", "nvlink_gbs", "sm_read_gbs", "sm_write_gbs"]
