"""Runs one of DeepEP's own test programs, unmodified: python peer.py FOLDER PROGRAM RANKS [--cases FIRST:END] ARGUMENTS...

FOLDER is a checkout of DeepEP 2.1, of which tests/PROGRAM runs and deep_ep/utils is imported. RANKS processes are made here.
--cases runs a part of the cases of elastic/test_ep.py, so that each of several short runs has some of them. Timers do not
measure: they look for kernels of DeepEP. Without a GPU for each rank the device "cuda" becomes the host and NCCL becomes gloo.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import sys
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from world import free_port

BY_BYTES = (torch.Tensor.__getitem__, torch.Tensor.eq, torch.Tensor.__eq__, torch.equal, dist.all_to_all_single)


class OnHost(torch.overrides.TorchFunctionMode):
    """Tensors that are asked for on "cuda" are made on the host, which moves and compares those of float8 as bytes."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.randn and args and args[0] == (8192, 8192):  # which shall take a GPU's time
            args = ((64, 64),)
        if function in BY_BYTES and is_float8(args[0]):
            made = function(*(x.view(torch.uint8) if is_float8(x) else x for x in args), **kwargs)
            return made.view(torch.float8_e4m3fn) if function is torch.Tensor.__getitem__ else made
        return function(*args, **kwargs)


def is_float8(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype is torch.float8_e4m3fn


def prepare(folder: Path) -> None:
    """What the programs import from DeepEP apart from what is here."""
    import deep_ep
    import deep_ep.utils

    stub = types.ModuleType("deep_ep._C")
    stub.EventHandle = deep_ep.EventHandle  # type: ignore[attr-defined]
    sys.modules["deep_ep._C"] = stub
    deep_ep.utils.__path__.append(str(folder / "deep_ep" / "utils"))
    from deep_ep.utils import testing

    def once(function: Any, *_: Any, **__: Any) -> tuple[float, float, float]:
        function()
        return 1.0, 1.0, 1.0

    def each(function: Any, kernel_names: Any, *_: Any, num_kernels_per_period: int = 1, **__: Any) -> Any:
        function()
        one = [1.0] * num_kernels_per_period if num_kernels_per_period > 1 else 1.0
        return one if isinstance(kernel_names, str) else [one] * len(kernel_names)

    testing.bench, testing.bench_kineto = once, each


def on_host() -> None:
    """What the programs ask of a GPU, and of NCCL, for the host and for gloo."""
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.set_device = lambda *_: None
    torch.set_default_device = lambda *_: None
    begin, gather = dist.init_process_group, dist.all_gather_into_tensor
    dist.all_gather_into_tensor = lambda out, x, group=None: gather(out.flatten(0, 1), x, group=group)  # as gloo wants it

    def by_gloo(backend: str, init_method: str, world_size: int, rank: int, device_id: Any = None) -> None:
        begin("gloo", init_method=init_method, world_size=world_size, rank=rank, timeout=timedelta(seconds=120))

    by_gloo.__signature__ = inspect.signature(by_gloo)  # type: ignore[attr-defined]
    dist.init_process_group = by_gloo


def execute(path: Path, cases: str) -> None:
    """Run a program, of whose cases those of a range FIRST:END are made."""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    program = ast.parse(path.read_text()).body
    exec(compile(ast.Module(program[:-1], []), str(path), "exec"), names)
    if cases:
        modes, bounds = names["enumerate_ep_modes"], [int(n) for n in cases.split(":")]
        names["enumerate_ep_modes"] = lambda: itertools.islice(modes(), *bounds)
    exec(compile(ast.Module(program[-1:], []), str(path), "exec"), names)  # which calls what the others define


def rank_of(rank: int, folder: str, program: str, ranks: int, cases: str, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    prepare(Path(folder))
    path = Path(folder) / "tests" / program
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), "--num-processes", str(ranks), *arguments]
    # Each process runs the program, whose spawn calls the function for this process's rank alone.
    torch.multiprocessing.spawn = lambda function, args, nprocs: function(rank, *args)
    if torch.cuda.device_count() >= ranks:
        execute(path, cases)
        return
    on_host()
    with OnHost():
        execute(path, cases)


def main(folder: str, program: str, ranks: int, arguments: list[str]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), OMP_NUM_THREADS="1")
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    cases = ""
    if arguments[:1] == ["--cases"]:
        cases, arguments = arguments[1], arguments[2:]
    torch.multiprocessing.spawn(rank_of, args=(folder, program, ranks, cases, arguments), nprocs=ranks)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
