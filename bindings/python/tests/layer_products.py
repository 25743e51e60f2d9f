"""The layers' kernels against plain torch. A program: `python layer_products.py cuda`, or with TRITON_INTERPRET=1 `... cpu`."""

from __future__ import annotations

import sys
import time

import torch
from layer_cases import by_hand, leaves, near

from switchyard.layers import deepgemm, experts, lists, plain
from switchyard.layers.tables import Plan, Tiles

RANKS, TOP_K = 3, 3
GARBAGE = float("nan")


def interpretable() -> None:
    """Let loops of the interpreter take bounds that it has loaded: numpy 2.4 refuses what Triton 3.4 does there. And have a
    clock and a vote, which are instructions of the GPU."""
    from triton.runtime import interpreter

    import switchyard.triton as st

    st._now_ns, st._any = time.monotonic_ns, lambda x: x != 0

    patch = interpreter._patch_lang_tensor

    def patched(tensor, *rest):
        patch(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])

    interpreter._patch_lang_tensor = patched


def tiles(block: int, columns: int, depth: int, swap: bool = False, rows: int = 0) -> Plan:
    products = Tiles(rows or block, columns, depth, 4, 3, group=2, swap=swap)
    back = products._replace(swap=False)
    return Plan(block, products, products, back, products, back._replace(depth=min(depth, rows or block)))


def plans(device: str, float8: bool) -> list[Plan]:
    if device == "cpu":
        return [tiles(16, 16, 16), tiles(16, 16, 32, swap=True), tiles(32, 16, 16, rows=16)]
    if float8:
        return [tiles(128, 128, 128), tiles(64, 128, 128), tiles(16, 128, 128, swap=True), tiles(128, 128, 128, rows=64)]
    return [tiles(128, 128, 64), tiles(64, 64, 64), tiles(16, 128, 64, swap=True), tiles(128, 128, 64, rows=64)]


def case(device: str, kind: torch.dtype, seed: int, hidden: int, inner: int, rows: int, count: int) -> tuple:
    """Rows of RANKS ranks with room behind each, what is there is not a number; one expert has no row."""
    g = torch.Generator().manual_seed(seed)
    each = rows // RANKS
    offsets = torch.arange(RANKS + 1, dtype=torch.int32) * each
    counts = torch.tensor([each - 5 * r for r in range(RANKS)], dtype=torch.int32)
    indices = torch.rand(rows, count + 2, generator=g).argsort(1)[:, :TOP_K]
    indices = torch.where(indices < count - 1, indices, -1)
    there = (torch.arange(rows) % each < counts.repeat_interleave(each)).unsqueeze(1)
    x = torch.where(there, torch.randn(rows, hidden, generator=g), GARBAGE)
    gate_up = torch.randn(count, 2 * inner, hidden, generator=g) * hidden**-0.5
    down = torch.randn(count, hidden, inner, generator=g) * inner**-0.5
    weights = torch.where(there, torch.rand(rows, TOP_K, generator=g), GARBAGE)
    wide = [t.to(device, kind) for t in (x, gate_up, down)]
    return (*wide, weights.to(device), indices.to(device), offsets.to(device), counts.to(device), there[:, 0].to(device))


