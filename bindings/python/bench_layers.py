"""Times whole MoE layers on GPUs, next to one by hand in torch's calls.

    python bench_layers.py forward --shape v3 --tokens 8,128,512,4096,8192     # FP8, graphs
    python bench_layers.py train --shape qwen3-30b --tokens 2048,8192          # bfloat16, eager, forward and backward
    python bench_layers.py warm --shape v3 ...                                 # compiles a part of the kernels, see --part

A rank for each GPU. Variants take turns in one process; a figure is the median over rounds of the slowest rank's time, in
microseconds a layer, and `ratio` is that of a variant to the first one.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import os
import socket
import statistics
import time
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import switchyard
from switchyard import layers
from switchyard.layers import experts, lists, tables

#: Hidden, inner, experts, top-k.
SHAPES = {"v3": (7168, 2048, 256, 8), "flash": (4096, 2048, 256, 6), "qwen3-30b": (2048, 768, 128, 8)}
FLOAT8, BFLOAT16 = torch.float8_e4m3fn, torch.bfloat16
#: Makers of other layers by name, of a shape and Weights; they make calls of tokens, scales, choices and weights.
PEERS: dict[str, Callable[..., Any]] = {}


def slowest(us: float) -> float:
    t = torch.tensor([us], dtype=torch.float64, device="cuda")
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t.item()


def together() -> None:
    t = torch.zeros(1, device="cuda")
    dist.all_reduce(t)
    torch.cuda.synchronize()


def captured(run: Callable[[], Any]) -> Callable[[], None]:
    """run in a graph, two times."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    together()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        run()
        run()
    return graph.replay


def turns(variants: dict[str, tuple[Callable[[], Any], int]], rounds: int) -> dict[str, float]:
    """The median time of a layer in each variant: a function, and how many layers its call makes."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, (run, layers_of) in variants.items():
            run()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            together()
            begin.record()
            for _ in range(3):
                run()
            end.record()
            torch.cuda.synchronize()
            times[name].append(slowest(begin.elapsed_time(end) * 1e3 / 3 / layers_of))
    return {name: statistics.median(t) for name, t in times.items()}


def routing(experts_of: int, top_k: int, tokens: int, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Choices and weights: uniform, by 1/i, or by a lognormal popularity whose largest load is ``skew`` above the mean."""
    g = torch.Generator(device="cuda").manual_seed(7000 + dist.get_rank())
    if args.zipf or args.skew:
        same = torch.Generator(device="cuda").manual_seed(3)
        share = 1 / torch.arange(1, experts_of + 1, device="cuda").float()
        if args.skew:
            share = lognormal(torch.randn(experts_of, device="cuda", generator=same), args.skew)
        share = share[torch.randperm(experts_of, device="cuda", generator=same)]
        idx = torch.multinomial(share.expand(tokens, experts_of), top_k, generator=g)
    else:
        idx = torch.rand((tokens, experts_of), device="cuda", generator=g).topk(top_k, 1)[1]
    return idx.contiguous(), torch.rand((tokens, top_k), device="cuda", generator=g)


def lognormal(normal: Tensor, most: float) -> Tensor:
    """Shares exp(sigma * normal) with a sigma by which the largest is ``most`` above the mean (MaxVio)."""
    low, high = 0.0, 8.0
    for _ in range(40):
        share = (normal * (low + high) / 2).exp()
        above = (share.max() / share.mean()).item() - 1
        low, high = ((low + high) / 2, high) if above < most else (low, (low + high) / 2)
    return share


def blocks_of_128(x: Tensor) -> tuple[Tensor, Tensor]:
    v = x.float().view(len(x), -1, 128)
    scales = v.abs().amax(2).clamp(min=1e-4) / 448
    return (v / scales[:, :, None]).view(x.shape).to(FLOAT8), scales


