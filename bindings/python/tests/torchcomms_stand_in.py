"""What a backend in Python sees of torchcomms, for machines without it: how it is found, made and called.

A front end passes the backend's arguments by their places, drops the options of single calls, and refuses batches of
messages. Where a call of the backend returns nothing it is over, else its work is waited for.
"""

from __future__ import annotations

import enum
from datetime import timedelta
from importlib.metadata import entry_points
from typing import Any

RedOpType = enum.Enum("RedOpType", ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM", "AVG"])


class ReduceOp:
    def __init__(self, kind: RedOpType) -> None:
        self.type = kind

    @staticmethod
    def PREMUL_SUM(factor: Any) -> ReduceOp:
        return ReduceOp(RedOpType.PREMUL_SUM)


for _kind in RedOpType:
    if _kind is not RedOpType.PREMUL_SUM:
        setattr(ReduceOp, _kind.name, ReduceOp(_kind))


class CommOptions:
    def __init__(self, timeout: timedelta | None = None, store: Any = None, hints: dict[str, str] | None = None) -> None:
        self.abort_process_on_timeout_or_error, self.enable_reconfigure = True, False
        self.timeout, self.store, self.hints = timeout or timedelta(seconds=600), store, dict(hints or {})


class TorchCommBackend:
    def __init__(self) -> None:
        pass


_backends: dict[str, Any] = {}


def register_backend(name: str, backend_class: Any) -> None:
    _backends.setdefault(name, backend_class)


class TorchWork:
    def __init__(self, inner: Any) -> None:
        self._inner, self._over = inner, inner is None

    def wait(self) -> None:
        if self._inner is not None:
            self._inner.wait()
        self._over = True

    def is_completed(self) -> bool:
        return self._over


class TorchComm:
    def __init__(self, impl: TorchCommBackend) -> None:
        self._impl: Any = impl

    def get_backend_impl(self) -> Any:
        return self._impl

    def get_rank(self) -> int:
        return self._impl.get_rank()

    def get_size(self) -> int:
        return self._impl.get_size()

    def get_name(self) -> str:
        return self._impl.get_comm_name()

    def get_backend(self) -> str:
        return self._impl.get_backend_name()

    def finalize(self) -> None:
        self._impl.finalize()

    def split(
        self, ranks: list[int], name: str, hints: dict[str, str] | None = None, timeout: timedelta | None = None
    ) -> TorchComm | None:
        impl = self._impl.split(ranks, name, CommOptions(timeout, None, hints))
        return None if impl is None else TorchComm(impl)

    def gather_single(self, output: Any, input: Any, root: int, async_op: bool, **_: Any) -> TorchWork:
        parts = list(output.chunk(self.get_size(), 0)) if self.get_rank() == root else []
        return self.gather(parts, input, root, async_op)


def _call(name: str) -> Any:
    def call(self: TorchComm, *arguments: Any, hints: dict[str, str] | None = None, timeout: Any = None) -> TorchWork:
        return TorchWork(getattr(self._impl, name)(*arguments))

    call.__name__ = name
    return call


for _name in (
    "send", "recv", "broadcast", "all_reduce", "reduce", "all_gather", "all_gather_v", "all_gather_single", "reduce_scatter",
    "reduce_scatter_v", "reduce_scatter_single", "all_to_all_single", "all_to_all_v_single", "all_to_all", "barrier",
    "scatter", "gather",
):  # fmt: skip
    setattr(TorchComm, _name, _call(_name))


def _load_backend(backend: str) -> None:
    found = [point for point in entry_points(group="torchcomms.backends") if point.name == backend]
    if not found:
        raise ModuleNotFoundError(f"no entry point of torchcomms.backends is called {backend}")
    found[0].load()


def new_comm(
    backend: str, device: Any, name: str, timeout: timedelta | None = None, store: Any = None, hints: Any = None, **_: Any
) -> TorchComm:
    if backend not in _backends:
        _load_backend(backend)
    impl = _backends[backend]()
    impl.init(device, name, CommOptions(timeout, store, hints))
    return TorchComm(impl)
