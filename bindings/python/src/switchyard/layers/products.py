"""Launches of the products in Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import backward, forward
from .lists import Lists, Words, _power, ends_of
from .tables import Tiles, fitted


def _processors(x: Tensor) -> int:
    """Multiprocessors of a tensor's device. Triton's interpreter takes few programs."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


def _grid(x: Tensor, tiles: int, t: Tiles, sms: int) -> tuple[int]:
    return (max(min(tiles, (sms or _processors(x)) * t.programs), 1),)


def _matrix(w: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of all experts' matrices below one another."""
    return TensorDescriptor.from_tensor(w.reshape(-1, w.shape[-1]), [rows, columns])


def _entries(x: Tensor | None, t: Tiles, lists: Lists) -> TensorDescriptor | None:
    """A descriptor of what has a row for each entry."""
    return None if x is None else TensorDescriptor.from_tensor(x, [_parts(t, lists)[0], t.columns])


def _parts(t: Tiles, lists: Lists) -> tuple[int, int]:
    """How many rows a tile has, and how many tiles a block of the lists is."""
    rows = min(t.rows, lists.block)
    return rows, lists.block // rows


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype is torch.float32 else "tf32"


def _strides(scales: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if scales is None else scales.stride()


def _scale_strides(scales: Tensor | None) -> tuple[int, int, int, int]:
    """Strides of rows and words; how many rows lie together, [groups, rows, words], and the stride of these."""
    if scales is None:
        return 0, 0, 1, 0
    if scales.dim() == 2:
        return scales.stride(0), scales.stride(1), 1 << 30, 0
    return scales.stride(1), scales.stride(2), scales.shape[1], scales.stride(0)


def _tile(t: Tiles, parts: tuple[int, int]) -> dict[str, Any]:
    """The arguments of every product about its tiles, but for weights."""
    sizes = {"BM": parts[0], "PARTS": parts[1], "BN": t.columns, "BK": t.depth, "GROUP": t.group}
    return {**sizes, "num_warps": t.warps, "num_stages": t.stages}


def up(
    x: Tensor, w: Tensor, lists: Lists, t: Tiles, *, weights: Tensor | None = None, scales: Tensor | None = None,
    w_scales: Tensor | None = None, keep: bool = False, words: Words | None = None, counts: Tensor | None = None,
    sms: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """silu(x gate^T) * (x up^T) * weight of each entry, with its scales if x has some, and what the products were with keep.
    With words a tile waits for its expert's rows; there are at most sms programs then, so that what makes the rows finds a
    multiprocessor."""
    experts, both, depth = w.shape
    inner, float8 = both // 2, scales is not None
    t = fitted(t, inner, depth)
    if words is not None:
        t = t._replace(programs=1)
    n, parts = lists.experts.shape[0] * lists.block, _parts(t, lists)
    out = torch.empty((n, inner), dtype=x.dtype, device=x.device)
    out_scales = x.new_empty((inner // t.columns, n), dtype=torch.float32).t() if float8 else None
    h = torch.empty((n, both), dtype=x.dtype, device=x.device) if keep else None
    forward.up[_grid(x, n // parts[0] * (inner // t.columns), t, sms)](
        x, scales, _matrix(w, t.columns, t.depth), w_scales, lists.entries, lists.experts, lists.starts, weights,
        _entries(h, t, lists), _entries(out, t, lists), out_scales, words and words.landed, counts, *ends_of(words),
        x.stride(0), *_scale_strides(scales), *_strides(out_scales), EXPERTS=experts, K=depth, INNER=inner, TOP_K=lists.top_k,
        SWAP=t.swap, FLOAT8=float8, KEEP=keep, WEIGH=weights is not None, WAIT=words is not None, PRECISION=_precision(x),
        **_tile(t, parts),
    )  # fmt: skip
    return out, out_scales, h


def down(
    a: Tensor, w: Tensor, lists: Lists, t: Tiles, *, out: Tensor, across: bool = False, scatter: bool = False,
    scales: Tensor | None = None, w_scales: Tensor | None = None, words: Words | None = None, sms: int = 0,
) -> Tensor:  # fmt: skip
    """a w^T by expert, or a w with across, in the rows of entries or of what they name. words count each expert's."""
    experts, depth = w.shape[0], a.shape[1]
    columns = w.shape[2] if across else w.shape[1]
    t = fitted(t, columns, depth)
    parts = _parts(t, lists)
    blocks = lists.experts.shape[0] * parts[1]
    box = (t.depth, t.columns) if across else (t.columns, t.depth)
    done = torch.zeros(blocks, dtype=torch.int32, device=a.device) if words is not None else None
    forward.down[_grid(a, blocks * (columns // t.columns), t, sms)](
        TensorDescriptor.from_tensor(a, [parts[0], t.depth]), scales, _matrix(w, *box), w_scales, lists.entries, lists.experts,
        lists.starts, out if scatter else _entries(out, t, lists), words and words.ready, done,
        words and words.failed, *_strides(scales), EXPERTS=experts, K=depth,
        N=columns, SWAP=t.swap, ACROSS=across, FLOAT8=scales is not None, SCATTER=scatter, READY=words is not None,
        PRECISION=_precision(a), **_tile(t, parts),
    )  # fmt: skip
    return out


def add_up(y: Tensor, lists: Lists, offsets: Tensor, counts: Tensor, out: Tensor) -> Tensor:
    """The sums of y over the choices of each row that came."""
    ranks, columns = counts.shape[0], y.shape[1]
    part = min(_power(columns), 2048)
    forward.add_up[(lists.rows, triton.cdiv(columns, part))](
        y, lists.places, out, offsets, counts, lists.rows, RANKS=ranks, R=_power(ranks), N=columns, TOP_K=lists.top_k, BN=part,
        num_warps=max(1, min(8, part // 256)),
    )  # fmt: skip
    return out


def down_back(
    dy: Tensor, w: Tensor, lists: Lists, t: Tiles, h: Tensor, weights: Tensor | None, sms: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of the first product and of the weights, and what the second product read."""
    experts, depth, inner = w.shape
    t = fitted(t, inner, depth)
    n, columns, parts = h.shape[0], inner // t.columns, _parts(t, lists)
    half = t._replace(columns=t.columns // 2)
    dh, a = torch.empty_like(h), torch.empty((n, inner), dtype=h.dtype, device=h.device)
    sums = torch.empty((n, columns), dtype=torch.float32, device=h.device) if weights is not None else None
    backward.down_back[_grid(dy, n // parts[0] * columns, t, sms)](
        dy, _matrix(w, t.depth, t.columns), lists.entries, lists.experts, lists.starts, weights,
        *(_entries(v, half, lists) for v in (h, dh, a)), sums, dy.stride(0), EXPERTS=experts, K=depth, INNER=inner,
        TOP_K=lists.top_k, WEIGH=weights is not None, PRECISION=_precision(dy), **_tile(t, parts),
    )  # fmt: skip
    if weights is None:
        return dh, a, None
    d_weights = torch.zeros_like(weights)
    backward.weights_back[(lists.experts.shape[0],)](
        sums, lists.entries, lists.starts, d_weights, EXPERTS=experts, COLUMNS=columns, C=_power(columns), B=lists.block
    )
    return dh, a, d_weights


def matrices_back(a: Tensor, b: Tensor, lists: Lists, t: Tiles, listed: int, like: Tensor, sms: int = 0) -> Tensor:
    """The gradient of matrices: for each expert the sum of a^T b over its entries. listed says which side they name rows of."""
    experts, p, q = like.shape
    t = fitted(t._replace(rows=min(p & -p, t.rows)), q, lists.block)
    out = torch.empty_like(like)
    sides: list[Any] = [a, b]
    sides[1 - listed] = TensorDescriptor.from_tensor(sides[1 - listed], [t.depth, (t.rows, t.columns)[1 - listed]])
    sizes: dict[str, Any] = {"BP": t.rows, "BQ": t.columns, "BK": t.depth, "GROUP": t.group}
    backward.matrices_back[_grid(a, experts * (p // t.rows) * (q // t.columns), t, sms)](
        *sides, out, lists.entries, lists.starts, a.stride(0), b.stride(0), EXPERTS=experts, P=p, Q=q, TOP_K=lists.top_k,
        BLOCK=lists.block, LISTED=listed, PRECISION=_precision(a), **sizes, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out
