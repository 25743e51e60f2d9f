"""An all-gather of one's own in Triton, on GPUs, a rank each: eagerly, in a CUDA graph, and with a rank that does not come.

    torchrun --nproc-per-node 2 examples/kernels/all_gather_triton.py
"""

from datetime import timedelta

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import switchyard
import switchyard.triton as st


@triton.jit
def all_gather(world, out, x, count, BLOCK: tl.constexpr):
    """Every rank writes its part into the outputs of all others. out is symmetric memory."""
    call = st.begin(world)
    begins = 2 * tl.program_id(0)  # signals of this program and of its like on other ranks
    written = begins + 1
    for i in range(call.size):
        st.signal(call, i, begins)  # what lies in my output has been used
    part = out + call.rank.to(tl.int64) * count
    for i in range(call.size):
        peer = (call.rank + i) % call.size
        call = st.wait(call, peer, begins)
        for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
            k = first + tl.arange(0, BLOCK)
            st.put(call, peer, part + k, tl.load(x + k, mask=k < count), mask=k < count)
        st.signal(call, peer, written)
    for i in range(call.size):
        call = st.wait(call, i, written)


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = dist.new_group(timeout=timedelta(seconds=5))  # of a wait
    world = switchyard.DeviceCommunicator(group)
    out = switchyard.empty(size, 1 << 16, dtype=torch.int64, device="cuda", group=group)  # symmetric memory
    x = torch.full((1 << 16,), rank, device="cuda")

    arguments = world.argument, out, x, x.numel()
    options = {"BLOCK": 1024, "launch_cooperative_grid": True}  # all programs run at the same time
    all_gather.warmup(*arguments, **options, grid=(16,))
    dist.barrier()  # and no rank waits for one that compiles

    all_gather[(16,)](*arguments, **options)
    switchyard.synchronize(group)  # and raises what went wrong
    assert out[:, -1].tolist() == list(range(size))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_gather[(16,)](*arguments, **options)
    for step in range(1000):
        x.fill_(step * size + rank)
        graph.replay()
    switchyard.synchronize(group)
    assert out[:, -1].tolist() == [999 * size + r for r in range(size)]
    print(f"rank {rank} has the parts of all {size}", flush=True)

    if rank > 0:  # rank 0 does not come
        all_gather[(16,)](*arguments, **options)
        try:
            switchyard.synchronize(group)
        except switchyard.errors.TimedOut as err:
            print(f"rank {rank}: rank {err.rank} did not come: {err}", flush=True)
    del graph
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
