"""Trains a small GPT of Megatron-Core with the flex dispatcher over deep_ep, and beside it the same with alltoall:

    python -m torch.distributed.run --standalone --nproc-per-node 2 train.py [--steps 50] [--dtype float32] [--layers 2] ...

Both have the same weights and the same tokens at first, and go one step each in turn. Rank 0 prints the losses of each step,
the largest difference and the time of a step of each. The program fails where a difference is larger than --most. Without
a GPU for each rank everything is on the CPU, with gloo, and what Megatron asks of CUDA is replaced: the current device,
streams, and lengths that it would copy from the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import statistics
import sys
import time
import warnings
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist

DISPATCHERS = {"flex": "deep_ep", "alltoall": "alltoall"}
EXPERTS, TOP_K, BATCHES = 8, 2, 8


def on_cpu() -> None:
    """What Megatron asks of CUDA, for the host. A stream is the same one always, so there is nothing to wait for."""
    stream = mock.MagicMock()
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.Stream = lambda *_, **__: stream  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda *_: stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    exchange = dist.all_to_all_single

    def by_lists(*tensors: torch.Tensor, output_split_sizes: Any, input_split_sizes: Any, group: Any) -> None:
        splits = [x.tolist() if isinstance(x, torch.Tensor) else x for x in (output_split_sizes, input_split_sizes)]
        exchange(*tensors, *splits, group=group)

    dist.all_to_all_single = by_lists


def model(of: argparse.Namespace, dispatcher: str, device: torch.device) -> Any:
    """A GPT, whose weights depend on the rank where they are experts'."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = getattr(torch, of.dtype)
    config = TransformerConfig(
        num_layers=of.layers,
        hidden_size=of.hidden,
        ffn_hidden_size=2 * of.hidden,
        moe_ffn_hidden_size=2 * of.hidden,
        num_attention_heads=of.hidden // 64,
        num_moe_experts=EXPERTS,
        expert_model_parallel_size=dist.get_world_size(),
        moe_router_topk=TOP_K,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        moe_token_dispatcher_type=dispatcher,
        moe_flex_dispatcher_backend="deepep",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    torch.manual_seed(1)
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    made = GPTModel(config, spec, of.vocabulary, of.length, position_embedding_type="learned_absolute")
    torch.manual_seed(2 + dist.get_rank())
    for _, weight in experts(made, True):
        torch.nn.init.normal_(weight, std=0.02)
    return made.to(device)


def experts(of: Any, wanted: bool) -> list[Any]:
    """The weights that are experts', which a rank has alone, or those that all ranks have."""
    return [(name, w) for name, w in of.named_parameters() if getattr(w, "allreduce", True) != wanted]


def step(of: Any, optimizer: Any, tokens: torch.Tensor, mask: torch.Tensor, device: torch.device) -> tuple[float, float]:
    """The mean loss of all ranks, and the seconds that a step takes."""
    positions = torch.arange(tokens.shape[1] - 1, device=device).expand(tokens.shape[0], -1)
    wait(device)
    dist.barrier()
    begin = time.perf_counter()
    loss = of(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous()).float().mean()
    optimizer.zero_grad()
    (loss / dist.get_world_size()).backward()
    for _, weight in experts(of, False):
        dist.all_reduce(weight.grad)
    optimizer.step()
    wait(device)
    took = time.perf_counter() - begin
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size(), took


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def arguments() -> argparse.Namespace:
    of = argparse.ArgumentParser()
    for name, value in {"steps": 50, "layers": 2, "hidden": 256, "length": 128, "batch": 4, "vocabulary": 512}.items():
        of.add_argument(f"--{name}", type=int, default=value)
    of.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    of.add_argument("--most", type=float, default=0.02, help="the largest difference of losses that is no failure")
    return of.parse_args()


def main() -> int:
    of, local = arguments(), int(os.environ["LOCAL_RANK"])
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        on_cpu()
    torch._dynamo.config.disable = True  # Megatron compiles small functions, for a minute
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    import megatron.core
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe import fused_a2a

    import deep_ep

    assert fused_a2a.HAVE_DEEP_EP
    parallel_state.initialize_model_parallel(expert_model_parallel_size=size)
    tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)
    if rank == 0:
        print(f"Megatron-Core {megatron.core.__version__}, torch {torch.__version__}, {size} ranks, {device.type}, {of.dtype}")
        print("deep_ep:", deep_ep.__file__, flush=True)
    models = {name: model(of, name, device) for name in DISPATCHERS}
    optimizers = {name: torch.optim.AdamW(of.parameters(), lr=1e-3) for name, of in models.items()}
    draw = torch.Generator().manual_seed(100 + rank)
    batches = torch.randint(of.vocabulary, (BATCHES, of.batch, of.length + 1), generator=draw).to(device)
    mask = torch.ones(of.length, of.length, dtype=torch.bool, device=device).triu(1)[None, None]
    differences, times = [], {name: [] for name in DISPATCHERS}
    for number in range(of.steps):
        losses = []
        for name, made in models.items():
            loss, took = step(made, optimizers[name], batches[number % BATCHES], mask, device)
            losses.append(loss)
            times[name].append(took)
        differences.append(abs(losses[0] - losses[1]))
        if rank == 0:
            said = ", ".join(f"{DISPATCHERS[name]} {loss:.6f}" for name, loss in zip(DISPATCHERS, losses))
            print(f"step {number + 1}: {said}, difference {differences[-1]:.2e}", flush=True)
    assert isinstance(fused_a2a._buffer, deep_ep.Buffer)
    worst = max(differences)
    if rank == 0:
        print(f"largest difference {worst:.2e}; the same bits in {differences.count(0.0)} of {of.steps} steps")
        for name, took in times.items():
            median, least = 1e3 * statistics.median(took), 1e3 * min(took)
            print(f"{DISPATCHERS[name]}: {median:.2f} ms a step (the median), at least {least:.2f}")
    fused_a2a._buffer.destroy()
    dist.destroy_process_group()
    return int(not worst <= of.most)


if __name__ == "__main__":
    sys.exit(main())
