"""Small matrices next to the experts' own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LoRA(nn.Module):
    """Low-rank matrices for the experts of a layer: ``w + scale * b a``. It is an ``adapt`` of :class:`MoE`.

    ``experts`` is how many this rank has. The sum is made anew in each call, in memory of its own as large as the matrices; so
    gradients go to ``a`` and ``b`` by torch's own rules, and to the matrices unless they need none.
    """

    def __init__(
        self, experts: int, hidden: int, inner: int, rank: int, *, scale: float = 1.0,
        dtype: torch.dtype = torch.bfloat16, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scale = scale
        shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
        for name, (rows, columns) in shapes.items():
            a = torch.randn(experts, rank, columns, device=device) * columns**-0.5
            setattr(self, f"{name}_a", nn.Parameter(a.to(dtype)))
            setattr(self, f"{name}_b", nn.Parameter(torch.zeros(experts, rows, rank, dtype=dtype, device=device)))

    def forward(self, name: str, w: Tensor) -> Tensor:
        """The matrix that the experts multiply by in place of w, which is "gate_up" or "down"."""
        a, b = getattr(self, f"{name}_a"), getattr(self, f"{name}_b")
        return torch.baddbmm(w, b, a, alpha=self.scale)
