"""The host's time in calls on GPUs: by operators of torch, by Python, and torch's own."""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import switchyard
from switchyard._torch import operators

from .common import Report, slowest

CALLS = 100
SPLITS = 4096  # more than a cache has


@contextlib.contextmanager
def by_python(d: switchyard.Dispatcher | None) -> Iterator[None]:
    """Calls of the default group, and of a dispatcher, without operators."""
    comm = switchyard.communicator()
    kept = operators._operators, comm._exchanges, d and d._operated
    operators._operators, comm._exchanges = (lambda: None), {}
    if d:
        d._operated = None
    try:
        yield
    finally:
        operators._operators, comm._exchanges, operated = kept
        if d:
            d._operated = operated


def block(call: Callable[[int], object], n: int, busy: bool) -> float:
    """Seconds of the host for one of n calls, the slowest rank's. The GPU has something else to do meanwhile if it is busy."""
    torch.cuda.synchronize()
    switchyard.barrier()
    if busy:
        torch.cuda._sleep(40_000_000)
    began = time.perf_counter()
    for i in range(n):
        call(i)
    took = (time.perf_counter() - began) / n
    torch.cuda.synchronize()
    return slowest(took)


def exchanges(rank: int, ranks: int) -> Iterator[tuple[str, Callable[[int], object], Callable[[int], object]]]:
    x, y = torch.randn(16 * ranks, 128, device="cuda"), torch.empty(16 * ranks, 128, device="cuda")
    yield (
        "all_to_all_single, equal", lambda i: switchyard.all_to_all_single(y, x), lambda i: dist.all_to_all_single(y, x)
    )  # fmt: skip
    g, made = random.Random(1), []
    a, b = torch.randn(32 * ranks, 128, device="cuda"), torch.empty(32 * ranks, 128, device="cuda")
    for _ in range(SPLITS):
        rows = [[g.randrange(1, 32) for _ in range(ranks)] for _ in range(ranks)]
        got = [rows[k][rank] for k in range(ranks)]
        made.append((b[: sum(got)], a[: sum(rows[rank])], got, rows[rank]))
    at = iter(range(1 << 62))

    def ours(_: int) -> None:
        switchyard.all_to_all_single(*made[next(at) % SPLITS])

    yield "all_to_all_single, new splits", ours, lambda i: dist.all_to_all_single(*made[i % SPLITS])


def host_time(rank: int, ranks: int, args: argparse.Namespace, symmetric: bool) -> None:
    report = Report(args, rank, op="host", device=torch.cuda.get_device_name(), ranks=ranks)
    where = f"{ranks} ranks, {torch.cuda.get_device_name()}, torch {torch.__version__}"
    report.text(f"\nmicroseconds of the host for a call, {where}, medians of {args.rounds} rounds")
    report.text(f"{'call':42}{'by':>10}{'in a row':>10}{'alone':>10}{'GPU busy':>10}")

    def compare(name: str, d: switchyard.Dispatcher | None, calls: dict[str, Callable[[int], object]]) -> None:
        times: dict[str, list[list[float]]] = {by: [[], [], []] for by in calls}
        for n in range(-2, args.rounds):
            for by, call in calls.items():
                with by_python(d) if by == "Python" else contextlib.nullcontext():
                    for k, (count, busy) in enumerate(((CALLS, False), (1, False), (CALLS // 5, True))):
                        took = block(call, count, busy)
                        if n >= 0:
                            times[by][k].append(took * 1e6)
        for by, columns in times.items():
            report.text(f"{name:42}{by:>10}" + "".join(f"{statistics.median(c):10.1f}" for c in columns))
            report.row([c / 1e6 for c in columns[0]], None, call=name, by=by)

    switchyard.communicator(device="cuda")
    for name, ours, theirs in exchanges(rank, ranks):
        compare(name, None, {"operators": ours, "Python": ours, "torch": theirs})
    for tokens in map(int, args.tokens.split(",")):
        for fast in (True, False)[tokens > 1024 :]:
            d = switchyard.Dispatcher(
                args.experts, args.top_k, args.hidden, max_tokens=tokens, dtype=torch.bfloat16, handles=2, low_latency=fast,
                device="cuda",
            )  # fmt: skip
            x = torch.randn(tokens, args.hidden, device="cuda", dtype=torch.bfloat16)
            idx = torch.rand(tokens, args.experts, device="cuda").topk(args.top_k)[1]
            weights = torch.rand(tokens, args.top_k, device="cuda")

            def pair(_: int, d=d, x=x, idx=idx, weights=weights) -> None:
                got = d.dispatch(x, idx, weights)
                d.combine(got.rows, got, release=True)

            pair(0)
            compare(f"pair, {tokens} tokens{', low latency' if fast else ''}", d, {"operators": pair, "Python": pair})
            torch.cuda.synchronize()
            switchyard.barrier()
            d.close()