def tokens(device: str, kind: torch.dtype, hidden: int, inner: int, rows: int, count: int, bound: float) -> None:
    """Rows by token, forward and all gradients."""
    for seed, plan in enumerate(plans(device, False)):
        x, gate_up, down, weights, indices, offsets, counts, there = case(device, kind, seed, hidden, inner, rows, count)
        came = experts.Came(offsets, counts, indices, lists.room_for(rows * TOP_K, count, plan.block))
        out = torch.full_like(x, 7)
        a = leaves(x, weights, gate_up, down)
        y = experts.apply(*a, came, plan, out)
        assert (y[~there] == 7).all(), "rows that did not come were written"
        dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(device, kind)
        y.backward(torch.where(there[:, None], dy, GARBAGE))
        b = leaves(torch.where(there[:, None], x, 0), weights.nan_to_num(), gate_up, down)
        used = torch.where(there[:, None], indices, -1)
        want = by_hand(b[0], used, *b[1:])
        want.backward(torch.where(there[:, None], dy, 0).float())
        near("y", y[there], want[there], bound)
        near("dx", a[0].grad[there], b[0].grad[there], bound)
        for name, mine, theirs in zip(("d weights", "d gate_up", "d down"), a[1:], b[1:]):
            near(name, mine.grad, theirs.grad, bound)
        assert not a[1].grad[used < 0].any(), "a weight without a row has a gradient"
        again = torch.empty_like(x)
        experts.forward(x, None, weights, experts.Matrices(gate_up, down), came, plan, again)
        assert torch.equal(again[there], y[there]), "other bits"


def words_of(counts: torch.Tensor, short: int = 0, over: int = 0, patience: int = 600 * 10**9) -> lists.Words:
    """Words of a dispatch that has landed all rows, but for some of the last expert's."""
    landed, one = counts.clone(), counts.new_zeros(1)
    landed[-1] -= short
    return lists.Words(landed, torch.zeros_like(counts), one + over, one.clone(), patience)


def gives_up(x: torch.Tensor, m: experts.Matrices, came: experts.Came, plan: Plan) -> None:
    """Rows that never come: products end when the dispatch has, or by the clock, and no row is said to be made."""
    unknown = came._replace(counts=torch.full_like(came.counts, -1))
    second = 10**9
    for name, of, words in (
        ("a row, the dispatch has ended", came, words_of(came.counts, 1, 1)),
        ("a row, by the clock", came, words_of(came.counts, 1, 0, second)),
        ("counts, the dispatch has ended", unknown, words_of(came.counts, 0, 1)),
        ("counts, by the clock", unknown, words_of(came.counts, 0, 0, second)),
    ):
        began = time.monotonic()
        experts.forward(x, None, None, m, of, plan, torch.empty_like(x), words)
        assert words.failed.item() != 0, f"{name}: not noticed"
        assert not words.ready.any(), f"{name}: ready {words.ready.tolist()}"
        took = time.monotonic() - began
        assert "clock" not in name or took >= 0.9, f"{name}: {took} s"


def by_expert(device: str, kind: torch.dtype, hidden: int, inner: int, bound: float) -> None:
    """Rows by expert with room behind them, and the words of what has landed and what is ready."""
    for seed, plan in enumerate(plans(device, False)):
        x, gate_up, down, *_ = case(device, kind, seed, hidden, inner, 5 * 60, 5)
        counts = torch.tensor([0, 60, 3, 17, 33], dtype=torch.int32, device=device)
        offsets = torch.arange(6, dtype=torch.int32, device=device) * 60
        came = experts.Came(offsets, counts, None, lists.room_for(150, 5, plan.block))
        there = (torch.arange(300, device=device) % 60) < counts.repeat_interleave(60)
        x = torch.where(there[:, None], x.nan_to_num(), GARBAGE)
        out = torch.full_like(x, 7)
        m, words = experts.Matrices(gate_up, down), words_of(counts)
        experts.forward(x, None, None, m, came, plan, out, words)
        assert (out[~there] == 7).all(), "rows that are none were written"
        assert torch.equal(words.ready, counts), f"ready {words.ready.tolist()}, want {counts.tolist()}"
        assert words.failed.item() == 0
        if seed == 0:
            gives_up(x, m, came, plan)
        a = leaves(x, gate_up, down)
        y = experts.apply(a[0], None, *a[1:], came, plan, torch.empty_like(x))
        assert torch.equal(y[there], out[there]), "other bits"
        dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(device, kind)
        y.backward(torch.where(there[:, None], dy, GARBAGE))
        b = leaves(torch.where(there[:, None], x, 0), gate_up, down)
        want = plain.by_expert(b[0].float(), offsets[:-1].tolist(), counts.tolist(), b[1].float(), b[2].float())
        want.backward(torch.where(there[:, None], dy, 0).float())
        near("y", y[there], want[there], bound)
        near("dx", a[0].grad[there], b[0].grad[there], bound)
        for name, mine, theirs in zip(("d gate_up", "d down"), a[1:], b[1:]):
            near(name, mine.grad, theirs.grad, bound)


