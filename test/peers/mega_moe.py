"""DeepGEMM's fused layer, MegaMoE, in turn with the layers of bindings/python/bench_layers.py, in float8 on GPUs of one host.

    TORCH_SYMM_MEM_DISABLE_MULTICAST=1 python test/peers/mega_moe.py forward --shape flash --tokens 8,128,4096

It takes the arguments of bench_layers.py, whose matrices and tokens are MegaMoE's too. Rows have a column MegaMoE, and say by
how much of the norm its results differ. It needs deep_gemm (sgl-deep-gemm) with a kernel for the GPU, and compiles that at the
first call of each size.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings" / "python"))

import bench_layers as bench
import torch
import torch.distributed as dist
from torch import Tensor

#: The most tokens of a rank.
MOST = 8192


class MegaMoE:
    """The layer of a shape, with copies of this rank's matrices as it wants them."""

    def __init__(self, shape: str, weights: bench.Weights) -> None:
        import deep_gemm

        self.call = deep_gemm.fp8_mega_moe
        self.bounded = "num_tokens_bound" in inspect.signature(self.call).parameters
        self.hidden, inner, count, top_k = bench.SHAPES[shape]
        self.room = deep_gemm.get_symm_buffer_for_mega_moe(dist.group.WORLD, count, MOST, top_k, self.hidden, inner)
        self.matrices = deep_gemm.transform_weights_for_mega_moe_sm90(*zip(weights.matrices, weights.scales))

    def __call__(self, x: Tensor, scales: Tensor, idx: Tensor, share: Tensor) -> Callable[[], Tensor]:
        """Take the tokens, and make calls of them. A call begins with them in its buffer."""
        n, room = len(x), self.room
        for to, given in ((room.x, x), (room.x_sf, scales), (room.topk_idx, idx), (room.topk_weights, share)):
            to[:n].copy_(given)
        y = torch.empty(n, self.hidden, dtype=torch.bfloat16, device="cuda")
        bound = {"num_tokens_bound": n} if self.bounded else {}
        torch.cuda.synchronize()
        bench.together()

        def call() -> Tensor:
            self.call(y, *self.matrices, room, **bound)
            return y

        return call


def worker(*arguments: Any) -> None:
    bench.PEERS["MegaMoE"] = MegaMoE
    bench.worker(*arguments)


if __name__ == "__main__":
    bench.main(worker)
