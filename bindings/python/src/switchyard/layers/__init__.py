"""Layers over :class:`switchyard.Dispatcher`, for torch. Their products are in Triton on GPUs and in plain torch elsewhere."""

from __future__ import annotations

from .lora import LoRA
from .moe import MoE, Router

__all__ = ["LoRA", "MoE", "Router"]
