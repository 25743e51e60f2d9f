"""switchyard.layers next to the same layer by hand, on the host or a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import switchyard as sw
from switchyard import layers
from switchyard.layers import plain

HIDDEN, INNER, TOP_K, MOST = 64, 48, 3, 40
LAYOUTS = {
    "flat": {"align": 4},
    "padded": {"capacity": 256},
    "slab": {},
    "token_major": {},
    "rank_padded": {},
}


def dispatcher(size: int, device: str, layout: str, hidden: int = HIDDEN, **options) -> sw.Dispatcher:
    options = {"max_tokens": MOST, "layout": layout, "device": device, "handles": 2, **LAYOUTS[layout], **options}
    return sw.Dispatcher(3 * size - 1, TOP_K, hidden, **options)


def routing(rank: int, size: int, device: str, seed: int, hidden: int = HIDDEN) -> tuple[torch.Tensor, ...]:
    """Tokens, fewer on later ranks, their choices, some masked, and weights. The last expert has none."""
    g = torch.Generator().manual_seed(100 * seed + rank)
    tokens = MOST - 7 * rank
    x = torch.randn(tokens, hidden, generator=g)
    idx = torch.rand(tokens, 3 * size - 2, generator=g).argsort(1)[:, :TOP_K]
    idx = torch.where(torch.rand(idx.shape, generator=g) < 0.2, -1, idx)
    return x.to(device), idx.to(device), torch.rand(tokens, TOP_K, generator=g).to(device)


def matrices(experts: int, hidden: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on all ranks."""
    g = torch.Generator().manual_seed(3)
    gate_up = torch.randn(experts, 2 * inner, hidden, generator=g) * hidden**-0.5
    return gate_up, torch.randn(experts, hidden, inner, generator=g) * inner**-0.5


