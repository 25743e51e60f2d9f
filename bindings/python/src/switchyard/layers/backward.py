"""The grouped products of a layer's backward pass, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from .forward import tile_of


@triton.jit
def down_back(
    dy, w, entries, experts, starts, weights, h, dh, out, d_weights, dy_row,
    EXPERTS: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, WEIGH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the gradient of what the second product makes, of rows that the entries name: the gradient dh of the first product's
    gate and up, what that product's activation was once more in out, and d_weights[entry, column] whose sum over columns is the
    gradient of the entry's weight. w is a descriptor of [experts * K, INNER], and h, dh and out are of entries."""
    blocks = tl.load(starts + EXPERTS) * PARTS
    COLUMNS: tl.constexpr = INNER // BN
    for j in range(tl.program_id(0), blocks * COLUMNS, tl.num_programs(0)):
        block, column = tile_of(j, blocks, COLUMNS, GROUP)
        slot = block * BM + tl.arange(0, BM)
        entry = tl.load(entries + slot)
        if tl.max(entry, 0) >= 0:  # parts of an expert's last block can have none
            expert = tl.load(experts + block // PARTS)
            there = entry >= 0
            row = tl.where(there, entry // TOP_K, 0).to(tl.int64)
            at = dy + row[:, None] * dy_row + tl.arange(0, BK)[None, :]
            da = tl.zeros((BM, BN), tl.float32)
            for step in range(0, K // BK):
                a = tl.load(at, mask=there[:, None], other=0.0)
                at += BK
                da = tl.dot(a, w.load([expert * K + step * BK, column * BN]), da, input_precision=PRECISION)
            if WEIGH:
                weight = tl.load(weights + tl.where(there, entry, 0), mask=there, other=0.0)
            # In parts of the columns, for the registers that it takes.
            total = tl.zeros((BM,), tl.float32)
            halves = tl.split(tl.permute(tl.reshape(da, (BM, 2, BN // 2)), (0, 2, 1)))
            for i in tl.static_range(2):
                d = halves[i]
                n = column * BN + i * (BN // 2)
                g = h.load([block * BM, n]).to(tl.float32)
                u = h.load([block * BM, INNER + n]).to(tl.float32)
                s = tl.sigmoid(g)
                v = g * s
                if WEIGH:
                    total += tl.sum(d * v * u, 1)
                    d *= weight[:, None]
                    out.store([block * BM, n], (v * u * weight[:, None]).to(out.dtype))
                else:
                    out.store([block * BM, n], (v * u).to(out.dtype))
                dh.store([block * BM, INNER + n], (d * v).to(dh.dtype))
                dh.store([block * BM, n], (d * u * (s + v - v * s)).to(dh.dtype))
            if WEIGH:
                tl.store(d_weights + slot * COLUMNS + column, total)


@triton.jit
def weights_back(
    d_weights, entries, starts, out, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr, B: tl.constexpr
):
    """out[entry] = the sum over columns of the entry's d_weights. One program for each block of B entries."""
    if tl.program_id(0) < tl.load(starts + EXPERTS):
        slot = tl.program_id(0) * B + tl.arange(0, B)
        entry = tl.load(entries + slot)
        c = tl.arange(0, C)
        at = d_weights + slot[:, None] * COLUMNS + c[None, :]
        parts = tl.load(at, mask=(entry >= 0)[:, None] & (c < COLUMNS)[None, :], other=0.0)
        tl.store(out + entry, tl.sum(parts, 1), mask=entry >= 0)


@triton.jit
def matrices_back(
    a, b, out, entries, starts, a_row, b_row,
    EXPERTS: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, BP: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, LISTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[expert] = the sum over its entries of a^T b, [P, Q]. LISTED says which side has rows that entries name, 0 for a and
    1 for b; the other is a descriptor of a row for each entry. The sum is in the order of entries."""
    TALL: tl.constexpr = P // BP
    WIDE: tl.constexpr = Q // BQ
    for j in range(tl.program_id(0), EXPERTS * TALL * WIDE, tl.num_programs(0)):
        expert = j // (TALL * WIDE)
        p, q = tile_of(j % (TALL * WIDE), TALL, WIDE, GROUP)
        begin, end = tl.load(starts + expert), tl.load(starts + expert + 1)
        rows = p * BP + tl.arange(0, BP)
        columns = q * BQ + tl.arange(0, BQ)
        acc = tl.zeros((BP, BQ), tl.float32)
        some = tl.full((BLOCK,), 1, tl.int1) & (end > begin)
        last = tl.load(entries + (end - 1) * BLOCK + tl.arange(0, BLOCK), mask=some, other=-1)
        stop = (end - 1) * BLOCK + tl.sum((last >= 0).to(tl.int32), 0)  # what is behind may never have been written
        entry = tl.load(entries + begin * BLOCK + tl.arange(0, BK))
        for at in range(begin * BLOCK, stop, BK):
            there = (entry >= 0)[:, None]
            row = tl.where(entry >= 0, entry // TOP_K, 0).to(tl.int64)[:, None]
            # The next step's, so that its rows can be on their way early. Behind the last there is room.
            entry = tl.load(entries + at + BK + tl.arange(0, BK))
            if LISTED == 0:
                left = tl.load(a + row * a_row + rows[None, :], mask=there, other=0.0)
                right = b.load([at, q * BQ])
            else:
                left = a.load([at, p * BP])
                right = tl.load(b + row * b_row + columns[None, :], mask=there, other=0.0)
            acc = tl.dot(tl.trans(left), right, acc, input_precision=PRECISION)
        to = out + (expert.to(tl.int64) * P + rows[:, None]) * Q + columns[None, :]
        tl.store(to, acc.to(out.dtype.element_ty))
