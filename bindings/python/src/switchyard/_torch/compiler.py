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


def uncompiled(function: F, why: str = _WHY) -> F:
    """Have torch's compiler end a graph before calls of a function, and run it and all that it calls as they are. With
    fullgraph it says why.

    torch.compiler.disable does that too, but imports the compiler, which takes as long as the rest of torch, and wraps the
    function, which takes time at each call.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
    _frames.set_code_exec_strategy(function.__code__, _LEAVE)  # type: ignore[attr-defined]
    return function


def leaving(why: str) -> Callable[..., Any]:
    """A function that makes a call outside of the graph that is compiled."""

    def leave(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return call(*arguments, **named)

    return uncompiled(leave, why)


outside = leaving(_WHY)


def operates(method: F) -> F:
    """Have torch's compiler look into a method of a class of uncompiled_methods: it makes operators on the way into a graph."""
    method._operates = True  # type: ignore[attr-defined]
    return method


def uncompiled_methods(of: type[T]) -> type[T]:
    """Have torch's compiler do so before calls of a class's methods, but for those of the class alone, for its beginning and
    for those that make operators."""
    for name, method in vars(of).items():
        if isinstance(method, staticmethod):
            method = method.__func__
        elif isinstance(method, property):
            method = method.fget
        elif isinstance(method, cached_property):
            method = method.func
        if not isinstance(method, FunctionType) or hasattr(method, "_operates"):
            continue
        if not name.startswith("_") or name in ("__getitem__", "__iter__", "_make"):
            uncompiled(method)
    return of
