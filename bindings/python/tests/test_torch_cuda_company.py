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
    # With "ours-2" and "ours-3" there are 2 and 3 dispatchers.
    dispatchers = [
        sw.Dispatcher(
            EXPERTS,
            TOP_K,
            HIDDEN,
            max_tokens=tokens,
            dtype="bfloat16",
            layout=layout,
            device="cuda",
            handles=2,
            low_latency=low_latency,
        )
        for _ in range(int(other.split("-")[1]) if other.startswith("ours") else 1)
    ]
    d = dispatchers[0]
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, HIDDEN, generator=g).to("cuda", torch.bfloat16)
    idx = torch.rand(tokens, EXPERTS, generator=g).argsort(1)[:, :TOP_K].to("cuda")
    weights = torch.full((tokens, TOP_K), 1 / TOP_K, device="cuda")
    rows = torch.ones(d.max_rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    numbers = torch.ones(32 << 20, device="cuda", dtype=torch.bfloat16)
    square = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    theirs, *ours = (torch.cuda.Stream() for _ in range(1 + len(dispatchers)))
    out: dict[object, torch.Tensor] = {}

    def call_of(i):
        def call():
            with torch.cuda.stream(ours[i]):
                got = dispatchers[i].dispatch(x, idx, weights)
                out[i] = dispatchers[i].combine(rows, got, weighted=False)
                del got

        return call

    def interfere():
        with torch.cuda.stream(theirs):
            if other == "nccl" or other.endswith("nccl"):
                dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
            elif other == "product":
                out["product"] = square @ square
            elif other == "reduce":
                sw.all_reduce(numbers, op="max")

    calls = [*(call_of(i) for i in range(len(dispatchers))), interfere]
    for f in calls:  # what is loaded and met at first
        f()
        torch.cuda.synchronize()
        dist.barrier()
    for _ in range(ROUNDS):
        for f in calls if rank % 2 == 0 else calls[::-1]:
            f()
        end = time.monotonic() + 10
        while not all(s.query() for s in (theirs, *ours)):
            assert time.monotonic() < end, "neither goes on"
            time.sleep(0.001)
    # A token has a row of ones on each rank that it went to, or, by expert, for each choice.
    most = TOP_K if layout in ("flat", "slab") else size
    for i in range(len(dispatchers)):
        y = out[i].float()
        assert bool((y == y[:, :1]).all())
        assert bool((y >= 1).all())
        assert bool((y <= most).all())
    assert bool((numbers == 1).all())
    for d in dispatchers:
        d.close()


@pytest.mark.parametrize("other", ["nccl", "product", "reduce", "ours-2", "ours-3", "ours-2-nccl"])
@pytest.mark.parametrize("layout", ["slab", "rank_padded"])
@pytest.mark.parametrize("tokens", [16, 128, 256])
def test_few_tokens(worlds, other, layout, tokens):
    worlds.get(2, worlds_module.cuda).run(next_to, other, layout, tokens, True, timeout=60)


@pytest.mark.parametrize("other", ["nccl", "product", "reduce", "ours-2", "ours-3"])
@pytest.mark.parametrize("layout", ["flat", "token_major", "rank_padded"])
@pytest.mark.parametrize("tokens", [512, 4096])
def test_many_tokens(worlds, other, layout, tokens):
    worlds.get(2, worlds_module.cuda).run(next_to, other, layout, tokens, False, timeout=60)
