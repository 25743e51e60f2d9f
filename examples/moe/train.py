"""Trains a small MoE language model with torch, its experts divided among the ranks, on the CPU or on GPUs.

    python examples/moe/train.py                      # 2 ranks; torch's all_to_all_single and Switchyard's, side by side
    python examples/moe/train.py --impl layer         # switchyard.layers instead of exchanges and experts by hand
    python examples/moe/train.py --device cuda        # a rank for each GPU: NCCL and a loop over experts, and switchyard.layers
    torchrun --nproc-per-node 4 examples/moe/train.py # ranks that torchrun starts

With more ranks than GPUs the ranks share them, and torch's calls are gloo's.

Both implementations make every step on the same tokens from the same weights, each with a model of its own. On the CPU what
differs is one import: where all_to_all_single and all_reduce come from. With two ranks the losses are the same to the last bit;
more ranks can be added up in several orders, which round elsewhere. On GPUs the second one has layers.MoE, whose sums do so
too. The step times are printed side by side.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import switchyard
from switchyard import layers

IMPLEMENTATIONS = ("torch", "switchyard", "layer")


class Exchange(torch.autograd.Function):
    """all_to_all_single with a gradient: the exchange the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recv: list[int], send: list[int], module: Any) -> Tensor:
        ctx.recv, ctx.send, ctx.module = recv, send, module
        out = x.new_empty(sum(recv), *x.shape[1:])
        module.all_to_all_single(out, x.contiguous(), recv, send)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        back = grad.new_empty(sum(ctx.send), *grad.shape[1:])
        ctx.module.all_to_all_single(back, grad.contiguous(), ctx.send, ctx.recv)
        return back, None, None, None


