"""Kernels of one's own on GPUs: the all-gather of examples/kernels, compiled by nvcc."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import switchyard as sw

torch = pytest.importorskip("torch")

SOURCE = Path(__file__).resolve().parents[3] / "examples" / "kernels" / "all_gather.cu"


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc")
    if nvcc is None or not SOURCE.exists():
        pytest.skip("needs nvcc and the sources")
    made = tmp_path_factory.mktemp("kernels") / "all_gather.cubin"
    header = Path(sw.__file__).resolve().parent
    command = [nvcc, "-std=c++17", "-O3", "-cubin", "-arch=native", f"-I{header}", "-o", str(made), str(SOURCE)]
    subprocess.run(command, check=True)
    return made.read_bytes()


def gathers(rank, size, image):
    """Launches of many sizes on the current stream, on another one, and in a graph."""
    world = sw.DeviceCommunicator(signals=32)
    kernel = world.load(image, "all_gather")
    out = sw.empty(size, 1 << 16, dtype=torch.int64, device="cuda")
    torch.distributed.barrier()
    side = torch.cuda.Stream()
    for turn, count in enumerate([1, 77, 1 << 16, 5000]):
        x = torch.arange(count, device="cuda") * size + rank
        torch.cuda.synchronize()
        kernel(1 + turn * 5, 256, world, out, x, count, stream=side if turn % 2 else None)
        sw.synchronize()
        want = torch.arange(count, device="cuda") * size
        for src in range(size):
            assert torch.equal(out.view(-1)[src * count : (src + 1) * count], want + src), (turn, src)
    x = torch.zeros(1 << 16, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(8, 512, world, out, x, x.numel())
    for step in range(100):
        x.fill_(step * size + rank)
        graph.replay()
    sw.synchronize()
    assert out[:, -1].tolist() == [99 * size + r for r in range(size)]
    del graph
    with pytest.raises(ValueError, match="run at the same time"):
        kernel(1 << 20, 256, world, out, x, 1)
    with pytest.raises(TypeError, match=r"a kernel's argument is 1\.5, want an integer of 64 bits or a tensor"):
        kernel(1, 256, world, 1.5)
    kernel(1, 256, world, out, x, 1)
    sw.synchronize()
    sw.free(out)


def test_a_kernel_gathers(cuda, image):
    cuda.run(gathers, image)