class Weights:
    """Matrices of this rank's experts, made once for all variants."""

    def __init__(self, shape: str, float8: bool) -> None:
        hidden, inner, count, _ = SHAPES[shape]
        local = count // dist.get_world_size()
        g = torch.Generator(device="cuda").manual_seed(dist.get_rank())
        self.matrices, self.scales = [], []
        for rows, columns in ((2 * inner, hidden), (hidden, inner)):
            w = torch.empty(local, rows, columns, dtype=FLOAT8 if float8 else BFLOAT16, device="cuda")
            for e in range(local):
                one = torch.randn(rows, columns, device="cuda", generator=g, dtype=BFLOAT16)
                w[e] = one.to(FLOAT8) if float8 else one * columns**-0.5
            self.matrices.append(w)
            share = torch.rand(local, rows // 128, columns // 128, device="cuda", generator=g)
            self.scales.append((share + 0.5) * columns**-0.5)

    def into(self, layer: layers.MoE) -> None:
        """Have a layer use them, without a copy."""
        for name, w, scales in zip(("gate_up", "down"), self.matrices, self.scales):
            if layer.float8:
                setattr(layer, name, w)
                setattr(layer, f"{name}_scales", scales)
            else:
                getattr(layer, name).data = w


def layer_of(shape: str, weights: Weights, float8: bool, tokens: int, layout: str, **options: Any) -> layers.MoE:
    hidden, inner, count, top_k = SHAPES[shape]
    overlap = options.pop("overlap", 0)
    kinds = {"dtype": FLOAT8, "combine_dtype": BFLOAT16} if float8 else {"dtype": BFLOAT16}
    options |= {"max_tokens": tokens, "layout": layout, "device": "cuda", "handles": 2, **kinds}
    d = switchyard.Dispatcher(count, top_k, hidden, **options)
    layer = layers.MoE(d, inner, overlap=overlap)
    weights.into(layer)
    return layer


def forward(args: argparse.Namespace, shape: str) -> None:
    """Layers in graphs, without gradients: the whole, the experts alone, dispatch and combine alone."""
    weights = Weights(shape, not args.bfloat16)
    peers = {name: peer(shape, weights) for name, peer in PEERS.items()}
    for tokens in args.tokens:
        made = forward_layers(args, shape, tokens, weights)
        forward_row(args, shape, tokens, made, peers)
        close(made)


def forward_layers(args: argparse.Namespace, shape: str, tokens: int, weights: Weights) -> dict[str, layers.MoE]:
    few: dict[str, Any] = {"low_latency": True} if tokens <= 256 else {}
    by_token, by_expert = "rank_padded" if few else "token_major", "slab" if tokens <= 512 else "flat"
    float8 = not args.bfloat16
    made = {layout: layer_of(shape, weights, float8, tokens, layout, **few) for layout in (by_token, by_expert)}
    if float8 and by_expert == "flat" and importlib.util.find_spec("deep_gemm"):
        deep = {"align": 128, "scale_columns": True, "max_rows": padded_rows(shape, tokens, args)}
        made["flat, DeepGEMM"] = layer_of(shape, weights, float8, tokens, "flat", **deep)
    if args.overlap:
        options = {**few, "landed": True, "max_sms": args.overlap, "overlap": args.overlap}
        made[f"{by_expert}, overlapped"] = layer_of(shape, weights, float8, tokens, by_expert, **options)
    return made


def padded_rows(shape: str, tokens: int, args: argparse.Namespace) -> int:
    """The most rows of a rank with each expert's at multiples of 128."""
    _, _, count, top_k = SHAPES[shape]
    each = torch.bincount(routing(count, top_k, tokens, args)[0].flatten(), minlength=count)
    dist.all_reduce(each)
    return int(((each + 127) // 128 * 128).view(dist.get_world_size(), -1).sum(1).max())


def waited(call: Callable[[], Any]) -> float:
    """How long a call takes from the host's beginning to the device's end, on the slowest rank, in microseconds."""
    torch.cuda.synchronize()
    together()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return round(slowest((time.perf_counter() - began) * 1e6), 1)


def first_calls(call: Callable[[], Any], idle: float) -> list[float]:
    """Times of a graph of two layers, warm, after idle seconds, and once more."""
    times = [waited(call)]
    torch.cuda.synchronize()
    time.sleep(idle)
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    times.append(round(slowest((time.perf_counter() - began) * 1e6), 1))
    return [*times, waited(call)]


def forward_row(args: argparse.Namespace, shape: str, tokens: int, made: dict[str, layers.MoE], peers: dict[str, Any]) -> None:
    hidden, _, count, top_k = SHAPES[shape]
    idx, share = routing(count, top_k, tokens, args)
    x = torch.randn(tokens, hidden, device="cuda", dtype=BFLOAT16)
    given, scales = (x, None) if args.bfloat16 else blocks_of_128(x)
    variants: dict[str, tuple[Callable[[], Any], int]] = {}
    results: dict[str, Tensor] = {}
    held = []
    begins: dict[str, list[float]] = {}

    def dispatch(layer: layers.MoE) -> switchyard.Dispatched:
        return layer.dispatcher.dispatch(given, idx, share, scales=scales)

    def pair(layer: layers.MoE) -> None:
        layer.dispatcher.combine(layer._results[0], dispatch(layer), weighted=not layer.dispatcher.by_token)

    with torch.no_grad():
        for name, layer in made.items():
            call = functools.partial(layer, given, idx, share, scales=scales)
            begins[name] = [waited(call) for _ in range(3)]
            results[name] = call().float()
            variants[name] = (captured(call), 2)
            if layer.overlap:
                continue
            held.append(dispatch(layer))
            alone = functools.partial(layer._made, held[-1], layer.dispatcher.by_token, False)
            variants[name + ": experts"] = (captured(alone), 2)
            variants[name + ": rows"] = (captured(functools.partial(pair, layer)), 2)
        for name, peer in peers.items():
            call = peer(given, scales, idx, share)
            results[name] = call().float()
            variants[name] = (captured(call), 2)
        if args.idle:
            late = {name: first_calls(variants[name][0], args.idle) for name in made}
            if dist.get_rank() == 0:
                print("IDLE", json.dumps({"shape": shape, "tokens": tokens, "eager, first": begins, "graph": late}), flush=True)
        variants["dense"] = (captured(functools.partial(dense, *dense_sides(args.bfloat16))), 2)
        times = turns(variants, args.rounds)
    if dist.get_rank() == 0:
        first = next(iter(results))
        apart = {n: ((r - results[first]).norm() / results[first].norm()).item() for n, r in results.items()}
        row = {"shape": shape, "tokens": tokens, "zipf": args.zipf, "skew": args.skew, "bfloat16": args.bfloat16}
        row |= {n: round(t, 1) for n, t in times.items()}
        row["dense, TFLOP/s"] = round(2 * 4096 * 8192 * 8192 / row.pop("dense") / 1e6)
        print("FORWARD", json.dumps(row), "apart", {n: round(v, 4) for n, v in apart.items() if n != first}, flush=True)


def dense_sides(bfloat16: bool) -> list[Tensor]:
    sides = [torch.randn(n, 8192, device="cuda", dtype=BFLOAT16) for n in (4096, 8192)]
    return sides if bfloat16 else [s.to(FLOAT8) for s in sides]


def dense(a: Tensor, b: Tensor) -> Tensor:
    """One product of torch's, which says what the GPU gives in this company: its clock falls under load."""
    if a.dtype is not FLOAT8:
        return a @ b.t()
    one = torch.ones((), device="cuda")
    return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=BFLOAT16)


def close(made: dict[str, layers.MoE]) -> None:
    gc.collect()
    torch.cuda.synchronize()
    together()
    for layer in made.values():
        layer.close()
        layer.dispatcher.close()


class Carry(torch.autograd.Function):
    """all_to_all_single of NCCL with its gradient."""

    @staticmethod
    def forward(ctx, x, recv, send):
        ctx.recv, ctx.send = recv, send
        out = x.new_empty(sum(recv), *x.shape[1:])
        dist.all_to_all_single(out, x, recv, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        back = grad.new_empty(sum(ctx.send), *grad.shape[1:])
        dist.all_to_all_single(back, grad.contiguous(), ctx.send, ctx.recv)
        return back, None, None


def by_hand(x: Tensor, idx: Tensor, share: Tensor, gate: Tensor, up: Tensor, down: Tensor, count: int) -> Tensor:
    """The layer as training frameworks write it: rows sorted by expert, NCCL's all-to-all with splits on the host, rows sorted
    again, three grouped products of torch, and all of it back."""
    size, top_k = dist.get_world_size(), idx.shape[1]
    flat = idx.flatten()
    order = flat.argsort(stable=True)
    sent = torch.bincount(flat, minlength=count)
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent)
    splits = torch.stack((sent.view(size, -1).sum(1), came.view(size, -1).sum(1))).tolist()
    rows = Carry.apply(x[order // top_k], splits[1], splits[0])
    counts = came.view(size, -1)
    local = counts.shape[1]
    which = torch.arange(local, device=x.device).repeat(size).repeat_interleave(counts.flatten(), output_size=len(rows))
    sort = which.argsort(stable=True)
    ends = counts.sum(0).cumsum(0).int()
    rows = rows[sort]
    product = torch._grouped_mm
    h = F.silu(product(rows, gate.transpose(1, 2), offs=ends)) * product(rows, up.transpose(1, 2), offs=ends)
    made = product(h, down.transpose(1, 2), offs=ends)
    back = torch.empty_like(made).index_copy(0, sort, made)
    back = Carry.apply(back, splits[0], splits[1])
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return y.index_add(0, order // top_k, back.float() * share.flatten()[order, None]).to(x.dtype)


def train(args: argparse.Namespace, shape: str) -> None:
    """Forward alone and forward with backward, eager, next to the layer by hand. Gradients of tokens, weights and matrices."""
    weights = Weights(shape, False)
    hand = [w.contiguous().requires_grad_() for w in weights.matrices[0].chunk(2, 1)]
    hand.append(weights.matrices[1].clone().requires_grad_())
    for tokens in args.tokens:
        made = {n: layer_of(shape, weights, False, tokens, n, host_counts=True) for n in ("token_major", "flat")}
        train_row(args, shape, tokens, made, hand)
        close(made)


def train_row(
    args: argparse.Namespace, shape: str, tokens: int, made: dict[str, layers.MoE], hand: list[Tensor]
) -> None:
    hidden, _, count, top_k = SHAPES[shape]
    idx, share = routing(count, top_k, tokens, args)
    share = (share / share.sum(1, keepdim=True)).requires_grad_()
    x = torch.randn(tokens, hidden, device="cuda", dtype=BFLOAT16).requires_grad_()
    dy = torch.randn(tokens, hidden, device="cuda", dtype=BFLOAT16)
    calls = {"by hand": functools.partial(by_hand, x, idx, share, *hand, count)}
    calls |= {name: functools.partial(layer, x, idx, share) for name, layer in made.items()}
    leaves = {"by hand": (x, share, *hand), **{n: (x, share, v.gate_up, v.down) for n, v in made.items()}}

    def step(name: str) -> None:
        for leaf in leaves[name]:
            leaf.grad = None
        calls[name]().backward(dy)

    found: dict[str, list[Tensor]] = {}
    for name in calls:
        step(name)
        grads = [leaf.grad for leaf in leaves[name]]
        if name == "by hand":
            grads = [*grads[:2], torch.cat(grads[2:4], 1), grads[4]]
        with torch.no_grad():
            found[name] = [calls[name]().float(), *(g.float() for g in grads)]
    apart = {}
    for name in made:
        norms = [((a - b).norm() / b.norm()).item() for a, b in zip(found[name], found["by hand"])]
        apart[name] = dict(zip(("y", "dx", "d weights", "d gate_up", "d down"), (round(n, 4) for n in norms)))
    del found, grads
    with torch.no_grad():
        once = turns({n: (c, 1) for n, c in calls.items()}, args.rounds)
    both = turns({n: (functools.partial(step, n), 1) for n in calls}, args.rounds)
    if dist.get_rank() == 0:
        row = {"shape": shape, "tokens": tokens, "forward": {n: round(t, 1) for n, t in once.items()}}
        row |= {"forward and backward": {n: round(t, 1) for n, t in both.items()}}
        row |= {"times as fast": {n: round(both["by hand"] / both[n], 2) for n in made}}
        print("TRAIN", json.dumps(row), "apart", json.dumps(apart), flush=True)
    for own in leaves.values():
        for leaf in own:
            leaf.grad = None


def warm(args: argparse.Namespace) -> None:
    """Compiles one of a number of parts of the kernels that the others use, on one GPU without other ranks."""
    part, of = (int(n) for n in args.part.split("/"))
    torch.cuda.set_device(part % torch.cuda.device_count())
    training = args.what == "train"
    for n, (shape, tokens) in enumerate((s, t) for s in args.shape for t in args.tokens):
        if n % of != part:
            continue
        hidden, inner, count, top_k = SHAPES[shape]
        float8, local, rows = not (args.bfloat16 or training), count // args.ranks, args.ranks * tokens
        plan = tables.plan(rows * top_k / count, float8, False, True)
        kind = FLOAT8 if float8 else BFLOAT16
        new = lambda *size, dtype=kind: torch.empty(size, dtype=dtype, device="cuda")  # noqa: E731
        m = experts.Matrices(new(local, 2 * inner, hidden), new(local, hidden, inner))
        if float8:
            each = [new(local, w.shape[1] // 128, w.shape[2] // 128, dtype=torch.float32) for w in m[:2]]
            m = experts.Matrices(*m[:2], *each)
        for indices in (torch.full((rows, top_k), -1, device="cuda"), None):
            ranks = torch.zeros(args.ranks + 1 if indices is not None else local + 1, dtype=torch.int32, device="cuda")
            x = new(rows if indices is not None else rows * min(top_k, 8), hidden)
            came = experts.Came(ranks, ranks[1:], indices, lists.room_for(rows * top_k, local, plan.block))
            share = torch.ones(x.shape[0], top_k, device="cuda") if indices is not None else None
            scales = new(x.shape[0], hidden // 128, dtype=torch.float32) if float8 else None
            out = new(x.shape[0], hidden, dtype=BFLOAT16)
            words = None
            if args.overlap and indices is None:
                words = lists.Words(*(ranks[1:].clone() for _ in range(4)), 10**9)
            for w in (None, words) if words else (None,):
                experts.forward(x, scales, share, m, came, plan, out, w)
            if training:
                a = [t if t is None else t.requires_grad_() for t in (x, share, *m[:2])]
                experts.apply(*a, came, plan, out).backward(out)
    torch.cuda.synchronize()


def worker(rank: int, args: argparse.Namespace, port: int) -> None:
    torch.cuda.set_device(rank)
    at = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=at, rank=rank, world_size=args.ranks, device_id=torch.device("cuda", rank))
    torch.manual_seed(1000 + rank)
    together()
    for shape in args.shape:
        (forward if args.what == "forward" else train)(args, shape)
        gc.collect()
        torch.cuda.empty_cache()
    together()
    os._exit(0)  # whatever a failure of another rank holds


def main(of_rank: Callable[..., None] = worker) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("forward", "train"))
    parser.add_argument("--shape", type=lambda s: s.split(","), default=["v3"], help="of " + ", ".join(SHAPES))
    parser.add_argument("--tokens", type=lambda s: [int(n) for n in s.split(",")], default=[8, 128, 512, 4096, 8192])
    parser.add_argument("--ranks", type=int, default=max(torch.cuda.device_count(), 1))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bfloat16", action="store_true", help="forward in bfloat16 in place of float8")
    parser.add_argument("--zipf", action="store_true", help="some experts are chosen more often")
    parser.add_argument("--skew", type=float, default=0, help="experts are chosen by a lognormal popularity of this MaxVio")
    parser.add_argument("--idle", type=float, default=0, help="also first calls, and graphs after so many idle seconds")
    parser.add_argument("--overlap", type=int, default=0, help="also the layer whose products leave these multiprocessors")
    parser.add_argument("--part", default="", help="k/n: only compile part k of n of the kernels")
    args = parser.parse_args()
    if args.part:
        warm(args)
        return
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(of_rank, (args, port), args.ranks)


if __name__ == "__main__":
    main()
