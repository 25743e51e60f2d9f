"""Calls have names in torch's profiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

#: Whether a profiler of torch's runs. Nothing else is done for it where none does.
profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def span(name: str) -> Any:
    """A stretch of time that a profiler shows as ``switchyard: `` and the name."""
    return torch.autograd.profiler.record_function(f"switchyard: {name}")


def named(name: str) -> Callable[[_Function], _Function]:
    """Has a profiler show calls of a function by a name."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if not profiled():
                return function(*arguments, **options)
            with span(name):
                return function(*arguments, **options)

        return call  # type: ignore[return-value]

    return decorate
