"""Names by which compiled graphs, which know tensors and numbers alone, find buffers and the handles of calls."""

from __future__ import annotations

import itertools
import weakref
from array import array
from typing import Any

import torch
from switchyard._torch.compiler import uncompiled
from torch import Tensor

#: Whether a call is on its way into a compiled graph.
compiling = torch.compiler.is_dynamo_compiling

_numbers = itertools.count(1)
#: Buffers by their names.
buffers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def named(buffer: Any) -> str:
    """A name for a buffer."""
    name = f"deep_ep:{next(_numbers)}"
    buffers[name] = buffer
    return name


class _Memory(array):  # type: ignore[type-arg]
    """The memory of a token. It holds a handle for as long as the token lives."""

    handle: Any


_memories: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()


def token_of(handle: Any) -> Tensor:
    """A tensor on the host that stands for a handle, and holds it."""
    number = next(_numbers)
    memory = _memories[number] = _Memory("q", (number,))
    memory.handle = handle
    return torch.frombuffer(memory, dtype=torch.int64)


@uncompiled
def handle_of(token: Tensor) -> Any:
    """The handle for which a token stands."""
    return _memories[int(token[0])].handle


class InGraph:
    """A handle in a compiled graph, where a token stands for it. Outside of the graph it has all that the handle has."""

    _token: Tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_token":
            raise AttributeError(name)
        found = vars(handle_of(self._token))
        if name not in found:
            raise AttributeError(name)
        vars(self).update(found)
        return found[name]


def plain(x: Any) -> Any:
    """A tensor without its gradients, which buffers do not have."""
    return x.detach() if isinstance(x, Tensor) and x.requires_grad else x


def given(**rare: Any) -> dict[str, Any]:
    """The arguments that say anything."""
    return {name: value for name, value in rare.items() if value is not None and value is not False}
