"""torch's profiler names the calls of Switchyard."""

from __future__ import annotations

import pytest
import world

import switchyard as sw

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")


def profiled(rank, size):
    x = torch.ones(8)
    d = sw.Dispatcher(4, 2, 8, max_tokens=8)

    def calls():
        dist.all_reduce(x)
        dist.all_to_all_single(torch.empty(4), torch.ones(4))
        sw.all_reduce(x)
        rows = torch.ones(4, 8, requires_grad=True)
        got = d.dispatch(rows, torch.tensor([[0, 3]] * 4), torch.ones(4, 2))
        d.combine(got.rows, got).sum().backward()

    calls()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        calls()
    d.close()
    return {e.key: e.count for e in profile.key_averages() if e.key.startswith("switchyard")}


def test_calls_have_names(worlds):
    """A profile of each rank has its calls and their waits, a dispatch with its combine, and both backwards."""
    for names in worlds.get(2, world.backend).run(profiled):
        assert names.pop("switchyard: wait") >= 2
        assert names == {
            "switchyard: all_reduce": 2,
            "switchyard: all_to_all_single": 1,
            "switchyard: dispatch": 1,
            "switchyard: combine": 1,
            "switchyard: dispatch backward": 1,
            "switchyard: combine backward": 1,
        }
