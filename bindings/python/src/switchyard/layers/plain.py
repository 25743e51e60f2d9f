"""The experts' products in plain torch: any device, any type, autograd's own gradients. The host looks at every count."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """down (silu(gate x) * (up x)) for rows of x; gate_up has the gate's rows before the up's."""
    gate, up = (x @ gate_up.t()).chunk(2, -1)
    return (F.silu(gate) * up) @ down.t()


def by_token(
    rows: Tensor, indices: Tensor, weights: Tensor, offsets: list[int], counts: list[int], gate_up: Tensor, down: Tensor
) -> Tensor:
    """The weighted sum over the experts of each row, in the order of experts. indices has -1 for none, and is undefined but for
    counts rows from each of offsets on."""
    came = torch.zeros(len(rows), 1, dtype=torch.bool, device=rows.device)
    for first, many in zip(offsets, counts):
        came[first : first + many] = True
    indices = torch.where(came, indices, -1)
    out = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for e in range(gate_up.shape[0]):
        row, choice = (indices == e).nonzero(as_tuple=True)
        made = swiglu(rows[row], gate_up[e], down[e]).float()
        out = out.index_add(0, row, weights[row, choice, None] * made)
    return out.to(rows.dtype)


def by_expert(rows: Tensor, offsets: list[int], counts: list[int], gate_up: Tensor, down: Tensor) -> Tensor:
    """Each expert's products of its rows, counts of them from offsets on. Other rows become zero."""
    out = torch.zeros_like(rows)
    for e, (first, many) in enumerate(zip(offsets, counts)):
        at = torch.arange(first, first + many, device=rows.device)
        out = out.index_copy(0, at, swiglu(rows[at], gate_up[e], down[e]))
    return out


def widened(x: Tensor, scales: Tensor) -> Tensor:
    """float8 rows or matrices as float32, with scales for each 128 columns, and for matrices for each 128 rows."""
    wide = x.float()
    if x.dim() > 2:
        scales = scales.repeat_interleave(128, -2)[..., : x.shape[-2], :]
    return wide * scales.repeat_interleave(128, -1)[..., : x.shape[-1]]


def quantized(w: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices [experts, rows, columns] as float8_e4m3fn with float32 scales for each 128 by 128 elements."""
    e, rows, columns = w.shape
    if rows % 128 or columns % 128:
        raise ValueError(f"switchyard: layers: matrices of {rows} by {columns}, want multiples of 128")
    parts = w.float().view(e, rows // 128, 128, columns // 128, 128)
    scales = parts.abs().amax((2, 4)).clamp(min=1e-4) / 448
    small = (parts / scales[:, :, None, :, None]).view(e, rows, columns)
    return small.to(torch.float8_e4m3fn), scales
