"""What tests of CUDA tensors have in common. Expectations are NCCL's on the same tensors; where ranks have to share a GPU,
which NCCL refuses, gloo's on copies."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import test_torch_calls as host
from world import free_port

import switchyard as sw

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

CUDA = "cuda"


def reference(output: torch.Tensor, input: torch.Tensor, *arguments, group=None) -> None:
    """torch's all_to_all_single of CUDA tensors, of bytes where its backend does not know the type."""
    if str(output.dtype).removeprefix("torch.") in host.NOT_GLOO:
        output, input = output.view(torch.uint8), input.view(torch.uint8)
    if dist.get_backend() == "nccl":
        dist.all_to_all_single(output, input, *arguments, group=group)
        return
    out = output.cpu()
    dist.all_to_all_single(out, input.cpu(), *arguments, group=group)
    output.copy_(out)


def values(rank, n, shape, dtype, poison=False):
    return host.values(rank, n, shape, dtype, poison).cuda()


def ready():
    """All ranks are here and their GPUs have done everything: whoever is late now does not hold a GPU for all."""
    sw.barrier()


def run(code: str, size: int = 2, **environment: str) -> list[subprocess.Popen]:
    port = free_port()
    environment = {**os.environ, "WORLD_SIZE": str(size), "SWITCHYARD_PORT": str(port), **environment}
    return [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)],
            env={**environment, "RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for r in range(size)
    ]  # fmt: skip


def end(process: subprocess.Popen, timeout: float = 60, code: int = 0) -> None:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"did not end within {timeout} s\n{out}\n{err}")
    assert process.returncode == code, f"{process.returncode}\n{out}\n{err}"

START = """
    import os, sys, time
    import torch
    import switchyard as sw
    comm = sw.init(timeout={timeout})
    torch.cuda.set_device(comm.rank % torch.cuda.device_count())
    x, y = torch.ones(2000, device="cuda"), torch.empty(2000, device="cuda")
    sw.all_to_all_single(y, x)
    torch.cuda.synchronize()
    sw.barrier()
"""
