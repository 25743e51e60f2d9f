"""Functions that torch's compiler does not look into."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from types import FunctionType
from typing import Any, TypeVar

import torch

_frames = torch._C._dynamo.eval_frame
_LEAVE = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
_WHY = "switchyard has no operator for this call"

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def uncompiled(function: F) -> F:
    """Have torch's compiler end a graph before calls of a function, and run it and all that it calls as they are.

    torch.compiler.disable does that too, but imports the compiler, which takes as long as the rest of torch, and wraps the
    function, which takes time at each call.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _WHY  # type: ignore[attr-defined]
    _frames.set_code_exec_strategy(function.__code__, _LEAVE)  # type: ignore[attr-defined]
    return function


@uncompiled
def outside(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Make a call outside of the graph that is compiled."""
    return call(*arguments, **named)


def uncompiled_methods(of: type[T]) -> type[T]:
    """Have torch's compiler do so before calls of a class's methods, but for those of the class alone and for its beginning."""
    for name, method in vars(of).items():
        if isinstance(method, staticmethod):
            method = method.__func__
        elif isinstance(method, property):
            method = method.fget
        elif isinstance(method, cached_property):
            method = method.func
        if isinstance(method, FunctionType) and (not name.startswith("_") or name in ("__getitem__", "__iter__", "_make")):
            uncompiled(method)
    return of
