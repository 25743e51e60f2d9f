"""The drivers of test/peers run on CPUs, with stand-ins of the libraries that they measure, which need GPUs."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import world

PEERS = Path(__file__).resolve().parents[3] / "test" / "peers"
here = pytest.mark.skipif(not PEERS.exists(), reason="the drivers are not here")


def driver(name: str):
    """A driver as a module."""
    with mock.patch.object(sys, "path", [str(PEERS), *sys.path]):
        return importlib.import_module(name)


@contextlib.contextmanager
def installed(modules: dict[str, object]):
    """Modules that stand in. Others that are imported meanwhile stay, which mock.patch.dict would take out again."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def rows_of(measure, *arguments: object) -> list[dict]:
    """The rows that a measurement prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        measure(*arguments)
    return [json.loads(line) for line in out.getvalue().splitlines()]


class SymmetricMemory:
    """A stand-in of torch's symmetric memory, by gloo. wrong has it forget a rank."""

    def __init__(self, wrong: bool = False) -> None:
        import torch

        self.met, self.wrong, self.empty = [], wrong, torch.empty

    def rendezvous(self, x, group: str) -> None:
        self.met.append((x.data_ptr(), group))

    def two_shot_all_reduce_(self, x, op: str, group: str) -> None:
        import torch.distributed as dist

        assert (op, (x.data_ptr(), group) in self.met) == ("sum", True)
        if not self.wrong:
            dist.all_reduce(x)

    def one_shot_all_reduce(self, x, op: str, group: str):
        y = x.clone()
        self.met.append((y.data_ptr(), group))
        self.two_shot_all_reduce_(y, op, group)
        return y


def symmetric(rank, size):
    import torch
    import torch.distributed as dist

    module = driver("symmetric_memory")
    args = argparse.Namespace(sizes="1K,16K", rounds=3, json=True, busy=0)
    module.ONE_SHOT = 1 << 10
    for wrong in (False, True):
        stand_in = SymmetricMemory(wrong)
        with (
            installed({"torch.distributed._symmetric_memory": stand_in}),
            mock.patch.object(dist, "_symmetric_memory", stand_in, create=True),
            mock.patch.object(torch.ops, "symm_mem", stand_in),
        ):
            if wrong:
                with pytest.raises(SystemExit, match=f"rank {rank}: two-shot: 512 of 512 elements are wrong"):
                    rows_of(module.measure, args, "cpu")
            else:
                rows = rows_of(module.measure, args, "cpu")
    if rank > 0:
        assert rows == []
        return
    assert [(r["bytes"], r["mode"], r["op"], r["ranks"]) for r in rows] == [
        (1 << 10, "eager", "all_reduce", size), (16 << 10, "eager", "all_reduce", size),
    ]  # fmt: skip
    assert rows[0]["peer_way"] in ("one-shot", "two-shot")
    assert rows[1]["peer_way"] == "two-shot"
    for row in rows:
        assert row["peer"] == f"symmetric memory of torch {torch.__version__}"
        assert min(row["us"], row["peer_us"], row["ratio"]) > 0


@here
def test_torchs_symmetric_memory(worlds):
    worlds.get(2, world.gloo).run(symmetric)


def messages(rank, size):
    import torch.distributed as dist

    module = driver("messages")
    args = argparse.Namespace(sizes="1K,16K", rounds=3, json=True, busy=0)
    rows = rows_of(module.measure, args, "cpu")
    if rank == 0:
        assert [(r["bytes"], r["op"], r["mode"], r["memory"]) for r in rows] == [
            (n, op, "eager", memory)
            for n in (1 << 10, 16 << 10)
            for op in ("message", "messages both ways")
            for memory in ("symmetric", "ordinary")
        ]
        assert all(r["peer"].startswith("gloo of torch ") and min(r["us"], r["peer_us"], r["ratio"]) > 0 for r in rows)

    def lost(ops):
        return []

    wrong = f"rank {rank}: gloo: 1024 of 1024 bytes are wrong"
    with mock.patch.object(dist, "batch_isend_irecv", lost), pytest.raises(SystemExit, match=wrong):
        module.sides_of(1 << 10, True, "cpu", "gloo")


@here
def test_messages(worlds):
    worlds.get(2, world.gloo).run(messages)