class Expert(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class MoE(nn.Module):
    """A layer of experts, the first of them on rank 0, the next on rank 1 and so on."""

    def __init__(self, hidden: int, experts: int, top_k: int, max_tokens: int, impl: str, device: str) -> None:
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.count, self.top_k, self.local = experts, top_k, experts // self.size
        self.router = nn.Linear(hidden, experts, bias=False)
        every = [Expert(hidden) for _ in range(experts)]  # the same random numbers on every rank
        own = every[self.rank * self.local : (self.rank + 1) * self.local]
        self.module = dist if impl == "torch" else switchyard
        self.whole = impl == "layer"
        self.experts: nn.Module
        if self.whole:
            dispatcher = switchyard.Dispatcher(
                experts, top_k, hidden, max_tokens=max_tokens, layout="token_major", handles=2, device=device, host_counts=True
            )
            with torch.random.fork_rng(devices=[]):  # what comes after has the same random numbers with all implementations
                self.experts = layers.MoE(dispatcher, 2 * hidden)
            self.experts.load(*(torch.stack([getattr(e, name).weight for e in own]) for name in ("gate_up", "down")))
        else:
            self.experts = nn.ModuleList(own)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        carry = self.experts if self.whole else self.by_exchanges
        return carry(tokens, chosen, weights).view_as(x)

    def by_exchanges(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        # Rows in the order of their experts, and so of their ranks.
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        send_counts = torch.bincount(flat, minlength=self.count)
        recv_counts = torch.empty_like(send_counts)
        self.module.all_to_all_single(recv_counts, send_counts)
        recv_counts = recv_counts.view(self.size, self.local)
        send, recv = send_counts.view(self.size, -1).sum(1).tolist(), recv_counts.sum(1).tolist()
        rows = Exchange.apply(tokens[order // self.top_k], recv, send, self.module)
        # They come rank by rank; an expert wants all of its own together.
        which = torch.arange(self.local, device=rows.device).repeat(self.size).repeat_interleave(recv_counts.flatten())
        together = which.argsort(stable=True)
        parts = rows[together].split(recv_counts.sum(0).tolist())
        done = torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
        back = torch.empty_like(done).index_copy(0, together, done)
        back = Exchange.apply(back, send, recv, self.module)
        y = torch.zeros_like(tokens)
        return y.index_add(0, order // self.top_k, back * weights.flatten()[order, None])


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, moe: MoE) -> None:
        super().__init__()
        self.heads, self.moe = heads, moe
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, t, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, h))
        return x + self.moe(self.norm2(x))


class Model(nn.Module):
    def __init__(self, args: argparse.Namespace, impl: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(args.vocabulary, args.hidden)
        self.place = nn.Parameter(torch.randn(args.length, args.hidden) * 0.02)
        self.blocks = nn.Sequential(
            *(
                Block(args.hidden, 4, MoE(args.hidden, args.experts, args.top_k, args.batch * args.length, impl, args.device))
                for _ in range(args.layers)
            )
        )
        self.norm, self.head = nn.LayerNorm(args.hidden), nn.Linear(args.hidden, args.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.place)))


class Text:
    """Tokens in which the next one depends on the two before, so that there is something to learn."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self.vocabulary, self.generator = vocabulary, torch.Generator().manual_seed(seed)
        rules = torch.Generator().manual_seed(1)
        self.next = torch.randint(0, vocabulary, (vocabulary, vocabulary, 2), generator=rules)

    def batch(self, n: int, length: int) -> Tensor:
        x = torch.randint(0, self.vocabulary, (n, length + 1), generator=self.generator)
        coin = torch.randint(0, 10, (n, length + 1), generator=self.generator)
        for t in range(2, length + 1):
            follow = self.next[x[:, t - 2], x[:, t - 1], (coin[:, t] > 7).long()]
            x[:, t] = torch.where(coin[:, t] > 0, follow, x[:, t])
        return x


class Trainer:
    """One implementation with its model."""

    def __init__(self, args: argparse.Namespace, impl: str) -> None:
        torch.manual_seed(0)
        self.impl, self.size = impl, dist.get_world_size()
        self.module = dist if impl == "torch" else switchyard
        self.model = Model(args, impl).to(args.device)
        experts = {id(p) for block in self.model.blocks for p in block.moe.experts.parameters()}
        self.shared = [p for p in self.model.parameters() if id(p) not in experts]
        self.own = [p for p in self.model.parameters() if id(p) in experts]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.rate)

    def step(self, x: Tensor) -> float:
        loss = F.cross_entropy(self.model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        # Everybody has the shared weights; experts got their gradients from everybody's tokens already.
        flat = torch.cat([p.grad.flatten() for p in self.shared] + [loss.detach().view(1)])
        self.module.all_reduce(flat)
        flat /= self.size
        for p, g in zip(self.shared, flat.split([p.numel() for p in self.shared] + [1])):
            p.grad.copy_(g.view_as(p))
        for p in self.own:
            if p.grad is not None:
                p.grad /= self.size
        self.optimizer.step()
        return flat[-1].item()


def train(args: argparse.Namespace, report: Callable[[str], None]) -> dict[str, list[float]]:
    """Train with the implementations of args, step by step in alternating order. Returns their losses."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if args.experts % size:
        raise SystemExit(f"{args.experts} experts do not divide among {size} ranks")
    both = ("torch", "layer" if args.device == "cuda" else "switchyard")
    impls = both if args.impl == "both" else (args.impl,)
    if args.device == "cuda":
        # So that the losses can be compared to the last bit. cuBLAS reads its variable when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    trainers = [Trainer(args, impl) for impl in impls]
    text = Text(args.vocabulary, 100 + rank)
    losses: dict[str, list[float]] = {impl: [] for impl in impls}
    times: dict[str, list[float]] = {impl: [] for impl in impls}
    for step in range(args.steps):
        x = text.batch(args.batch, args.length).to(args.device)
        for trainer in trainers if step % 2 == 0 else reversed(trainers):
            switchyard.barrier()
            began = time.perf_counter()
            losses[trainer.impl].append(trainer.step(x))
            times[trainer.impl].append(time.perf_counter() - began)
        if step % args.every == 0 or step == args.steps - 1:
            recent = {impl: statistics.median(t[-args.every :]) * 1e3 for impl, t in times.items()}
            parts = [f"{impl} loss {losses[impl][-1]:.4f} {recent[impl]:6.1f} ms" for impl in impls]
            report(f"step {step:4}  " + "   ".join(parts))
    steady = {impl: statistics.median(t[len(t) // 10 :]) * 1e3 for impl, t in times.items()}
    line = ", ".join(f"{impl} {ms:.1f} ms" for impl, ms in steady.items())
    if len(impls) == 2:
        line += f": {steady[impls[0]] / steady[impls[1]]:.2f} times as fast"
        same = losses[impls[0]] == losses[impls[1]]
        apart = max(abs(a - b) for a, b in zip(losses[impls[0]], losses[impls[1]]))
        line += "; the losses are the same" if same else f"; the losses differ by at most {apart:.1e}"
    report(f"median step on {size} ranks: {line}")
    return losses


def arguments(values: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--impl", choices=("both", *IMPLEMENTATIONS), default="both")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, help="to start, where torchrun has not: 2, or as many as there are GPUs")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between reports")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank in a step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--vocabulary", type=int, default=64)
    parser.add_argument("--rate", type=float, default=3e-3)
    return parser.parse_args(values)


def worker(rank: int, size: int, store: str | None, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    backend = "gloo"
    if args.device == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % gpus)
        backend = "nccl" if size <= gpus else "gloo"
    if store is None:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size)
    quiet = dist.get_rank() != 0
    train(args, lambda line: None if quiet else print(line, flush=True))
    switchyard.barrier()
    dist.destroy_process_group()


def main() -> None:
    args = arguments()
    if "RANK" in os.environ:
        worker(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, args)
        return
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = args.ranks or (max(torch.cuda.device_count(), 2) if args.device == "cuda" else 2)
        torch.multiprocessing.spawn(worker, (ranks, store, args), ranks)


if __name__ == "__main__":
    main()
