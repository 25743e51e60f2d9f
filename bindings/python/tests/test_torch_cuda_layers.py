"""switchyard.layers on GPUs: the cases of the host, graphs, and products next to the dispatcher's kernels."""

from __future__ import annotations

import signal

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import layer_cases as cases  # noqa: E402
import layer_products  # noqa: E402
import world as worlds_module  # noqa: E402
from cuda_rig import START, end, run  # noqa: E402

import switchyard as sw  # noqa: E402
from switchyard import layers  # noqa: E402

CUDA = "cuda"


def test_kernels():
    layer_products.main(CUDA)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", list(cases.LAYOUTS))
def test_gradients(cuda, layout, dtype):
    cuda.run(cases.gradients, CUDA, layout, dtype, {})


@pytest.mark.parametrize("layout", ["flat", "token_major"])
def test_gradients_with_counts_on_the_host(cuda, layout):
    cuda.run(cases.gradients, CUDA, layout, "float16", {"host_counts": True, "row_weights": True})


@pytest.mark.parametrize("layout", ["flat", "token_major"])
def test_router_shared_expert_and_lora(cuda, layout):
    cuda.run(cases.trained, CUDA, layout)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("layout", list(cases.LAYOUTS))
def test_float8(cuda, layout, columns):
    cuda.run(cases.float8, CUDA, layout, {"scale_columns": columns})


def test_refused(cuda):
    cuda.run(cases.refused, CUDA)


def overlapped(rank, size, layout, options):
    """Products that wait for rows as they land give the same bits, in turns and in a graph."""
    d = cases.dispatcher(size, CUDA, layout, dtype="bfloat16", landed=True, max_sms=24, **options)
    layer = layers.MoE(d, cases.INNER, shared=32)
    with torch.no_grad():
        results = {}
        for overlap in (0, 24):
            layer.overlap = overlap
            results[overlap] = []
            for seed in range(8):
                x, idx, weights = cases.routing(rank, size, CUDA, seed)
                results[overlap].append(layer(x.bfloat16(), idx, weights))
        for plain, beside in zip(*results.values()):
            assert torch.equal(plain, beside)
        x, idx, weights = cases.routing(rank, size, CUDA, 0)
        x = x.bfloat16()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x, idx, weights)
        for seed in range(8):
            for mine, new in zip((x, idx, weights), cases.routing(rank, size, CUDA, seed)):
                mine.copy_(new)
            graph.replay()
            assert torch.equal(y, results[0][seed])
    del graph, y
    layer.close()
    d.close()


@pytest.mark.parametrize(("layout", "options"), [("flat", {}), ("slab", {"low_latency": True})], ids=["flat", "slab"])
def test_products_next_to_the_dispatcher(worlds, layout, options):
    if torch.cuda.device_count() < 2:
        pytest.skip("ranks that share a GPU share its multiprocessors")
    worlds.get(2, worlds_module.cuda).run(overlapped, layout, options, timeout=60)


def test_products_next_to_the_dispatcher_end_when_a_rank_is_lost():
    if torch.cuda.device_count() < 2:
        pytest.skip("ranks that share a GPU share its multiprocessors")
    code = START.format(timeout=60) + """
    from switchyard import layers

    options = {"max_tokens": 256, "dtype": "bfloat16", "device": "cuda", "landed": True, "max_sms": 24, "handles": 2}
    layer = layers.MoE(sw.Dispatcher(8, 2, 256, **options), 128, overlap=24)
    x, idx = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16), torch.arange(512, device="cuda").view(256, 2) % 8
    with torch.no_grad():
        for _ in range(2):
            layer(x, idx)
        torch.cuda.synchronize()
        sw.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), 9)
        time.sleep(0.01)
        began = time.monotonic()
        for _ in range(2):
            try:
                layer(x, idx)
                torch.cuda.synchronize()
            except sw.errors.PeerLost as err:
                assert err.rank == 1, err
                break
        else:
            sys.exit("no error")
        torch.cuda.synchronize()
    assert time.monotonic() - began < 15
    assert (x @ x).sum().item() == 256**3, "products go on"
    os._exit(0)
    """
    first, second = run(code)
    end(first)
    end(second, code=-signal.SIGKILL)


def by_deepgemm(rank, size, options):
    """DeepGEMM's products next to Triton's, which quantise the same rows."""
    options = {"dtype": "bfloat16", "quantize": True, "layout": "flat", "align": 128, "handles": 2, **options}
    d = sw.Dispatcher(4 * size, 2, 512, max_tokens=512, device=CUDA, **options)
    layer = layers.MoE(d, 256)
    layer.load(*(w[d.local_experts].to(CUDA) for w in cases.matrices(d.experts, 512, 256)))
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(512, 512, generator=g).bfloat16().to(CUDA)
    weights = torch.rand(512, 2, generator=g).to(CUDA)
    with torch.no_grad():
        for masked in (0.0, 0.2, 1.0):
            idx = torch.rand(512, 4 * size - 1, generator=g).argsort(1)[:, :2]
            idx = torch.where(torch.rand(idx.shape, generator=g) < masked, -1, idx).to(CUDA)
            assert layer._deep(512, torch.empty(128)), "DeepGEMM does not run"
            y = layer(x, idx, weights)
            assert torch.equal(y, layer(x, idx, weights)), "other bits"
            layer._deep = lambda *_: False
            want = layer(x, idx, weights)
            del layer._deep
            cases.near(f"y, {masked} masked", y, want, 2e-2)
    del y, want
    layer.close()
    d.close()


@pytest.mark.parametrize("options", [{}, {"scale_columns": True, "host_counts": True}, {"row_weights": True}])
def test_deepgemm(cuda, options):
    pytest.importorskip("deep_gemm")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("DeepGEMM's products of rows in one piece are for Hopper here")
    cuda.run(by_deepgemm, options)


def captured(rank, size, layout):
    """A layer in a graph, replayed with other routing."""
    d = cases.dispatcher(size, CUDA, layout, dtype="bfloat16", host_counts=True)
    layer = layers.MoE(d, cases.INNER)
    with torch.no_grad():
        want = [layer(x.bfloat16(), *rest) for x, *rest in (cases.routing(rank, size, CUDA, s) for s in range(6))]
        x, idx, weights = cases.routing(rank, size, CUDA, 0)
        x = x.bfloat16()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x, idx, weights)
        for seed in range(6):
            for mine, new in zip((x, idx, weights), cases.routing(rank, size, CUDA, seed)):
                mine.copy_(new)
            graph.replay()
            assert torch.equal(y, want[seed])
    sw.barrier()
    del graph, y
    layer.close()
    d.close()


@pytest.mark.parametrize("layout", ["flat", "slab", "token_major"])
def test_graphs(cuda, layout):
    cuda.run(captured, layout)