class OneSided:
    """A stand-in of FlashInfer's MoeAlltoAll, by gloo."""

    def __init__(self, mapping, *, max_num_tokens, top_k, num_experts, hidden_size, mnnvl_config) -> None:
        import torch

        assert mapping.world_size == mapping.moe_ep_size == mapping.tp_size
        assert mnnvl_config.comm_backend is not None
        self.ranks, self.rank, self.local = mapping.world_size, mapping.rank, num_experts // mapping.world_size
        self.room = torch.empty(self.ranks, max_num_tokens, hidden_size, dtype=torch.bfloat16)
        self.phase = "idle"

    def dispatch(self, idx, payloads, tokens, invalid_token_expert_id, expert_id_payload_index):
        import torch
        import torch.distributed as dist

        assert (self.phase, idx.dtype, payloads[expert_id_payload_index]) == ("idle", torch.int32, idx)
        self.phase = "dispatched"
        self.wanted = (idx // self.local)[:, None] == torch.arange(self.ranks)[:, None]
        self.wanted = self.wanted.any(2)  # of a token, by each rank
        got = []
        for payload in (self.wanted, *payloads):
            parts = [torch.empty_like(payload) for _ in range(self.ranks)]
            dist.all_gather(parts, payload)
            got.append(torch.stack(parts))
        here = got[0][:, :, self.rank]
        got[1][~here] = float("nan")
        got[2][~here] = invalid_token_expert_id
        return got[1:]

    def get_combine_payload_tensor_in_workspace(self, tokens, hidden, dtype):
        assert self.phase == "dispatched"
        assert self.room.shape == (self.ranks, tokens, hidden)
        return self.room

    def combine(self, payload, tokens, payload_in_workspace):
        import torch
        import torch.distributed as dist

        assert (self.phase, payload is self.room, payload_in_workspace) == ("dispatched", True, True)
        self.phase = "idle"
        back = torch.empty_like(payload)
        dist.all_to_all_single(back, payload)
        return back.float().masked_fill(~self.wanted.T[..., None], 0).sum(0).bfloat16()


def few_and_many(module, peer) -> list[dict]:
    """The rows of dispatches next to a peer."""
    import torch.distributed as dist

    args = argparse.Namespace(
        device="cpu", tokens="100,300", hidden=256, experts=8, top_k=2, rounds=3, max_sms=None, busy=0, json=True
    )
    with mock.patch.object(module.dispatch, "PEER", peer):
        return rows_of(module.dispatch.dispatching, dist.get_rank(), dist.get_world_size(), args, False)


def judged(rows: list[dict], peer: str, kinds: list[tuple]) -> None:
    assert [(r["tokens"], r["layout"], r["dtype"], r["part"]) for r in rows if "peer_us" in r] == kinds
    for row in rows:
        assert (row["op"], row["mode"]) == ("dispatch", "eager")
        assert row["us"] > 0
        assert "peer_us" not in row or (row["peer"] == peer and row["peer_us"] > 0)


def flashinfer(rank, size):
    module = driver("moe")
    names = {
        "flashinfer": SimpleNamespace(), "flashinfer.comm": SimpleNamespace(),
        "flashinfer.comm.mapping": SimpleNamespace(Mapping=SimpleNamespace),
        "flashinfer.comm.mnnvl": SimpleNamespace(MnnvlConfig=SimpleNamespace, TorchDistBackend=object),
        "flashinfer.comm.trtllm_moe_alltoall": SimpleNamespace(MoeAlltoAll=OneSided),
    }  # fmt: skip
    with installed(names):
        rows = few_and_many(module, module.FlashInfer)
        wrong = mock.patch.object(OneSided, "combine", lambda self, rows, n, **_: rows[0])
        with wrong, pytest.raises(SystemExit, match="are wrong"):
            few_and_many(module, module.FlashInfer)
    if rank == 0:
        assert len(rows) == 6
        judged(rows, "FlashInfer", [(n, "rank_padded", "bfloat16", "pair") for n in (100, 300)])


@here
def test_flashinfer(worlds):
    worlds.get(2, world.gloo).run(flashinfer)


def deep_ep(rank, size):
    """Switchyard's own package with DeepEP's interface is the stand-in. As a peer it is refused."""
    module = driver("moe")
    with mock.patch.object(sys, "path", [str(PEERS.parents[1] / "bindings" / "python" / "deep_ep" / "src"), *sys.path]):
        with pytest.raises(SystemExit, match="deep_ep is Switchyard's package with DeepEP's interface"):
            module.refuse_ours()
        with mock.patch.object(module, "DEEP_EP_BYTES", 1 << 20):
            rows = few_and_many(module, module.DeepEP)
    if rank == 0:
        few = [(100, "slab", dtype, "pair") for dtype in ("float8", "bfloat16")]
        judged(rows, "DeepEP", few + [(300, "token_major", "bfloat16", part) for part in ("dispatch", "combine", "pair")])


@here
def test_deep_ep(worlds):
    worlds.get(2, world.gloo).run(deep_ep)
