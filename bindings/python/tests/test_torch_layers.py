"""switchyard.layers on the host, and its kernels in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import switchyard as sw

torch = pytest.importorskip("torch")

import layer_cases as cases  # noqa: E402

CPU = "cpu"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", list(cases.LAYOUTS))
def test_gradients(gloo, layout, dtype):
    gloo.run(cases.gradients, CPU, layout, dtype, {})


def test_experts_weigh_rows_by_expert(gloo):
    gloo.run(cases.gradients, CPU, "flat", "float32", {"row_weights": True})


@pytest.mark.parametrize("layout", ["flat", "token_major"])
def test_router_shared_expert_and_lora(gloo, layout):
    gloo.run(cases.trained, CPU, layout)


@pytest.mark.parametrize("layout", ["flat", "token_major"])
def test_float8(gloo, layout):
    gloo.run(cases.float8, CPU, layout, {})


def test_refused(gloo):
    gloo.run(cases.refused, CPU)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_in_the_interpreter():
    script = Path(__file__).with_name("layer_products.py")
    done = subprocess.run(
        [sys.executable, script, CPU], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def copied(rank, size):
    """What wrappers of torch do to a module with a layer."""
    import copy
    import gc
    import io
    import pickle

    from torch.optim.swa_utils import AveragedModel

    from switchyard.layers import MoE, Router

    d = sw.Dispatcher(2 * size, 2, 16, max_tokens=4, handles=8, dtype="float32", combine_dtype="float32")
    layer = MoE(d, 32, router=Router(16, 2 * size, 2), shared=8)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), layer)
    x = torch.randn(4, 16)
    y = model(x)
    twin = copy.deepcopy(model)
    assert twin[1].dispatcher is d
    assert copy.copy(d) is d
    assert twin[1].gate_up is not layer.gate_up
    assert twin[1].router is not layer.router
    assert torch.equal(twin(x), y)
    twin[1].close()
    with torch.no_grad():
        twin[1].down.zero_()
    assert torch.equal(model(x), y)
    average = AveragedModel(model)
    average.update_parameters(twin)
    assert average(x).shape == y.shape
    wrapped = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    wrapped(x).sum().backward()

    got = d.dispatch(x, torch.zeros(4, 2, dtype=torch.int64))
    assert copy.deepcopy(got) is got
    for thing in (d, got, model, d.comm, got.keep()):
        with pytest.raises(sw.errors.InvalidType, match=r"lives in its process, and cannot be pickled.*state_dict"):
            pickle.dumps(thing)
    with pytest.raises(sw.errors.InvalidType, match=r"a Dispatcher lives in its process.*a Dispatcher of that process"):
        torch.save(model, io.BytesIO())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file))
    assert torch.equal(twin(x), y)

    want = torch.autograd.grad(model(x).sum(), layer.gate_up)[0]
    with torch.autograd.graph.save_on_cpu():
        y = model(x)
    assert torch.allclose(torch.autograd.grad(y.sum(), layer.gate_up)[0], want)
    y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    assert torch.allclose(torch.autograd.grad(y.sum(), layer.gate_up)[0], want)

    empty = copy.deepcopy(model).to("meta")
    with pytest.raises(sw.errors.InvalidArgument, match="gate_up is on meta, and the layer's dispatcher on cpu"):
        empty[1](x)
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    assert torch.equal(empty(x), model(x))
    del got, thing, y, wrapped
    gc.collect()  # errors hold what they tell of
    d.close()


def test_copies_of_a_layer(backend):
    backend.run(copied)


def sharded(rank, size):
    """Experts that are left out of FSDP, old and new, train as without it, each rank's own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    from switchyard.layers import MoE, Router

    def make():
        torch.manual_seed(1)
        d = sw.Dispatcher(2 * size, 2, 16, max_tokens=4, handles=8, dtype="float32", combine_dtype="float32")
        layer = MoE(d, 32, router=Router(16, 2 * size, 2))
        experts = [layer.gate_up, layer.down]
        with torch.no_grad():
            for p in experts:
                p.normal_(generator=torch.Generator().manual_seed(rank))
        return torch.nn.Sequential(torch.nn.Linear(16, 16), layer, torch.nn.Linear(16, 16)), experts

    def train(model, experts):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(size + rank))
        model(x).square().mean().backward()
        optimizer.step()
        return [p.detach() for p in experts]

    mesh = init_device_mesh(CPU, (size,))
    want = train(*make())
    model, experts = make()
    began = [p.detach().clone() for p in experts]
    wrapped = FullyShardedDataParallel(
        model, ignored_states=experts, use_orig_params=True, device_mesh=mesh, device_id=torch.device(CPU)
    )
    assert all(not torch.equal(a, b) for a, b in zip(train(wrapped, experts), began))
    torch.testing.assert_close([p.detach() for p in experts], want)
    model, experts = make()
    torch.testing.assert_close(train(fully_shard(model, mesh=mesh, ignored_params=set(experts)), experts), want)


def test_experts_left_out_of_fsdp(gloo):
    gloo.run(sharded)
