"""Kernels of one's own in Triton on GPUs: the all-gather of examples/kernels."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_rig import START, end, run

import switchyard as sw

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "kernels" / "all_gather_triton.py"
pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="needs the examples")


def example():
    """The example's module."""
    spec = importlib.util.spec_from_file_location("all_gather_triton", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gathers(rank, size):
    """Launches of many sizes and shapes on the current stream, on another one, and in a graph; and of many programs."""
    kernel, world = example().all_gather, sw.DeviceCommunicator(signals=64)
    out = sw.empty(size, 1 << 16, dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()
    for turn, count in enumerate([1, 77, 1 << 16, 5000]):
        x = torch.arange(count, device="cuda") * size + rank
        options = {"BLOCK": 128 << turn, "num_warps": 1 << turn, "launch_cooperative_grid": True}
        kernel.warmup(world.argument, out, x, count, **options, grid=(1,))
        torch.cuda.synchronize()
        torch.distributed.barrier()
        with torch.cuda.stream(side if turn % 2 else torch.cuda.current_stream()):
            for _ in range(3):
                kernel[(1 + turn * 5,)](world.argument, out, x, count, **options)
        sw.synchronize()
        want = torch.arange(count, device="cuda") * size
        for src in range(size):
            assert torch.equal(out.view(-1)[src * count : (src + 1) * count], want + src), (turn, src)
    x = torch.zeros(1 << 16, dtype=torch.int64, device="cuda")
    options = {"BLOCK": 1024, "num_warps": 8, "launch_cooperative_grid": True}
    kernel[(8,)](world.argument, out, x, x.numel(), **options)
    sw.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel[(8,)](world.argument, out, x, x.numel(), **options)
    for step in range(1000):
        x.fill_(step * size + rank)
        graph.replay()
    sw.synchronize()
    for src in range(size):
        assert torch.equal(out[src], torch.full_like(x, 999 * size + src)), src
    del graph
    with pytest.raises(RuntimeError, match="in cooperative launch"):
        kernel[(1 << 16,)](world.argument, out, x, x.numel(), **options)
    kernel[(8,)](world.argument, out, x, x.numel(), **options)
    sw.synchronize()
    sw.free(out)


def test_a_kernel_gathers(cuda):
    cuda.run(gathers)


#: A rank in a process of its own, which compiles the kernel before it meets others.
FAULT = f"""
    import os, sys, torch
    sys.path.insert(0, {os.fspath(EXAMPLE.parent)!r})
    from all_gather_triton import all_gather
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    x = torch.ones(2000, device="cuda")
    all_gather.warmup(1 << 40, x, x, x.numel(), BLOCK=256, grid=(4,))
""" + START + """
    world, out = sw.DeviceCommunicator(), sw.empty(4000, dtype=torch.float32, device="cuda")
    launch = lambda: all_gather[(4,)](world.argument, out, x, x.numel(), BLOCK=256)
    launch()
    sw.synchronize()
    assert out.tolist() == [1] * 4000
    began = time.monotonic()
"""


def test_a_rank_that_does_not_come_is_named():
    code = FAULT.replace("{timeout}", "5") + """
    if comm.rank == 1:
        time.sleep(15)
        os._exit(0)
    out.zero_()
    x.fill_(2)
    launch()
    try:
        sw.synchronize()
    except sw.errors.TimedOut as err:
        assert err.rank == 1, err
        assert time.monotonic() - began > 4
    else:
        sys.exit("no error")
    assert out.tolist() == [2] * 2000 + [0] * 2000, "the rank's own part alone is there"
    out.zero_()
    launch()  # does nothing
    torch.cuda.synchronize()
    assert not out.any()
    os._exit(0)
    """
    for process in run(code):
        end(process)


def test_a_lost_rank_ends_a_wait():
    code = FAULT.replace("{timeout}", "120") + """
    if comm.rank == 1:
        os.kill(os.getpid(), 9)
    launch()
    try:
        sw.synchronize()
    except sw.errors.PeerLost as err:
        assert err.rank == 1, err
    else:
        sys.exit("no error")
    assert time.monotonic() - began < 60
    """
    first, second = run(code)
    end(first)
    end(second, code=-9)


def test_a_kernel_of_another_version_is_refused(tmp_path):
    (tmp_path / "of_version_9.py").write_text(
        "import triton\nimport triton.language as tl\nimport switchyard.triton as st\n\n\n"
        "@triton.jit\ndef kernel(world, out):\n    tl.store(out, st.begin(world, 9).number)\n"
    )
    code = FAULT.replace("{timeout}", "60") + f"""
    sys.path.insert(0, {os.fspath(tmp_path)!r})
    from of_version_9 import kernel
    seen = torch.full((1,), 7, device="cuda")
    kernel[(1,)](world.argument, seen)
    try:
        sw.synchronize()
    except sw.errors.Mismatch as err:
        assert "version 9 of switchyard.cuh, this library has version 1" in str(err), err
    else:
        sys.exit("no error")
    assert seen.tolist() == [0]
    x.fill_(3)
    launch()
    sw.synchronize()
    assert out.tolist() == [3] * 4000
    sw.barrier()
    """
    for process in run(code):
        end(process)


def test_the_example_runs():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("rank 0 has the parts of all 2", "rank 1 has the parts of all 2", "rank 1: rank 0 did not come: "):
        assert line in done.stdout, done.stdout + done.stderr