def float8(device: str, columns: bool) -> None:
    """Rows and matrices of float8; the scales of rows also in column-major order."""
    for seed, plan in enumerate(plans(device, True)):
        x, gate_up, down, weights, indices, offsets, counts, there = case(device, torch.float32, seed, 512, 256, 300, 6)
        scales = x.view(len(x), -1, 128).abs().amax(2) / 448
        small = (x.view(len(x), -1, 128) / scales[:, :, None]).view(x.shape).to(torch.float8_e4m3fn)
        parts = [plain.quantized(w) for w in (gate_up, down)]
        m = experts.Matrices(parts[0][0], parts[1][0], parts[0][1], parts[1][1])
        came = experts.Came(offsets, counts, indices, lists.room_for(900, 6, plan.block))
        out = torch.full(x.shape, 7, dtype=torch.bfloat16, device=device)
        laid = scales.t().contiguous().t() if columns else scales
        experts.forward(small, laid, weights, m, came, plan, out)
        assert (out[~there] == 7).all()
        wide = torch.where(there[:, None], plain.widened(small, scales), 0)
        used = torch.where(there[:, None], indices, -1)
        want = by_hand(wide, used, weights.nan_to_num(), *(plain.widened(*p) for p in parts))
        near("float8 y", out[there], want[there], 4e-2)


def around_deepgemm(device: str) -> None:
    """The owners of rows and the activation around DeepGEMM's products, which are plain torch here."""

    def product(rows: tuple, matrices: tuple, out: torch.Tensor, owners: torch.Tensor) -> None:
        assert rows[1].stride() == (1, len(out))
        assert owners.is_contiguous()
        wide, w = plain.widened(*rows), plain.widened(*matrices)
        for at in range(0, len(out), deepgemm.BLOCK):
            owner = owners[at].item()
            assert (owners[at : at + deepgemm.BLOCK] == owner).all()
            if owner >= 0:
                out[at : at + deepgemm.BLOCK] = (wide[at : at + deepgemm.BLOCK] @ w[owner].t()).to(out.dtype)

    def fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = x.view(len(x), -1, 128)
        scales = parts.abs().amax(2).clamp(min=1e-4) / 448
        return (parts / scales[:, :, None]).view(x.shape).to(torch.float8_e4m3fn), scales

    bound = 4e-2 if device == "cuda" else 8e-2  # Triton 3.4's interpreter rounds some numbers to the wrong float8
    g = torch.Generator().manual_seed(2)
    counts = torch.tensor([5, 0, 130], device=device)
    offsets = torch.tensor([0, 128, 128, 384], dtype=torch.int32, device=device)
    there = (torch.arange(512) < 5) | (torch.arange(512) >= 128) & (torch.arange(512) < 258)
    x = torch.where(there[:, None], torch.randn(512, 256, generator=g), 0).to(device)
    weights = torch.rand(512, generator=g).to(device)
    pairs = [plain.quantized(torch.randn(3, *size, generator=g).to(device) / 16) for size in ((256, 256), (256, 128))]
    m = experts.Matrices(pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1])
    before, deepgemm.product = deepgemm.product, lambda: product
    try:
        for given in (None, weights):
            out = torch.full((512, 256), 7, dtype=torch.bfloat16, device=device)
            came = experts.Came(offsets, counts, None, 512)
            deepgemm.forward(*fp8(x), given, m, came, out)
            wide = plain.widened(*fp8(x))
            want = plain.by_expert(wide, offsets[:-1].tolist(), counts.tolist(), *(plain.widened(*p) for p in pairs))
            want = want if given is None else want * given[:, None]
            near("around DeepGEMM", out[there], want[there], bound)
            assert (out[384:] == 7).all(), "rows behind the last were written"
    finally:
        deepgemm.product = before


