"""Ranks for tests: processes that live as long as the test session and run what they are told."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import random
import socket
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import switchyard as sw


def free_port() -> int:
    """A port below those that the system gives to connections, so that none of them has it before it is used."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("", port))
            return port


def hears_of(call: Callable[[], Any], words: str) -> bool:
    """Whether the call fails since ranks disagree. Then the error has these words."""
    try:
        call()
    except sw.errors.Mismatch as err:
        if words not in str(err):
            raise
        return True
    return False


def _serve(pipe: Any, rank: int, size: int, env: dict[str, str], setup: str, arguments: tuple[Any, ...]) -> None:
    os.environ.update(env, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    try:
        _find(setup)(rank, size, *arguments)
        pipe.send(("ready", None))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        return
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        if name is None:
            return
        try:
            pipe.send(("done", _find(name)(rank, size, *arguments)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))


def _find(name: str) -> Callable[..., Any]:
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


#: Seconds after which a rank that says nothing is taken for one that hangs. On two cores, beside four busy loops and another
#: suite, tests that take 8 s have taken more than 120.
HANGS = 600


class World:
    """size processes; run has each of them call function(rank, size, *arguments)."""

    def __init__(self, size: int, setup: Callable[..., Any], *arguments: Any, env: dict[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.size, self.broken = size, False
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", **(env or {})}
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what deterministic algorithms need on a GPU
        env["SWITCHYARD_PORT"] = str(free_port())
        self.pipes, self.processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, env, _name(setup), arguments), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        self._collect("setup", HANGS)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = HANGS) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((_name(function), arguments))
        return self._collect(function.__qualname__, timeout)

    def _collect(self, what: str, timeout: float) -> list[Any]:
        results, failures = [], []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout):
                failures.append(f"rank {rank} did not answer within {timeout} s")
                timeout = min(timeout, 1)  # the others may have said why
                continue
            try:
                state, value = pipe.recv()
            except EOFError:
                failures.append(f"rank {rank} has ended")
                continue
            results.append(value)
            if state == "failed":
                failures.append(f"rank {rank}:\n{value}")
                timeout = min(timeout, 10)  # the others may wait for it
        if failures:
            self.broken = True
            raise AssertionError(f"{what}: " + "\n".join(failures))
        return results

    def leave(self) -> None:
        """Have the processes end."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send((None, ()))

    def close(self) -> None:
        self.leave()
        for process in self.processes:
            process.join(1 if self.broken else 10)
            if process.is_alive():
                process.kill()
                process.join()


#: Processes of worlds that are kept. A process that has imported torch takes some 600 MB.
KEPT = 8


class Worlds:
    """Worlds by what they were set up with; a broken one is replaced, and those that were not used for longest end first."""

    def __init__(self) -> None:
        self.known: dict[Any, World] = {}  # the last one used is the last one

    def get(self, size: int, setup: Callable[..., Any]) -> World:
        key = (size, _name(setup))
        world = self.known.pop(key, None)
        if world is not None and world.broken:
            world.close()
            world = None
        if world is None:
            while self.known and size + sum(w.size for w in self.known.values()) > KEPT:
                self.known.pop(next(iter(self.known))).close()
            world = World(size, setup, tempfile.mktemp(prefix="switchyard-test-store-"))
        self.known[key] = world
        return world

    def close(self) -> None:
        for world in self.known.values():
            world.leave()  # all at the same time
        for world in self.known.values():
            world.close()


# Setups


def plain(rank: int, size: int, store: str) -> None:
    """Switchyard alone."""
    import switchyard

    switchyard.init(timeout=60)


def gloo(rank: int, size: int, store: str) -> None:
    """torch with gloo; Switchyard meets through its store."""
    _torch("gloo", rank, size, store)


def two_hosts(rank: int, size: int, store: str) -> None:
    """The same with ranks that are in turn on two hosts."""
    os.environ["SWITCHYARD_HOSTID"] = f"host {rank % 2}"
    gloo(rank, size, store)


def backend(rank: int, size: int, store: str) -> None:
    """torch with Switchyard as its backend."""
    _torch("switchyard", rank, size, store)


def cuda(rank: int, size: int, store: str) -> None:
    """torch with a GPU for each rank and NCCL, or GPUs that ranks share and gloo, since NCCL refuses that."""
    _torch("nccl" if _take_gpu(rank) >= size else "gloo", rank, size, store)


def cuda_backend(rank: int, size: int, store: str) -> None:
    """torch with GPUs and Switchyard as its backend."""
    importlib.import_module("switchyard.torch")  # its name is known without that where the package is installed
    _take_gpu(rank)
    _torch("switchyard", rank, size, store)


def cuda_plain(rank: int, size: int, store: str) -> None:
    """torch with GPUs and Switchyard, without process groups."""
    import switchyard

    _take_gpu(rank)
    switchyard.init(timeout=60)


def _take_gpu(rank: int) -> int:
    import torch

    gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % gpus)
    return gpus


def _torch(backend: str, rank: int, size: int, store: str) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        backend, store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
