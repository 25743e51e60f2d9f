"""Gradients that have none of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import errors


class _Refusing(torch.autograd.Function):
    """Tensors whose gradients are refused."""

    @staticmethod
    def forward(ctx: Any, what: str, *made: Tensor) -> Any:
        ctx.what = what
        return tuple(x.view_as(x) for x in made)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise errors.Unsupported(
            f"switchyard: the gradients of {ctx.what} have no gradients: second derivatives through it are not there "
            "(create_graph=True)"
        )


def once(what: str, numbers: Callable[[Any], bool] = lambda ctx: False) -> Callable[[Any], Any]:
    """Have the backward of what, which the library makes, refuse to be differentiated: where the gradients that it gets need
    gradients, or where numbers says of its context that what was saved does. torch's once_differentiable does not know of
    the latter."""

    def decorate(backward: Callable[..., Sequence[Any]]) -> Any:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *grads: Any) -> Any:
            with torch.no_grad():
                made = list(backward(ctx, *grads))
            if not torch.is_grad_enabled():
                return tuple(made)
            if any(isinstance(g, Tensor) and g.requires_grad for g in grads) or numbers(ctx):
                some = [i for i, x in enumerate(made) if isinstance(x, Tensor)]
                refusing = _Refusing.apply(what, *(made[i].detach().requires_grad_() for i in some))
                for i, x in zip(some, refusing):
                    made[i] = x
            return tuple(made)

        return wrapper

    return decorate
