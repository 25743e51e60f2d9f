"""The grouped products of a layer's forward pass, in Triton: rows are read through a list, experts through blocks of it."""

from __future__ import annotations

import triton
import triton.language as tl

from .waits import await_rows, unless


@triton.jit
def tile_of(j, blocks, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Tile j of a grid of blocks times COLUMNS: GROUP blocks take a column before the next, so that caches hold both sides."""
    each = GROUP * COLUMNS
    first = j // each * GROUP
    tall = tl.minimum(blocks - first, GROUP)
    return first + j % each % tall, j % each // tall


@triton.jit
def rows_done(ready, done, block, expert, rows, COLUMNS: tl.constexpr):
    """Says that a tile is stored. The last tile of a block adds the block's rows to the word of its expert."""
    tl.debug_barrier()  # all threads have stored before one says so
    if tl.atomic_add(done + block, 1, sem="acq_rel", scope="gpu") == COLUMNS - 1:
        tl.atomic_add(ready + expert, rows, sem="release", scope="sys")


@triton.jit
def dot(a, b, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b^T of tiles [rows, K] and [columns, K]; with SWAP the sum is the other way round."""
    if SWAP:
        acc = tl.dot(b, tl.trans(a), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    return acc


@triton.jit
def up(
    x, x_scales, w, w_scales, entries, experts, starts, weights, h, out, out_scales, landed, counts, over, failed, patience,
    x_row, xs_row, xs_word, xs_high, xs_block, os_row, os_word,
    EXPERTS: tl.constexpr, K: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr, FLOAT8: tl.constexpr, KEEP: tl.constexpr,
    WEIGH: tl.constexpr, WAIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = silu(x gate^T) * (x up^T) of each entry's row, times its weight. w is a descriptor of [experts * 2 * INNER, K], the
    gate's rows before the up's; out and h are descriptors of entries. h keeps both products. With FLOAT8 both sides have scales
    by 128 columns, w also by 128 rows, and out is quantised alike. A block of the lists is PARTS tiles high. With WAIT tiles
    whose rows do not land are left out, and failed is not zero."""
    blocks = tl.load(starts + EXPERTS) * PARTS
    if WAIT:
        blocks = unless(failed, blocks)
    COLUMNS: tl.constexpr = INNER // BN
    for j in range(tl.program_id(0), blocks * COLUMNS, tl.num_programs(0)):
        block, column = tile_of(j, blocks, COLUMNS, GROUP)
        slot = block * BM + tl.arange(0, BM)
        entry = tl.load(entries + slot)
        some = tl.max(entry, 0) >= 0  # parts of an expert's last block can have none
        expert = tl.load(experts + block // PARTS)
        if WAIT:
            some &= await_rows(landed, counts, expert, over, failed, patience)
        if some:
            there = entry >= 0
            row = tl.where(there, entry // TOP_K, 0).to(tl.int64)
            k = tl.arange(0, BK)
            at = x + row[:, None] * x_row + k[None, :]
            first = expert * (2 * INNER) + column * BN
            g = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
            u = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
            if FLOAT8:  # scales are loaded a step ahead: what waits for a product must not wait for them too
                side = x_scales + row // xs_high * xs_block + row % xs_high * xs_row
                sw = w_scales + (first // 128) * (K // 128)
                below = (INNER // 128) * (K // 128)
                sa, sg, su = tl.load(side, mask=there, other=0.0), tl.load(sw), tl.load(sw + below)
            for step in range(0, K // BK):
                if FLOAT8:
                    word = (step + 1) * BK // 128
                    more = word < K // 128
                    next_a = tl.load(side + word * xs_word, mask=there & more, other=0.0)
                    next_g, next_u = tl.load(sw + word, mask=more, other=0.0), tl.load(sw + below + word, mask=more, other=0.0)
                a = tl.load(at, mask=there[:, None], other=0.0)
                at += BK
                gate = w.load([first, step * BK])
                rest = w.load([first + INNER, step * BK])
                if FLOAT8:
                    each = sa[None, :] if SWAP else sa[:, None]
                    none = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
                    g += dot(a, gate, none, SWAP, PRECISION) * (each * sg)
                    u += dot(a, rest, none, SWAP, PRECISION) * (each * su)
                    sa, sg, su = next_a, next_g, next_u
                else:
                    g = dot(a, gate, g, SWAP, PRECISION)
                    u = dot(a, rest, u, SWAP, PRECISION)
            if SWAP:
                g, u = tl.trans(g), tl.trans(u)
            if KEEP:
                h.store([block * BM, column * BN], g.to(h.dtype))
                h.store([block * BM, INNER + column * BN], u.to(h.dtype))
            v = g * tl.sigmoid(g) * u
            if WEIGH:
                v *= tl.load(weights + tl.where(there, entry, 0), mask=there, other=0.0)[:, None]
            if FLOAT8:
                scale = tl.maximum(tl.max(tl.abs(v), 1), 1e-10) / 448.0
                tl.store(out_scales + slot * os_row + column * os_word, scale)
                v /= scale[:, None]
            out.store([block * BM, column * BN], v.to(out.dtype))


@triton.jit
def down(
    a, a_scales, w, w_scales, entries, experts, starts, y, ready, done, failed, as_row, as_word,
    EXPERTS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr, ACROSS: tl.constexpr, FLOAT8: tl.constexpr,
    SCATTER: tl.constexpr, READY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = a w^T by expert. a is a descriptor of entries. w is one of [experts * N, K], or with ACROSS of [experts * K, N].
    A row of y is that of the entry, or with SCATTER of what the entry names. With READY nothing is made or told if the first
    product has failed."""
    blocks = tl.load(starts + EXPERTS) * PARTS
    if READY:
        blocks = unless(failed, blocks)
    COLUMNS: tl.constexpr = N // BN
    for j in range(tl.program_id(0), blocks * COLUMNS, tl.num_programs(0)):
        block, column = tile_of(j, blocks, COLUMNS, GROUP)
        slot = block * BM + tl.arange(0, BM)
        entry = tl.load(entries + slot)
        if tl.max(entry, 0) >= 0:  # parts of an expert's last block can have none
            expert = tl.load(experts + block // PARTS)
            acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
            if FLOAT8:
                side = a_scales + slot * as_row
                of_w = w_scales + (expert * (N // 128) + column * BN // 128) * (K // 128)
                sa, sw = tl.load(side), tl.load(of_w)
            for step in range(0, K // BK):
                if FLOAT8:
                    word = (step + 1) * BK // 128
                    more = word < K // 128
                    next_a = tl.load(side + word * as_word, mask=tl.full((BM,), 1, tl.int1) & more, other=0.0)
                    next_w = tl.load(of_w + word, mask=more, other=0.0)
                rows = a.load([block * BM, step * BK])
                if ACROSS:
                    tile = tl.trans(w.load([expert * K + step * BK, column * BN]))
                else:
                    tile = w.load([expert * N + column * BN, step * BK])
                if FLOAT8:
                    each = sa[None, :] if SWAP else sa[:, None]
                    none = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
                    acc += dot(rows, tile, none, SWAP, PRECISION) * (each * sw)
                    sa, sw = next_a, next_w
                else:
                    acc = dot(rows, tile, acc, SWAP, PRECISION)
            if SWAP:
                acc = tl.trans(acc)
            if SCATTER:
                n = column * BN + tl.arange(0, BN)
                to = y + entry.to(tl.int64)[:, None] * N + n[None, :]
                tl.store(to, acc.to(y.dtype.element_ty), mask=(entry >= 0)[:, None])
            else:
                y.store([block * BM, column * BN], acc.to(y.dtype))
            if READY:
                rows_done(ready, done, block, expert, tl.sum((entry >= 0).to(tl.int32), 0), COLUMNS)


@triton.jit
def add_up(
    y, places, out, offsets, counts, rows, RANKS: tl.constexpr, R: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """out[row] = the sum of y over the row's choices, in their order. Rows that did not come are left as they are."""
    row = tl.program_id(0)
    rank = tl.arange(0, R)
    first = tl.load(offsets + rank, mask=rank < RANKS, other=0)
    many = tl.load(counts + rank, mask=rank < RANKS, other=0)
    if tl.sum(((row >= first) & (row < first + many)).to(tl.int32), 0) > 0:
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        acc = tl.zeros((BN,), tl.float32)
        for i in tl.static_range(TOP_K):
            place = tl.load(places + row * TOP_K + i)
            if place >= 0:
                acc += tl.load(y + place.to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(out + row.to(tl.int64) * N + n, acc.to(out.dtype.element_ty), mask=n < N)
