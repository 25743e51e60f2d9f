"""The experts' part of a layer on a GPU, with its gradients: lists, products, sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._once import once
from . import lists, products
from .lists import Lists, Words
from .tables import Plan


class Came(NamedTuple):
    """Where the rows of a dispatch are."""

    #: The first row of each expert, or with rows by token of those from each rank.
    offsets: Tensor
    #: How many rows each expert has, or with rows by token how many came from each rank.
    counts: Tensor
    #: [rows, top_k] with rows by token: the local expert of each choice, -1 for none.
    indices: Tensor | None
    #: How many entries the lists have room for, in blocks of the plan's rows.
    room: int


def lists_of(came: Came, rows: int, experts: int, block: int, words: Words | None = None) -> Lists:
    """The row lists of what came. With words the counts may still be unknown to the device."""
    if came.indices is not None:
        return lists.by_token(came.indices, came.offsets, came.counts, experts, block, came.room)
    return lists.by_expert(rows, came.offsets, came.counts, block, came.room, words)


class Matrices(NamedTuple):
    """The matrices that this rank's experts multiply by, with scales if they are float8."""

    gate_up: Tensor
    down: Tensor
    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None


def forward(
    rows: Tensor, scales: Tensor | None, weights: Tensor | None, m: Matrices, came: Came, plan: Plan, out: Tensor,
    words: Words | None = None, keep: bool = False, sms: int = 0,
) -> tuple[Tensor, Lists, Tensor | None]:  # fmt: skip
    """The experts' products of rows, in out: with rows by token the sum for each token, by expert a row for each. Rows that did
    not come are left as they are."""
    by_token = came.indices is not None
    made = lists_of(came, rows.shape[0], m.gate_up.shape[0], plan.block, words)
    a, a_scales, h = products.up(
        rows, m.gate_up, made, plan.up, weights=weights, scales=scales, w_scales=m.gate_up_scales, keep=keep, words=words,
        counts=came.counts, sms=sms,
    )  # fmt: skip
    y = torch.empty((a.shape[0], out.shape[1]), dtype=out.dtype, device=out.device) if by_token else out
    products.down(
        a, m.down, made, plan.down, out=y, scatter=not by_token, scales=a_scales, w_scales=m.down_scales, words=words, sms=sms
    )
    if by_token:
        products.add_up(y, made, came.offsets, came.counts, out)
    return out, made, h


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor | None, gate_up: Tensor, down: Tensor, came: Came, plan: Plan, out: Tensor
    ) -> Tensor:
        m = Matrices(gate_up, down)
        y, made, h = forward(rows, None, weights, m, came, plan, out, keep=True)
        ctx.save_for_backward(rows, weights, gate_up, down, h, came.offsets, came.counts, *made[1:5])
        ctx.plan, ctx.by_token, ctx.lists = plan, came.indices is not None, (made.block, made.top_k, made.rows)
        return y.detach()  # whose memory other calls use too

    @staticmethod
    @once("a layer's experts", lambda ctx: any(ctx.needs_input_grad[:4]))
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        rows, weights, gate_up, down, h, offsets, counts, entries, owners, starts, places = ctx.saved_tensors
        block, top_k, most = ctx.lists
        made, plan = Lists(block, entries, owners, starts, places, top_k, most), ctx.plan
        d_rows = d_gate_up = d_down = None
        dh, a, d_weights = products.down_back(dy.contiguous(), down, made, plan.down_back, h, weights)
        if ctx.needs_input_grad[3]:
            d_down = products.matrices_back(dy, a, made, plan.matrices_back, 0, down)
        del a
        if ctx.needs_input_grad[2]:
            d_gate_up = products.matrices_back(dh, rows, made, plan.matrices_back, 1, gate_up)
        if ctx.needs_input_grad[0]:
            d_rows = torch.empty_like(rows)
            if ctx.by_token:
                y = torch.empty((dh.shape[0], rows.shape[1]), dtype=rows.dtype, device=rows.device)
                products.down(dh, gate_up, made, plan.up_back, out=y, across=True)
                products.add_up(y, made, offsets, counts, d_rows)
            else:
                products.down(dh, gate_up, made, plan.up_back, out=d_rows, across=True, scatter=True)
        return d_rows, d_weights, d_gate_up, d_down, None, None, None


def apply(
    rows: Tensor, weights: Tensor | None, gate_up: Tensor, down: Tensor, came: Came, plan: Plan, out: Tensor
) -> Tensor:
    """The same with gradients of rows, weights and matrices. The gradient of rows that did not come is undefined."""
    y: Tensor = _Experts.apply(rows, weights, gate_up, down, came, plan, out)
    return y