def lists_are_right(device: str) -> None:
    """Each choice has one entry, in blocks of its expert, in the order of choices; few rows and many."""
    for rows, count, block in ((6, 3, 16), (300, 9, 16), (3000, 70, 64)):
        *_, indices, offsets, counts, there = case(device, torch.float32, rows, 16, 16, rows, count)
        made = lists.by_token(indices, offsets, counts, count, block, lists.room_for(rows * TOP_K, count, block))
        used = torch.where(there[:, None], indices, -1).flatten()
        each = [(used == e).nonzero().flatten() for e in range(count)]
        blocks = [-(-len(c) // block) for c in each]
        firsts = [sum(blocks[:e]) for e in range(count + 1)]
        assert made.starts.tolist() == firsts
        assert made.experts[: firsts[-1]].tolist() == [e for e, n in enumerate(blocks) for _ in range(n)]
        for e, choices in enumerate(each):
            mine = made.entries[firsts[e] * block : firsts[e + 1] * block]
            assert mine[: len(choices)].tolist() == choices.tolist()
            assert (mine[len(choices) :] == -1).all()
            assert made.places[choices].tolist() == list(range(firsts[e] * block, firsts[e] * block + len(choices)))
        assert (made.places[used < 0] == -1).all()
        assert lists.room_of([len(c) for c in each], block) == max(firsts[-1], 1) * block


def waits_end(device: str) -> None:
    """A wait for rows, or for their numbers, ends when they are there, when none comes any more, and when the dispatch has
    ended. None is made where a number is not known."""
    from triton_compiles import landings

    word = lambda *n: torch.tensor(n, dtype=torch.int32, device=device)  # noqa: E731
    for landed, counts, over, patience, left in (
        ((1, 0, 3, 2), (1, 0, 3, 2), 0, 1 << 40, None),
        ((1, 0, 2, 2), (1, 0, 3, 2), 0, 1 << 20, (0, 0, 3, 0)),
        ((1, 0, 2, 2), (1, 0, 3, 2), 1, 1 << 40, (0, 0, 3, 0)),
        ((1, 0, 3, 2), (1, 0, -1, 2), 0, 1 << 20, (0, 0, 0, 0)),
        ((1, 0, 3, 2), (1, 0, -1, 2), 1, 1 << 40, (0, 0, 0, 0)),
    ):
        failed, out = word(0), word(7, 7, 7, 7)
        landings[(1,)](0, word(*landed), word(*counts), word(over), failed, out, patience, E=4)
        assert (failed.tolist(), out.tolist()) == ([0 if left is None else 1], list(left or (0, 0, 0, 0))), (landed, counts)


def main(device: str) -> None:
    lists_are_right(device)
    waits_end(device)
    if device == "cpu":
        tokens(device, torch.float32, 32, 48, 30, 5, 1e-5)
        by_expert(device, torch.float32, 32, 48, 1e-5)
        around_deepgemm(device)
        return
    tokens(device, torch.float32, 64, 96, 90, 6, 1e-5)
    tokens(device, torch.bfloat16, 512, 384, 300, 7, 1e-2)
    tokens(device, torch.float16, 512, 384, 3000, 7, 1e-2)
    by_expert(device, torch.bfloat16, 256, 128, 1e-2)
    for columns in (False, True):
        float8(device, columns)
    around_deepgemm(device)
    torch.cuda.synchronize()


if __name__ == "__main__":
    if sys.argv[1] == "cpu":
        interpretable()
    main(sys.argv[1])