def by_hand(
    x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The layer without any rank: expert by expert, in float32."""
    y = torch.zeros(x.shape, device=x.device)
    for e in range(gate_up.shape[0]):
        token, choice = (idx == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[token].float(), gate_up[e].float()).chunk(2, -1)
        y = y.index_add(0, token, weights[token, choice, None] * F.linear(F.silu(gate) * up, down[e].float()))
    return y


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def near(name: str, mine: torch.Tensor, theirs: torch.Tensor, bound: float) -> None:
    """The norm of a difference, as a part of the norm."""
    mine, theirs = mine.float(), theirs.float()
    apart = ((mine - theirs).norm() / theirs.norm().clamp(min=1e-6)).item()
    assert apart <= bound, f"{name}: the difference is {apart:.2e} of the norm, want at most {bound:.0e}"


def gradients(rank: int, size: int, device: str, layout: str, dtype: str, options: dict) -> None:
    """Results and all gradients, with other routing each time."""
    kind = getattr(torch, dtype)
    bound = 1e-5 if kind is torch.float32 else 1.5e-2
    d = dispatcher(size, device, layout, dtype=dtype, **options)
    layer = layers.MoE(d, INNER)
    every = [w.to(device, kind) for w in matrices(d.experts, HIDDEN, INNER)]
    mine = [w[torch.tensor(d.local_experts, device=device)] for w in every]
    layer.load(*mine)
    for seed in range(3):
        x, idx, weights = routing(rank, size, device, seed)
        x = x.to(kind)
        dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(device, kind)
        a, w = leaves(x, weights)
        y = layer(a, idx, w)
        y.backward(dy)
        b, v, gate_up, down = leaves(x, weights, *every)
        want = by_hand(b, idx, v, gate_up, down)
        want.backward(dy.float())
        about = f"seed {seed}, {layout}: "
        near(about + "y", y, want, bound)
        near(about + "dx", a.grad, b.grad, bound)
        near(about + "d weights", w.grad, v.grad, bound)
        for name, theirs in (("gate_up", gate_up.grad), ("down", down.grad)):
            whole = theirs.float()
            sw.all_reduce(whole)  # an expert's gradient is where the expert is, of all ranks' tokens
            ours = getattr(layer, name)
            near(about + "d " + name, ours.grad, whole[torch.tensor(d.local_experts, device=device)], bound)
            ours.grad = None
        with torch.no_grad():
            again = layer(x, idx, weights)
            near(about + "without gradients", again, want, bound)
            assert torch.equal(again, layer(x, idx, weights)), "other bits"
        del y
    layer.close()
    d.close()


def trained(rank: int, size: int, device: str, layout: str) -> None:
    """A router, a shared expert and small matrices next to the experts': gradients reach all of them."""
    d = dispatcher(size, device, layout, dtype="float32")
    torch.manual_seed(5)
    router = layers.Router(HIDDEN, d.experts, TOP_K, device=device)
    adapt = layers.LoRA(len(d.local_experts), HIDDEN, INNER, 4, scale=0.5, dtype=torch.float32, device=device)
    with torch.no_grad():
        for name in ("gate_up_b", "down_b"):
            getattr(adapt, name).normal_(std=0.1)
    layer = layers.MoE(d, INNER, router=router, shared=32, adapt=adapt)
    layer.gate_up.requires_grad_(False)
    x = torch.randn(2, 8, HIDDEN, generator=torch.Generator().manual_seed(rank)).to(device).requires_grad_()
    y = layer(x)
    assert y.shape == x.shape
    y.square().sum().backward()
    assert layer.gate_up.grad is None
    named = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    assert {n.split(".")[0] for n in named} == {"down", "router", "shared", "adapt"}
    got = [x.grad, *(p.grad for p in named.values())]
    # By hand, from the matrices of all ranks.
    a = x.detach().clone().requires_grad_()
    tokens = a.view(-1, HIDDEN)
    hand = {name: p.detach().clone().requires_grad_() for name, p in named.items()}
    share = F.linear(tokens, hand["router.linear.weight"]).softmax(-1)
    weights, idx = share.topk(TOP_K)
    every = []
    for name in ("gate_up", "down"):
        base = hand.get(name, getattr(layer, name))
        here = base + 0.5 * hand[f"adapt.{name}_b"] @ hand[f"adapt.{name}_a"]
        every.append(_Everywhere.apply(here, d))
    want = by_hand(tokens, idx, weights / weights.sum(-1, keepdim=True), *every)
    gate, up = F.linear(tokens, hand["shared.0"]).chunk(2, -1)
    want = want + F.linear(F.silu(gate) * up, hand["shared.1"])
    near("y", y.detach().view(-1, HIDDEN), want, 1e-5)
    want.square().sum().backward()
    near("dx", got[0], a.grad, 1e-4)
    for name, mine in zip(named, got[1:]):
        near("d " + name, mine, hand[name].grad, 1e-4)
    del y, want
    layer.close()
    d.close()


class _Everywhere(torch.autograd.Function):
    """The matrices of all experts from those here; the gradient is the sum of all ranks'."""

    @staticmethod
    def forward(ctx, here, d):
        ctx.at = torch.tensor(d.local_experts, device=here.device)
        every = here.new_zeros(d.experts, *here.shape[1:]).index_copy(0, ctx.at, here)
        sw.all_reduce(every)
        return every

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        sw.all_reduce(grad)
        return grad[ctx.at], None


def float8(rank: int, size: int, device: str, layout: str, options: dict) -> None:
    """Rows and matrices of float8, next to the same numbers in float32."""
    hidden, inner = 256, 128
    d = dispatcher(size, device, layout, hidden=hidden, dtype="bfloat16", quantize=True, **options)
    layer = layers.MoE(d, inner, shared=64)
    every = matrices(d.experts, hidden, inner)
    here = [w[d.local_experts].to(device) for w in every]
    layer.load(*here)
    wide = [plain.widened(*plain.quantized(w)).to(device) for w in every]
    for seed in range(2):
        x, idx, weights = routing(rank, size, device, seed, hidden)
        x = x.to(torch.bfloat16)
        y = layer(x.requires_grad_(), idx, weights)
        scales = x.detach().float().view(len(x), -1, 128).abs().amax(2).clamp(min=1e-4) / 448
        small = (x.detach().float().view(len(x), -1, 128) / scales[:, :, None]).view(x.shape).to(torch.float8_e4m3fn)
        want = by_hand(plain.widened(small, scales), idx, weights, *wide)
        want = want + plain.swiglu(x.detach(), *layer.shared).float()
        near("y", y.detach(), want.detach(), 4e-2)
    del y
    layer.close()
    d.close()


def refused(rank: int, size: int, device: str) -> None:
    d = dispatcher(size, device, "flat")
    with pytest.raises(sw.errors.InvalidArgument, match="overlap is for a GPU"):
        layers.MoE(d, INNER, overlap=24)
    for options in ({"scale_per_token": True}, {"scale_format": "ue8m0"}):
        other = dispatcher(size, device, "flat", hidden=128, dtype="bfloat16", quantize=True, **options)
        with pytest.raises(sw.errors.InvalidArgument, match="want float32 for 128 columns"):
            layers.MoE(other, 128)
        other.close()
    layer = layers.MoE(d, INNER)
    with pytest.raises(sw.errors.InvalidArgument, match="has no router"):
        layer(torch.zeros(4, HIDDEN, device=device))
    layer.close()
    layer.close()
    d.close()
