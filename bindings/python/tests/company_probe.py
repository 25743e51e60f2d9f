"""What a process runs that has other libraries in it: python company_probe.py before|after MODULE...

It imports them before this package or after, uses the package before and after, and ends with an error where results are
wrong or where something of the process's has been changed that this package does not own. "hostile" stands for a library
that sets the types of every function of the interpreter that this package calls.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import signal
import sys
import threading
import warnings

import numpy as np

#: Functions of the interpreter that this package calls.
FUNCTIONS = ("PyCapsule_New", "PyCapsule_GetPointer", "PyCapsule_GetName", "PyObject_GetBuffer", "PyBuffer_Release")
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)


def hostile() -> None:
    for name in FUNCTIONS:
        function = getattr(ctypes.pythonapi, name)
        function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_int8]


def load(module: str) -> None:
    hostile() if module == "hostile" else importlib.import_module(module)


def state() -> dict[str, object]:
    """What belongs to the whole process."""
    found: dict[str, object] = {
        "functions": [
            (name, function.restype, function.argtypes)
            for name in FUNCTIONS
            for function in [getattr(ctypes.pythonapi, name)]
        ],
        "environment": dict(os.environ),
        "handlers": [signal.getsignal(number) for number in HANDLED],
        "filters": list(warnings.filters),
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.getswitchinterval()),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = (
            torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(), torch.random.initial_seed(),
        )  # fmt: skip
        if torch.cuda.is_available():
            found["cuda"] = (torch.cuda.current_device(), torch.cuda.current_stream())
    return found


class Dlpack:
    """An array with DLPack and nothing else."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __dlpack__(self, **named: object) -> object:
        return self.inner.__dlpack__(**named)  # type: ignore[attr-defined]

    def __dlpack_device__(self) -> object:
        return self.inner.__dlpack_device__()  # type: ignore[attr-defined]


def use(comm: object) -> None:
    """Every way in which memory goes to the library and comes back."""
    from array import array

    import switchyard as sw

    for make in (lambda x: x, Dlpack, lambda x: array("f", x)):
        x, y = make(np.arange(4, dtype="f4")), np.zeros(4, "f4")
        sw.all_to_all_single(y, x, group=comm)
        assert y.tolist() == [0, 1, 2, 3]
    place = sw.empty(4, dtype="f4", group=comm)
    place.fill(2)
    sw.all_reduce(place, group=comm)
    assert place.tolist() == [2] * 4
    sw.free(place)
    x, idx, weights = np.arange(24, dtype="f4").reshape(3, 8), [[0, 1]] * 3, np.ones((3, 2), "f4")
    d = sw.Dispatcher(4, 2, 8, group=comm, device="cpu")
    got = d.dispatch(x, idx, weights)
    assert d.combine(got.rows, got).tolist() == (2 * x).tolist()
    torch = sys.modules.get("torch")
    if torch is None:
        return
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        place = sw.empty(4, dtype=torch.float32, group=comm, device=device)
        place.fill_(2)
        sw.all_reduce(place, group=comm)
        assert place.tolist() == [2] * 4
        sw.free(place)
        d = sw.Dispatcher(4, 2, 8, group=comm, device=device)
        tokens = torch.from_numpy(x).to(device).requires_grad_()
        got = d.dispatch(tokens, torch.tensor(idx, device=device), torch.ones(3, 2, device=device))
        y = d.combine(got.rows, got)
        assert torch.equal(y, 2 * tokens)
        y.sum().backward()
        assert torch.equal(tokens.grad, torch.full_like(tokens, 2))


def main(order: str, modules: list[str]) -> None:
    if order == "before":
        for module in modules:
            load(module)
    elif importlib.util.find_spec("torch") is not None and modules != ["hostile"]:
        import torch  # noqa: F401
    for name in FUNCTIONS:
        getattr(ctypes.pythonapi, name)  # of which there is one object from here on
    was = state()
    import switchyard as sw

    comm = sw.init(0, 1)
    use(comm)
    if order == "after":
        now = state()
        assert now == was, {name: (was[name], now[name]) for name in was if was[name] != now[name]}
        for module in modules:
            load(module)
        was = state()
        use(comm)
    now = state()
    assert now == was, {name: (was[name], now[name]) for name in was if was[name] != now[name]}
    sw.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
