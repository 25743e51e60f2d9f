"""Copies of handles."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
import torch.distributed as dist
from layers import applied, dispatched, routing, want

import deep_ep


def copied(rank, size):
    """A copy serves as the handle does, also when that is gone; a pickled one would be of another process."""
    buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD)
    x, idx, weights = routing(rank, size, 6)
    sums = want(x, idx, weights, size)
    for copying in (copy.copy, copy.deepcopy, lambda handle: copy.deepcopy({"of a layer": [handle]})["of a layer"][0]):
        rows, indices, beside, _, handle, _ = dispatched(buffer, x, idx, weights)
        again = copying(handle)
        del handle
        gc.collect()
        y = buffer.combine(applied(rows, indices, beside, rank, size), again)[0]
        torch.testing.assert_close(y, sums, rtol=1e-4, atol=1e-5)
        rows, indices, beside, kept, _ = elastic.dispatch(x, idx, weights, num_experts=4 * size)
        twin = copying(kept)
        del kept
        gc.collect()
        y = elastic.combine(applied(rows, indices, beside, rank, size), twin)[0]
        torch.testing.assert_close(y, sums, rtol=1e-4, atol=1e-5)
        few, _, handle, _, _ = buffer.low_latency_dispatch(x.bfloat16(), idx, 6, 4 * size, use_fp8=False)
        y = buffer.low_latency_combine(few, idx, weights, copying(handle))[0]
        torch.testing.assert_close(y.float(), x * weights.sum(1, keepdim=True), rtol=0.05, atol=0.05)
        for made, kind in ((again, "a Handle"), (twin, "an EPHandle"), (handle, "a FewHandle")):
            with pytest.raises(TypeError, match=f"switchyard: {kind} lives in its process, and cannot be pickled"):
                pickle.dumps(made)
        del again, twin, handle, made
    elastic.destroy()
    buffer.destroy()


def test_copies_of_handles(gloo):
    gloo.run(copied)
