"""Symmetric tensors and pools on GPUs, and what is given back."""

from __future__ import annotations

import ctypes
import gc

import pytest
import world
from cuda_rig import CUDA, end, ready, run

import switchyard as sw
from switchyard import errors
from switchyard._core import native

torch = pytest.importorskip("torch")


def symmetric(rank, size):
    n = 100_000
    y = sw.empty(size, n, device=CUDA)
    assert y.is_cuda
    assert y.dtype is torch.float32
    z = sw.empty((2, 3), dtype=torch.bfloat16, device=torch.device(CUDA, torch.cuda.current_device()))
    assert z.shape == (2, 3)
    z.fill_(2)
    assert z.sum().item() == 12
    assert sw.empty(0, 5, device=CUDA).shape == (0, 5)
    x = torch.empty(size, n, device=CUDA)
    assert "output in place" in sw.explain(y, x)
    assert "output in place" not in sw.explain(torch.empty_like(x), x)
    for k in range(3):
        x.fill_(rank + k)
        y.fill_(-1)
        ready()
        sw.all_to_all_single(y, x)
        assert y[:, 7].tolist() == [p + k for p in range(size)]
        # A view, somewhere inside, of both.
        part, source = y.view(-1)[5 : 5 + 1000 * size], x.view(-1)[3 : 3 + 1000 * size].fill_(10 + rank)
        ready()
        sw.all_to_all_single(part, source)
        assert part.view(size, 1000)[:, 999].tolist() == [10 + p for p in range(size)]
    sw.verify()
    big = sw.empty(200 << 20, dtype=torch.uint8, device=CUDA)  # more than the heap had
    big.zero_()
    sw.verify()
    for t in (z, big, y):
        sw.free(t)
    with pytest.raises(errors.Freed):
        sw.free(y)
    with pytest.raises(errors.Freed):
        sw.all_to_all_single(y, x)
    again = sw.empty(size, n, device=CUDA)
    assert again.data_ptr() == y.data_ptr()
    sw.free(again)
    sw.verify()
    if rank == 0:
        sw.empty(3, device=CUDA)
    with pytest.raises(errors.Diverged, match="alloc of 12 bytes"):
        sw.verify()


def test_symmetric_tensors(worlds):
    # It leaves a group behind whose ranks have diverged.
    w = world.World(2, world.cuda_plain, "")
    try:
        w.run(symmetric)
    finally:
        w.close()


def takes_and_gives(device):
    """A pool as torch calls it."""
    number = sw.communicator()._gpu(device).pool(8 << 20, 0)
    lib = ctypes.CDLL(native.path())
    take, give = getattr(lib, f"switchyard_pool_alloc_{number}"), getattr(lib, f"switchyard_pool_free_{number}")
    take.restype, take.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    give.restype, give.argtypes = None, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    half = 4 << 20
    first, second = take(half, device, None), take(half, device, None)
    assert abs(first - second) == half
    assert first % 512 == 0
    assert take(1, device, None) is None
    give(first, half, device, None)
    assert take(half, device + 1, None) is None
    assert take(half, device, None) == first


def pooled(rank, size):
    n = 300_000
    pool = sw.mem_pool(64 << 20)
    with torch.cuda.use_mem_pool(pool):
        if rank % 2:  # the ranks' pools need not look alike
            odd = torch.empty(3_000_001, device=CUDA, dtype=torch.uint8)
        y = torch.empty(size, n, device=CUDA)
    outside = torch.empty(size, n, device=CUDA)
    x = torch.empty(size, n, device=CUDA)
    assert "output in place" in sw.explain(y, x)
    assert "output in place" not in sw.explain(outside, x)
    for k in range(3):
        x.fill_(rank + k)
        for out in (y, outside):
            out.fill_(-1)
            ready()
            sw.all_to_all_single(out, x)
            assert out[:, 5].tolist() == [p + k for p in range(size)]
            assert out[:, -1].tolist() == [p + k for p in range(size)]
    sw.verify()  # of what the ranks do by themselves nothing is compared
    # Tensors come and go; their memory is used again.
    address = y.data_ptr()
    del y
    with torch.cuda.use_mem_pool(pool):
        again = torch.empty(size, n, device=CUDA)
        assert again.data_ptr() == address
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(100 << 20, device=CUDA, dtype=torch.uint8)
    x.fill_(rank + 50)
    ready()
    sw.all_to_all_single(again, x)
    assert again[:, 0].tolist() == [p + 50 for p in range(size)]
    if rank % 2:
        del odd
    del again, pool  # which gives back what it had taken
    gc.collect()
    torch.cuda.empty_cache()
    # What torch calls for that.
    for _ in range(2):
        odd = sw.empty(1, device=CUDA)  # the heap's buffers begin at multiples of 256
        takes_and_gives(torch.cuda.current_device())
        sw.free(odd)
    ready()


def test_mem_pool(cuda):
    cuda.run(pooled)


def test_the_heap_has_the_size_that_is_asked_for():
    code = """
    import os, sys
    import torch
    import switchyard as sw
    sw.init(timeout=20)
    torch.cuda.set_device(0)
    try:
        sw.communicator(device="cuda")
    except {error} as err:
        assert {text!r} in str(err), err
    else:
        sw.all_to_all_single(torch.empty(2, device="cuda"), torch.empty(2, device="cuda"))
        torch.cuda.synchronize()
    """
    for size, error, text in (("1G", "()", ""), ("1M", "()", ""), ("900G", "sw.errors.OutOfMemory", "memory"),
                              ("much", "sw.errors.InvalidArgument", "SWITCHYARD_CUDA_HEAP is")):  # fmt: skip
        processes = run(code.format(error=error, text=text), size=1, SWITCHYARD_CUDA_HEAP=size)
        for process in processes:
            end(process)


def test_handles_and_memory_are_given_back():
    code = """
    import gc, os
    import torch
    import switchyard as sw
    from switchyard._core import native
    os.environ["SWITCHYARD_CUDA_HEAP"] = "64M"
    torch.ones(1, device="cuda")

    def once():
        with sw.init(0, 1, default=False) as comm:
            y = sw.empty(1000, device="cuda", group=comm)
            sw.all_to_all_single(y, torch.ones(1000, device="cuda"), group=comm)
            sw.synchronize(comm)
            assert y.sum().item() == 1000
            sw.free(y)
            sw.verify(comm)

    once()
    gc.collect()
    live, fds, free = native.library().live(), len(os.listdir("/proc/self/fd")), torch.cuda.mem_get_info()[0]
    for _ in range(5):
        once()
    gc.collect()
    assert native.library().live() <= live, (native.library().live(), live)
    assert len(os.listdir("/proc/self/fd")) <= fds + 2
    assert torch.cuda.mem_get_info()[0] >= free - (16 << 20), (free, torch.cuda.mem_get_info())
    """
    (process,) = run(code, size=1)
    end(process)
