"""The experts' products by DeepGEMM, for many rows of float8 by expert on Hopper, where it is installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .experts import Came, Matrices
from .lists import _power

#: Its blocks of rows: an expert's rows begin at multiples of it.
BLOCK = 128
#: Rows an expert, on average, from which its products are faster than Triton's: memory is the limit of both below.
FEWEST = 160


@functools.cache
def product() -> Any:
    """DeepGEMM's grouped product of contiguous rows, None if it is not installed or does not load."""
    if importlib.util.find_spec("deep_gemm") is None:
        return None
    try:
        return importlib.import_module("deep_gemm").m_grouped_fp8_gemm_nt_contiguous
    except (ImportError, OSError, RuntimeError, AttributeError) as err:
        text = f"switchyard: layers: deep_gemm is installed and does not load, Triton's products run: {err}"
        warnings.warn(text, stacklevel=2)
        return None


@triton.jit
def _owners(offsets, owners, EXPERTS: tl.constexpr, E: tl.constexpr, B: tl.constexpr):
    """The expert of each row, -1 behind the last expert's."""
    row = tl.program_id(0) * B + tl.arange(0, B)
    e = tl.arange(0, E)
    end = tl.load(offsets + 1 + e, mask=e < EXPERTS, other=0x7FFFFFFF)
    owner = tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1)
    tl.store(owners + row, tl.where(owner < EXPERTS, owner, -1))


@triton.jit
def _activate(
    h, weights, out, scales, offsets, rows,
    EXPERTS: tl.constexpr, INNER: tl.constexpr, BM: tl.constexpr, WEIGH: tl.constexpr,
):  # fmt: skip
    """out = silu(gate) * up, times a row's weight, of h [rows, gate and up], quantised for each row and 128 columns. scales are
    in column-major order."""
    first = tl.program_id(0) * BM
    if first < tl.load(offsets + EXPERTS):
        row = first + tl.arange(0, BM)
        column = tl.program_id(1) * 128 + tl.arange(0, 128)
        at = h + row[:, None].to(tl.int64) * (2 * INNER) + column[None, :]
        g = tl.load(at).to(tl.float32)
        v = g * tl.sigmoid(g) * tl.load(at + INNER).to(tl.float32)
        if WEIGH:
            v *= tl.load(weights + row)[:, None]
        scale = tl.maximum(tl.max(tl.abs(v), 1), 1e-10) / 448.0
        tl.store(scales + tl.program_id(1).to(tl.int64) * rows + row, scale)
        to = out + row[:, None].to(tl.int64) * INNER + column[None, :]
        tl.store(to, (v / scale[:, None]).to(out.dtype.element_ty))


def forward(rows: Tensor, scales: Tensor, weights: Tensor | None, m: Matrices, came: Came, out: Tensor) -> Tensor:
    """The same as :func:`experts.forward` of rows by expert at multiples of BLOCK, with zeros between. Time goes by how many
    rows there can be: DeepGEMM reads blocks behind the last, too."""
    n, (experts, both, _) = rows.shape[0], m.gate_up.shape
    inner = both // 2
    owners = torch.empty(n + 2 * BLOCK, dtype=torch.int32, device=rows.device)  # it looks at a block's neighbour, too
    _owners[(n // BLOCK + 2,)](came.offsets, owners, EXPERTS=experts, E=_power(experts), B=BLOCK)
    h = torch.empty((n, both), dtype=out.dtype, device=rows.device)
    a = torch.empty((n, inner), dtype=rows.dtype, device=rows.device)
    a_scales = torch.empty((inner // 128, n), dtype=torch.float32, device=rows.device).t()
    columns = scales if scales.stride() == (1, n) else scales.t().contiguous().t()
    multiply = product()
    multiply((rows, columns), (m.gate_up, m.gate_up_scales), h, owners[:n])
    height = 32
    _activate[(triton.cdiv(n, height), inner // 128)](
        h, weights, a, a_scales, came.offsets, n, EXPERTS=experts, INNER=inner, BM=height, WEIGH=weights is not None
    )
    multiply((a, a_scales), (m.down, m.down_scales), out[:n], owners[:n])
    return out
