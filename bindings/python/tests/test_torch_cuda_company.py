"""Calls of ours next to other work on the same GPUs, which ranks launch in different orders."""

from __future__ import annotations

import time

import conftest
import pytest
import world as worlds_module

import switchyard as sw

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

pytestmark = pytest.mark.skipif(conftest.gpus() < 2, reason="there are fewer than 2 GPUs: NCCL wants one for each rank")

HIDDEN, EXPERTS, TOP_K, ROUNDS = 7168, 256, 8, 20


def next_to(rank, size, other, layout, tokens, low_latency):
    """ROUNDS calls of both, on streams of their own: even ranks launch ours first, odd ranks the other's."""
    d = sw.Dispatcher(
        EXPERTS, TOP_K, HIDDEN, max_tokens=tokens, dtype="bfloat16", layout=layout, device="cuda", handles=2,
        low_latency=low_latency,
    )
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, HIDDEN, generator=g).to("cuda", torch.bfloat16)
    idx = torch.rand(tokens, EXPERTS, generator=g).argsort(1)[:, :TOP_K].to("cuda")
    weights = torch.full((tokens, TOP_K), 1 / TOP_K, device="cuda")
    rows = torch.ones(d.max_rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    numbers = torch.ones(32 << 20, device="cuda", dtype=torch.bfloat16)
    square = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    ours, theirs = torch.cuda.Stream(), torch.cuda.Stream()
    out: dict[str, torch.Tensor] = {}

    def call():
        with torch.cuda.stream(ours):
            got = d.dispatch(x, idx, weights)
            out["y"] = d.combine(rows, got, weighted=False)
            del got

    def interfere():
        with torch.cuda.stream(theirs):
            if other == "nccl":
                dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
            else:
                out["product"] = square @ square

    for f in (call, interfere):  # what is loaded and met at first
        f()
        torch.cuda.synchronize()
        dist.barrier()
    for _ in range(ROUNDS):
        for f in (call, interfere) if rank % 2 == 0 else (interfere, call):
            f()
        end = time.monotonic() + 10
        while not (ours.query() and theirs.query()):
            assert time.monotonic() < end, "neither goes on"
            time.sleep(0.001)
    # A token has a row of ones on each rank that it went to, or, by expert, for each choice.
    most = TOP_K if layout in ("flat", "slab") else size
    y = out["y"].float()
    assert bool((y == y[:, :1]).all())
    assert bool((y >= 1).all())
    assert bool((y <= most).all())
    assert bool((numbers == 1).all())
    d.close()


@pytest.mark.parametrize("other", ["nccl", "product"])
@pytest.mark.parametrize("layout", ["slab", "rank_padded"])
@pytest.mark.parametrize("tokens", [16, 128, 256])
def test_few_tokens(worlds, other, layout, tokens):
    worlds.get(2, worlds_module.cuda).run(next_to, other, layout, tokens, True, timeout=60)


@pytest.mark.parametrize("other", ["nccl", "product"])
@pytest.mark.parametrize("layout", ["flat", "token_major", "rank_padded"])
@pytest.mark.parametrize("tokens", [512, 4096])
def test_many_tokens(worlds, other, layout, tokens):
    worlds.get(2, worlds_module.cuda).run(next_to, other, layout, tokens, False, timeout=60)
