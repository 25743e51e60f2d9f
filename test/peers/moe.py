"""FlashInfer's one-sided all-to-all, or DeepEP V1, in turn with Switchyard's Dispatcher, on GPUs of one host.

    python test/peers/moe.py flashinfer [--ranks 2] [--tokens 16,128,4096] [--rounds 15] [--json]
    python test/peers/moe.py deep_ep

It takes the arguments of bench.py --op dispatch, whose tokens and routing are the peer's too, in bfloat16, and for few tokens
of DeepEP as float8 too. FlashInfer has rows padded by rank, and only pairs of a dispatch and a combine: it refuses two
dispatches in a row. DeepEP has a slab for each expert where tokens are few, also only in pairs: a graph of its dispatches alone
reads memory that is not there, or hangs. It has rows by token where they are many, for which it takes 96 multiprocessors. Results
are checked before and after.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings" / "python"))

import bench
import torch
import torch.distributed as dist
from benchmarks import dispatch

#: Multiprocessors of DeepEP with many tokens. With them it is fastest: docs/measured/2026-11-22-dispatch-2xh200.md.
DEEP_EP_SMS = 96
#: Its buffer for them, in bytes.
DEEP_EP_BYTES = 2_000_000_000


class Peer:
    """A side of benchmarks.dispatch: calls of another library on a batch."""

    float8 = False
    parts = dispatch.PARTS

    def __init__(self, batch: dispatch.Batch) -> None:
        self.batch, self.at = batch, 0
        self.group = dist.group.WORLD
        self.rows: Any = None
        self.y: Any = None

    def next(self) -> torch.Tensor:
        self.at = (self.at + 1) % self.batch.sets
        return self.batch.x[self.at]

    def pair(self) -> None:
        self.dispatch()
        self.combine()

    def dispatch(self) -> None:
        raise NotImplementedError

    def combine(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.rows = self.y = None


class FlashInfer(Peer):
    name = "FlashInfer"
    captures = True
    parts = ("pair",)

    @staticmethod
    def kinds(few: bool) -> list[tuple[str, bool, bool]]:
        return [("rank_padded", False, few)]

    def __init__(self, batch: dispatch.Batch, layout: str, float8: bool) -> None:
        super().__init__(batch)
        from flashinfer.comm.mapping import Mapping
        from flashinfer.comm.mnnvl import MnnvlConfig, TorchDistBackend
        from flashinfer.comm.trtllm_moe_alltoall import MoeAlltoAll

        n = batch.ranks
        self.calls = MoeAlltoAll(
            Mapping(world_size=n, rank=batch.rank, gpus_per_node=n, tp_size=n, moe_ep_size=n, moe_tp_size=1),
            max_num_tokens=batch.tokens, top_k=batch.top_k, num_experts=batch.experts, hidden_size=batch.hidden,
            mnnvl_config=MnnvlConfig(comm_backend=TorchDistBackend()),
        )  # fmt: skip
        self.idx = batch.idx.int()

    def dispatch(self) -> None:
        payloads = [self.next(), self.idx, self.batch.weights]
        self.rows = self.calls.dispatch(
            self.idx, payloads, self.batch.tokens, invalid_token_expert_id=self.batch.experts, expert_id_payload_index=1
        )[0]

    def results(self) -> torch.Tensor:
        """Where experts put what they make, padded by rank."""
        return self.calls.get_combine_payload_tensor_in_workspace(self.batch.tokens, self.batch.hidden, self.batch.dtype)

    def combine(self) -> None:
        self.y = self.calls.combine(self.results(), self.batch.tokens, payload_in_workspace=True)

    def check(self) -> None:
        for _ in range(self.batch.sets):
            self.dispatch()
            self.results().copy_(self.rows)
            self.combine()
            self.batch.check(self.y, self.at, True, False)


def refuse_ours() -> None:
    """Have nobody take Switchyard's package with DeepEP's interface for DeepEP."""
    importlib.import_module("deep_ep")
    if "switchyard_deep_ep" in sys.modules:
        raise SystemExit("deep_ep is Switchyard's package with DeepEP's interface, not DeepEP")


class DeepEP(Peer):
    name = "DeepEP"

    @staticmethod
    def kinds(few: bool) -> list[tuple[str, bool, bool]]:
        return [("slab", True, True), ("slab", False, True)] if few else [("token_major", False, False)]

    def __init__(self, batch: dispatch.Batch, layout: str, float8: bool) -> None:
        super().__init__(batch)
        import deep_ep

        self.few, self.float8 = layout == "slab", float8
        self.captures = self.few  # many tokens have the host wait for counts
        self.idx = batch.idx.to(deep_ep.topk_idx_t)
        if self.few:
            self.parts = ("pair",)
            room = deep_ep.Buffer.get_low_latency_rdma_size_hint(batch.tokens, batch.hidden, batch.ranks, batch.experts)
            self.buffer = deep_ep.Buffer(
                self.group, num_rdma_bytes=room, low_latency_mode=True, num_qps_per_rank=batch.experts // batch.ranks,
                allow_nvlink_for_low_latency_mode=True, explicitly_destroy=True,
            )  # fmt: skip
        else:
            deep_ep.Buffer.set_num_sms(DEEP_EP_SMS)
            self.buffer = deep_ep.Buffer(self.group, DEEP_EP_BYTES, 0, explicitly_destroy=True)
        self.out: Any = None  # what experts make of rows of float8

    def dispatch(self) -> None:
        b = self.batch
        if self.few:
            self.rows, _, self.handle, _, _ = self.buffer.low_latency_dispatch(
                self.next(), self.idx, b.tokens, b.experts, use_fp8=self.float8
            )
            return
        to_rank, _, of_expert, there, _ = self.buffer.get_dispatch_layout(self.idx, b.experts)
        self.rows, _, _, _, self.handle, _ = self.buffer.dispatch(
            self.next(), topk_idx=self.idx, topk_weights=b.weights, num_tokens_per_rank=to_rank, is_token_in_rank=there,
            num_tokens_per_expert=of_expert,
        )  # fmt: skip

    def combine(self) -> None:
        if self.few:
            if self.float8 and self.out is None:
                self.out = torch.empty_like(self.rows[0], dtype=self.batch.dtype)
            rows = self.out if self.float8 else self.rows
            self.y = self.buffer.low_latency_combine(rows, self.idx, self.batch.weights, self.handle)[0]
        else:
            self.y = self.buffer.combine(self.rows, self.handle)[0]

    def check(self) -> None:
        for _ in range(self.batch.sets):
            self.dispatch()
            if self.float8:
                rows, scales = self.rows
                made = rows.float().unflatten(-1, (-1, 128)) * scales[..., None]
                self.out = made.flatten(-2).nan_to_num_().to(self.batch.dtype)  # anything may be behind the last row
            self.combine()
            self.batch.check(self.y, self.at, not self.few, self.float8)

    def close(self) -> None:
        super().close()
        self.handle = self.out = None
        self.buffer.destroy()


PEERS = {"flashinfer": FlashInfer, "deep_ep": DeepEP}


def worker(rank: int, ranks: int, store: str, args: argparse.Namespace) -> None:
    dispatch.PEER = PEERS[args.peer]
    bench.worker(rank, ranks, store, args)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in PEERS:
        raise SystemExit(f"name a peer: {' or '.join(PEERS)}")
    name = sys.argv.pop(1)
    if name == "deep_ep":
        refuse_ours()
    sys.argv += ["--op", "dispatch", "--device", "cuda"]
    bench.main(worker, peer=name)
