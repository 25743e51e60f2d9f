"""Buffers of CUDA tensors: side streams, events, graphs, groups of gloo and defaults of the caller's."""

from __future__ import annotations

import contextlib
import ctypes

import pytest
import switchyard
import test_expand
import test_hybrid
import torch
import torch.distributed as dist
import world
from layers import HIDDEN, TOP_K, applied, dispatched, factors, routing, want
from switchyard import errors
from test_compile import same_bits

import deep_ep
from deep_ep.hybrid_ep_buffer import indices_to_map

CUDA, CLOSE = "cuda", {"rtol": 1e-4, "atol": 1e-5}
# Cycles of a GPU's clock: 25 to 50 ms.
LONG = 50_000_000


def cuda_gloo(rank: int, size: int, store: str) -> None:
    """A GPU for each rank, or GPUs that ranks share, and a group of gloo, as vLLM has it."""
    world._take_gpu(rank)
    world._torch("gloo", rank, size, store)


@pytest.fixture
def cuda(worlds):
    return worlds.get(2, world.cuda)


def on(stream):
    return torch.cuda.stream(stream)


def ended(event) -> bool:
    return event.event._event.query()


# Side streams


def dropped(rank, size):
    """Results of every call are dropped while a side stream has yet to read them; the next calls take other memory."""
    buffer, side, sums = deep_ep.Buffer(dist.group.WORLD), torch.cuda.Stream(), []

    def read_late(*results):
        before = [t.double().sum() for t in results]
        side.wait_stream(torch.cuda.current_stream())
        with on(side):
            torch.cuda._sleep(LONG // 5)
            sums.extend((want, t.double().sum()) for want, t in zip(before, results))
        for t in results:
            t.record_stream(side)

    for seed in range(8):
        x, idx, weights = routing(rank, size, 2000, seed, CUDA)
        rows, indices, beside, _, handle, _ = dispatched(buffer, x, idx, weights)
        read_late(rows, indices, beside)
        del rows, indices, beside
        again = buffer.dispatch(x, handle=handle)[0]
        y = buffer.combine(again, handle)[0]
        read_late(again, y)
        del again, y
    torch.cuda.synchronize()
    assert len(sums) == 8 * 5
    for before, late in sums:
        assert torch.equal(before, late)
    buffer.destroy()


def test_results_dropped_while_a_side_stream_reads_them(cuda):
    cuda.run(dropped, timeout=60)


def many(rank, size):
    """64 routings at a time, used in the other order, after their rows are gone."""
    buffer, kept = deep_ep.Buffer(dist.group.WORLD), []
    for seed in range(64):
        x, idx, weights = routing(rank, size, 5 + (seed + rank) % 3, seed, CUDA)
        rows, indices, beside, _, handle, _ = dispatched(buffer, x, idx, weights)
        kept.append((x, idx, weights, handle, applied(rows, indices, beside, rank, size)))
    for x, idx, weights, handle, out in reversed(kept):
        torch.testing.assert_close(buffer.combine(out, handle)[0], want(x, idx, weights, size), **CLOSE)
    buffer.destroy()


def test_64_routings_at_a_time(cuda):
    cuda.run(many, timeout=60)


# Events


def events(rank, size, second):
    """A call with previous_event waits for that alone, one without it for the current stream; with async_finish the current
    stream does not wait for the call."""
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD) if second else deep_ep.Buffer(dist.group.WORLD)
    x, idx, weights = routing(rank, size, 100, 0, CUDA)
    layout = None if second else buffer.get_dispatch_layout(idx, 4 * size)

    def call(later, **arguments):
        if second:
            made = buffer.dispatch(
                x, idx, weights, num_experts=4 * size, num_max_tokens_per_rank=100, do_cpu_sync=False,
                async_with_compute_stream=later, **arguments,
            )  # fmt: skip
        else:
            made = buffer.dispatch(
                x, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=layout[0], is_token_in_rank=layout[3],
                num_tokens_per_expert=layout[2], num_worst_tokens=100 * size, async_finish=later, **arguments,
            )  # fmt: skip
        return made[0][:came], made[3 if second else 4], made[-1]

    came = None  # what lies behind is undefined
    everybody = [routing(r, size, 100, 0, CUDA)[1] for r in range(size)]
    here = torch.cat([((i >= 4 * rank) & (i < 4 * rank + 4)).any(1) for i in everybody])
    current, comm = torch.cuda.current_stream(), buffer.get_comm_stream()
    whole, _, _ = call(False)
    came = int(here.sum())
    rows, _, _ = call(False)
    for _ in range(2):  # torch's memory for the other stream
        call(True)[2].current_stream_wait()
    torch.cuda.synchronize()
    dist.barrier()

    def busy(stream):
        """Work of 25 ms at least on a stream, and an event behind it."""
        with on(stream):
            torch.cuda._sleep(LONG)
            done = torch.cuda.Event()
            done.record()
        return done

    # previous_event alone: the call ends while the current stream is busy.
    before = buffer.capture()
    work = busy(current)
    again, handle, event = call(True, previous_event=before, allocate_on_comm_stream=True)
    event.event._event.synchronize()
    assert not work.query()
    event.current_stream_wait()
    assert torch.equal(again, rows)
    # No event: the call begins behind the current stream.
    work = busy(current)
    _, _, event = call(True)
    event.event._event.synchronize()
    assert work.query()
    # async_finish: the current stream goes on while the call's stream is busy.
    work = busy(comm)
    _, _, event = call(True)
    current.synchronize()
    assert not work.query()
    assert not ended(event)
    event.current_stream_wait()
    current.synchronize()
    assert work.query()
    # previous_event without async_finish: the current stream waits for the call.
    work = busy(comm)
    again, _, event = call(False, previous_event=buffer.capture())
    assert event.event is None
    current.synchronize()
    assert work.query()
    assert torch.equal(again, rows)
    # A combine has the same words.
    later = {"async_with_compute_stream" if second else "async_finish": True}
    sums, _, event = buffer.combine(whole, handle, previous_event=buffer.capture(), allocate_on_comm_stream=True, **later)
    event.current_stream_wait()
    to = torch.stack([((idx >= 4 * r) & (idx < 4 * r + 4)).any(1) for r in range(size)]).sum(0)
    torch.testing.assert_close(sums, x * to[:, None])
    buffer.destroy()


@pytest.mark.parametrize("second", [False, True], ids=["Buffer", "ElasticBuffer"])
def test_events(cuda, second):
    cuda.run(events, second, timeout=60)


def alone(rank, size):
    """A call without event and async_finish does not take the buffer's stream."""
    buffer = deep_ep.Buffer(dist.group.WORLD)
    x, idx, weights = routing(rank, size, 100, 0, CUDA)
    dispatched(buffer, x, idx, weights)
    torch.cuda.synchronize()
    dist.barrier()
    with on(buffer.get_comm_stream()):
        torch.cuda._sleep(LONG)
        work = torch.cuda.Event()
        work.record()
    rows, _, _, _, handle, _ = dispatched(buffer, x, idx, weights)
    buffer.combine(rows, handle)
    torch.cuda.current_stream().synchronize()
    assert not work.query()
    buffer.destroy()


def test_plain_calls_stay_on_the_current_stream(cuda):
    cuda.run(alone, timeout=60)


def few_events(rank, size):
    """Low latency: a hook ends a call on the current stream, an event a call on the buffer's."""
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
    x, idx, weights = routing(rank, size, 12, 0, CUDA)
    x, mine = x.bfloat16(), factors(size, CUDA).view(size, 4)[rank].bfloat16()[:, None, None]
    for way in ("hook", "async", "plain", "hook", "async"):
        hooked, later = way == "hook", way == "async"
        rows, _, handle, event, hook = buffer.low_latency_dispatch(
            x, idx, 12, 4 * size, use_fp8=False, return_recv_hook=hooked, async_finish=later
        )
        assert (hook is not None, event.event is not None) == (hooked, later)
        hook() if hooked else event.current_stream_wait() if later else None
        y, event, hook = buffer.low_latency_combine(
            rows * mine, idx, weights, handle, return_recv_hook=hooked, async_finish=later
        )
        hook() if hooked else event.current_stream_wait() if later else None
        torch.testing.assert_close(y.float(), want(x.float(), idx, weights, size), rtol=0.1, atol=0.1)
    buffer.destroy()


def test_low_latency_events(cuda):
    cuda.run(few_events, timeout=60)


# Graphs


def replayed(size, step, still, seeds):
    """Capture a step, and replay it with tokens and routings of other seeds."""
    graph, tokens = torch.cuda.CUDAGraph(), still[0].shape[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with on(stream):
        for _ in range(2):  # makes what the capture cannot
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.graph(graph):
        y = step()
    for seed in seeds:
        other = routing(dist.get_rank(), size, tokens, seed, CUDA)
        for t, value in zip(still, other):
            t.copy_(value)
        y.fill_(7)
        graph.replay()
        right = want(*(t.float() if t.is_floating_point() else t for t in still), size)
        near = CLOSE if y.dtype is torch.float32 else {"rtol": 0.1, "atol": 0.1}
        torch.testing.assert_close(y.float(), right, **near)
    return graph


def few_graph(rank, size, hooked, use_fp8):
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
    still = routing(rank, size, 12, 0, CUDA)
    still = (still[0].bfloat16(), *still[1:])
    x, idx, weights = still
    mine = factors(size, CUDA).view(size, 4)[rank].bfloat16()[:, None, None]

    def step():
        rows, _, handle, _, hook = buffer.low_latency_dispatch(x, idx, 12, 4 * size, use_fp8=use_fp8, return_recv_hook=hooked)
        if hooked:
            hook()
        if use_fp8:
            q, scales = rows
            rows = (q.float().unflatten(2, (-1, 128)) * scales[..., None]).flatten(2).bfloat16()
        y, _, hook = buffer.low_latency_combine(rows * mine, idx, weights, handle, return_recv_hook=hooked)
        if hooked:
            hook()
        return y

    graph = replayed(size, step, still, range(1, 6))
    torch.testing.assert_close(step().float(), want(x.float(), idx, weights, size), rtol=0.1, atol=0.1)  # in turns with it
    graph.replay()
    torch.cuda.synchronize()
    del graph
    buffer.destroy()


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hook"])
@pytest.mark.parametrize("use_fp8", [False, True], ids=["bf16", "fp8"])
def test_graph_of_low_latency(cuda, hooked, use_fp8):
    cuda.run(few_graph, hooked, use_fp8, timeout=60)


def worst_graph(rank, size, weighed):
    """num_worst_tokens: a layer in a graph, with the layout and the weights of all ranks."""
    buffer, still = deep_ep.Buffer(dist.group.WORLD), routing(rank, size, 24, 0, CUDA)
    x, idx, weights = still
    mine = factors(size, CUDA).view(size, 4)[rank]
    beside_of = []

    def step():
        rows, indices, beside, _, handle, _ = dispatched(buffer, x, idx, weights, num_worst_tokens=24 * size)
        scale = torch.where(indices >= 0, beside * mine[indices.clamp(min=0)], 0).sum(1, keepdim=True)
        rows = torch.where(scale != 0, rows, 0)  # rows behind the last are anything
        y, sums, _ = buffer.combine(rows * scale, handle, topk_weights=beside if weighed else None)
        beside_of[:] = [sums]
        return y

    graph = replayed(size, step, still, range(1, 6))
    if weighed:
        assert torch.equal(beside_of[0], weights)
    del graph
    buffer.destroy()


@pytest.mark.parametrize("weighed", [False, True], ids=["rows", "rows and weights"])
def test_graph_of_worst_case_lengths(cuda, weighed):
    cuda.run(worst_graph, weighed, timeout=60)


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS of the driver."""

    _fields_ = [
        ("func", ctypes.c_void_p), ("sizes", ctypes.c_uint * 7), ("params", ctypes.c_void_p), ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p), ("ctx", ctypes.c_void_p),
    ]  # fmt: skip


def launched(call, pool=None):
    """The kernels that a call puts into a graph, in their order; a node of another kind is its number in the driver."""
    graph, driver = torch.cuda.CUDAGraph(keep_graph=True), ctypes.CDLL("libcuda.so.1")
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.graph(graph, pool=pool):
        held = call()
    count, names = ctypes.c_size_t(), []
    made = ctypes.c_void_p(graph.raw_cuda_graph())
    assert driver.cuGraphGetNodes(made, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(made, nodes, ctypes.byref(count)) == 0
    for node in nodes:
        kind, kernel, name = ctypes.c_int(), KernelNode(), ctypes.c_char_p()
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        if kind.value:
            names.append(kind.value)
            continue
        assert driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(kernel)) == 0
        if kernel.func:
            assert driver.cuFuncGetName(ctypes.byref(name), ctypes.c_void_p(kernel.func)) == 0
        else:
            assert driver.cuKernelGetName(ctypes.byref(name), ctypes.c_void_p(kernel.kern)) == 0
        names.append(name.value.decode())
    del held, graph
    return names


def few_launches(rank, size):
    """A pair of few tokens launches what a Dispatcher's pair does: one kernel each way, and copies nothing."""
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
    x, idx, weights = routing(rank, size, 12, 0, CUDA)
    x, back = x.bfloat16(), torch.ones(4, 12 * size, HIDDEN, dtype=torch.bfloat16, device=CUDA)
    dispatcher = switchyard.Dispatcher(
        4 * size, idx.shape[1], HIDDEN, max_tokens=12, dtype=torch.bfloat16, layout="slab", low_latency=True, quantize=True,
        scale_columns=True, sources=True, handles=2, align=1, group=dist.group.WORLD, device=x.device,
    )  # fmt: skip

    def pair(hooked):
        _, counts, handle, _, hook = buffer.low_latency_dispatch(x, idx, 12, 4 * size, return_recv_hook=hooked)
        if hooked:
            hook()
        y, _, hook = buffer.low_latency_combine(back, idx, weights, handle, return_recv_hook=hooked)
        if hooked:
            hook()
        return counts, y

    flat, kernels = back.view(-1, HIDDEN), ["dispatch_few_by_expert_bf16", "combine_few_late_bf16"]
    assert launched(lambda: dispatcher.combine(flat, dispatcher.dispatch(x, idx), token_weights=weights)) == kernels
    assert launched(lambda: pair(False)) == kernels
    assert launched(lambda: pair(True)) == [kernels[0]] * 2 + [kernels[1]] * 2
    dispatcher.close()
    buffer.destroy()


def test_a_pair_of_low_latency_launches_what_a_dispatcher_does(cuda):
    cuda.run(few_launches, timeout=60)


def worst_launches(rank, size, second, tokens):
    """A pair with a known length launches what a Dispatcher's does, and a kernel that takes the results: of many tokens beside
    the dispatch, where ranks have a GPU each."""
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD) if second else deep_ep.Buffer(dist.group.WORLD)
    x, idx, weights = routing(rank, size, tokens, 0, CUDA)
    back, layout = torch.ones(tokens * size, HIDDEN, device=CUDA), None if second else buffer.get_dispatch_layout(idx, 4 * size)

    def pair(expanded=False):
        if second:
            handle = buffer.dispatch(
                x, idx, weights, num_experts=4 * size, num_max_tokens_per_rank=tokens, do_cpu_sync=False, do_expand=expanded
            )[3]
        else:
            handle = buffer.dispatch(
                x, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=layout[0], is_token_in_rank=layout[3],
                num_tokens_per_expert=layout[2], num_worst_tokens=tokens * size,
            )[4]  # fmt: skip
        return buffer.combine(back, handle)[0]

    results = "take_results" if torch.cuda.device_count() >= size else "copy_results"
    many = ["dispatch_rows", results, "experts_sum_f32", "combine_rows_f32"]
    kernels = ["dispatch_few", "copy_results", "combine_few_f32"] if tokens <= 256 else many
    assert launched(pair) == kernels
    if second:
        back = torch.ones(TOP_K * tokens * size, HIDDEN, device=CUDA)
        expanded = ["expand_places", "expand_rows", "fold_rows_f32"]
        assert launched(lambda: pair(True)) == kernels[:2] + expanded + kernels[2:]
    buffer.destroy()


@pytest.mark.parametrize("second", [False, True], ids=["V1", "V2"])
@pytest.mark.parametrize("tokens", [24, 300])
def test_a_pair_of_worst_case_lengths_copies_its_results_once(cuda, second, tokens):
    cuda.run(worst_launches, second, tokens, timeout=60)


def pooled(rank, size):
    """Results in memory of mem_pool are those of other memory, also where ranks differ in that, and in a graph."""
    tokens = 300
    buffer, pool = deep_ep.ElasticBuffer(dist.group.WORLD), switchyard.mem_pool(96 << 20, dist.group.WORLD, CUDA)
    x, idx, weights = routing(rank, size, tokens, 0, CUDA)

    def sent():
        rows, indices, beside, handle, _ = buffer.dispatch(
            x, idx, weights, num_experts=4 * size, num_max_tokens_per_rank=tokens, do_cpu_sync=False
        )
        return rows, indices, beside, handle, buffer.combine(applied(rows, indices, beside, rank, size), handle)[0]

    def check(made, other):
        n = int((other[1] >= 0).any(1).sum())
        for a, b in zip((made[0][:n], *made[1:3], made[4]), (other[0][:n], *other[1:3], other[4])):
            assert torch.equal(a, b)

    plain = sent()
    for inside in (True, rank == 0, rank != 0):
        with torch.cuda.use_mem_pool(pool) if inside else contextlib.nullcontext():
            made = sent()
        check(made, plain)
    del made
    assert launched(sent, pool.id)[:2] == ["dispatch_rows", "copy_results"]
    sent()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        made = sent()
    for seed in range(4):
        for mine, fresh in zip((x, idx, weights), routing(rank, size, tokens, seed, CUDA)):
            mine.copy_(fresh)
        torch.cuda.synchronize()
        dist.barrier()
        graph.replay()
        torch.cuda.synchronize()
        dist.barrier()
        check(made, sent())
    del graph, made, plain
    buffer.destroy()


def test_results_where_peers_write_them(cuda):
    cuda.run(pooled, timeout=60)


def elastic_graph(rank, size, expand):
    """ElasticBuffer without a wait of the host."""
    buffer, still = deep_ep.ElasticBuffer(dist.group.WORLD), routing(rank, size, 24, 0, CUDA)
    x, idx, weights = still
    mine = factors(size, CUDA).view(size, 4)[rank]

    def step():
        rows, indices, beside, handle, _ = buffer.dispatch(
            x, idx, weights, num_experts=4 * size, num_max_tokens_per_rank=24, expert_alignment=8, do_cpu_sync=False,
            do_expand=expand,
        )  # fmt: skip
        if expand:
            ends = handle.psum_num_recv_tokens_per_expert
            expert = torch.searchsorted(ends, torch.arange(rows.shape[0], device=CUDA, dtype=ends.dtype), right=True)
            scale = (beside * mine[expert.clamp(max=3)])[:, None]
        else:
            scale = torch.where(indices >= 0, beside * mine[indices.clamp(min=0)], 0).sum(1, keepdim=True)
        rows = torch.where(scale != 0, rows, 0)
        return buffer.combine(rows * scale, handle)[0]

    graph = replayed(size, step, still, range(1, 6))
    del graph
    buffer.destroy()


def test_rows_of_choices_are_those_of_tokens(cuda):
    cuda.run(test_expand.expanded, CUDA, timeout=60)


@pytest.mark.parametrize("by_map", [False, True])
def test_hybrid_there_and_back(cuda, by_map):
    cuda.run(test_hybrid.both_ways, by_map, 16, CUDA, timeout=60)


def test_hybrid_rows_that_a_budget_has_no_room_for(cuda):
    cuda.run(test_hybrid.budgeted, CUDA, timeout=60)


@pytest.mark.parametrize("expand", [False, True], ids=["compact", "expanded"])
def test_graph_of_elastic_buffer(cuda, expand):
    cuda.run(elastic_graph, expand, timeout=60)


def unprepared(rank, size):
    """What a capture cannot make is an error on all ranks, and the next right call works."""
    buffer = deep_ep.Buffer(dist.group.WORLD)
    x, idx, weights = routing(rank, size, 12, 0, CUDA)
    buffer.get_dispatch_layout(idx, 4 * size)
    torch.cuda.synchronize()
    dist.barrier()
    for worst in (0, 12 * size):
        with pytest.raises(errors.Unsupported, match="captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            dispatched(buffer, x, idx, weights, num_worst_tokens=worst)
    with pytest.raises(errors.Unsupported, match="captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        buffer.low_latency_dispatch(x.bfloat16(), idx, 12, 4 * size)
    rows, indices, beside, _, handle, _ = dispatched(buffer, x, idx, weights)
    y = buffer.combine(applied(rows, indices, beside, rank, size), handle)[0]
    torch.testing.assert_close(y, want(x, idx, weights, size), **CLOSE)
    buffer.destroy()


def test_a_capture_that_was_not_prepared(worlds):
    worlds.get(2, world.cuda).run(unprepared, timeout=60)


def failed(rank, size):
    """An index that is no expert: an error on all ranks at once where the host waits. Otherwise no row comes, a later call
    warns, and that call works too."""
    buffer = deep_ep.Buffer(dist.group.WORLD)
    x, idx, weights = routing(rank, size, 12, 0, CUDA)
    per_rank, _, per_expert, inside, _ = buffer.get_dispatch_layout(idx, 4 * size)
    beyond = idx.clone()
    if rank == 1:
        beyond[3, 1] = 4 * size

    def send(ways, worst=0):
        made = buffer.dispatch(
            x, topk_idx=ways, topk_weights=weights, num_tokens_per_rank=per_rank, is_token_in_rank=inside,
            num_tokens_per_expert=per_expert, num_worst_tokens=worst,
        )  # fmt: skip
        return made[0], made[4]

    wrong = idx.clone()
    for expert in (4 * size, -5, 1 << 32, (1 << 63) - 1):
        wrong[3, 1] = expert
        with pytest.raises(errors.InvalidArgument, match=f"get_dispatch_layout: topk_idx has expert {expert} of"):
            buffer.get_dispatch_layout(wrong, 4 * size)
        with pytest.raises(errors.InvalidArgument, match=f"indices_to_map: topk_idx has expert {expert} of"):
            indices_to_map(wrong, None, 12, 4 * size)
        counted = buffer.get_dispatch_layout(torch.where(wrong == expert, -1, wrong), 4 * size)
        later = buffer.get_dispatch_layout(wrong, 4 * size, async_finish=True)
        later[4].current_stream_wait()
        assert all(torch.equal(later[i], counted[i]) for i in (0, 2, 3))
        with pytest.raises(RuntimeError, match=f"token 3 of rank 1 has expert {expert} as choice"):
            send(wrong if rank == 1 else idx)
    with pytest.raises(RuntimeError, match=f"token 3 of rank 1 has expert {4 * size} as choice 1") as kept:
        send(beyond)
    assert kept.value.__traceback__ is not None  # which holds what the call had
    to = torch.stack([((idx >= 4 * r) & (idx < 4 * r + 4)).any(1) for r in range(size)]).sum(0)
    send(idx, 12 * size)
    for _ in range(3):
        send(beyond, 12 * size)
        torch.cuda.synchronize()
        dist.barrier()
        with pytest.warns(RuntimeWarning, match=f"token 3 of rank 1 has expert {4 * size} as choice 1"):
            rows, handle = send(idx, 12 * size)
        torch.testing.assert_close(buffer.combine(rows, handle)[0], x * to[:, None])
    for _ in range(4):
        rows, handle = send(idx, 12 * size)
        torch.testing.assert_close(buffer.combine(rows, handle)[0], x * to[:, None])
    for _ in range(4):
        torch.testing.assert_close(buffer.combine(*send(idx))[0], x * to[:, None])
    buffer.destroy()


def expansion_failed(rank, size):
    """The same of rows one for each choice, which are made behind the dispatch: they are none, and the later call tells."""
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD)
    x, idx, weights = routing(rank, size, 12, 0, CUDA)
    beyond = idx.clone()
    if rank == 1:
        beyond[3, 1] = 4 * size

    def send(ways):
        rows, _, _, handle, _ = buffer.dispatch(
            x, ways, weights, num_experts=4 * size, num_max_tokens_per_rank=12, do_cpu_sync=False, do_expand=True
        )
        return rows, handle

    choices = (idx >= 0).sum(1, keepdim=True)
    torch.testing.assert_close(buffer.combine(*send(idx))[0], x * choices)
    for _ in range(3):
        _, none = send(beyond)
        torch.cuda.synchronize()
        assert (none.slots == -1).all()
        dist.barrier()
        with pytest.warns(RuntimeWarning, match=f"token 3 of rank 1 has expert {4 * size} as choice 1"):
            rows, handle = send(idx)
        torch.testing.assert_close(buffer.combine(rows, handle)[0], x * choices)
    buffer.destroy()


@pytest.mark.parametrize("fails", [failed, expansion_failed])
def test_an_index_that_is_no_expert(worlds, fails):
    worlds.get(2, world.cuda).run(fails, timeout=60)


# Groups and defaults


def layers_of_all(rank, size):
    """A layer of each kind of call on CUDA tensors."""
    x, idx, weights = (t.to(CUDA) for t in routing(rank, size, 40))
    buffer = deep_ep.Buffer(dist.group.WORLD)
    rows, indices, beside, counts, handle, _ = dispatched(buffer, x, idx, weights)
    assert (rows.device.type, rows.dtype, indices.dtype, beside.dtype) == (CUDA, x.dtype, torch.int64, torch.float32)
    assert counts == [int((indices == e).sum()) for e in range(4)]
    y, sums, _ = buffer.combine(applied(rows, indices, beside, rank, size), handle, topk_weights=beside)
    torch.testing.assert_close(y, want(x, idx, weights, size), **CLOSE)
    assert torch.equal(sums, weights)
    assert [t.device.type for t in handle] == [CUDA] * 6
    small = x[:12].bfloat16()
    (q, scales), _, few, _, _ = buffer.low_latency_dispatch(small, idx[:12], 12, 4 * size)
    assert (q.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    rows = torch.zeros(q.shape, dtype=torch.bfloat16, device=CUDA)
    assert not buffer.low_latency_combine(rows, idx[:12], weights[:12], few)[0].any()
    assert [t.device.type for t in few[:2]] == [CUDA] * 2
    elastic = deep_ep.ElasticBuffer(dist.group.WORLD)
    for expand in (False, True):
        rows, _, beside, kept, _ = elastic.dispatch(x, idx, weights, num_experts=4 * size, do_expand=expand)
        y, sums, _ = elastic.combine(rows, kept, beside)
        assert torch.equal(sums, weights)
        assert kept.recv_src_metadata.device.type == CUDA
        assert torch.equal(kept.dst_buffer_slot_idx >= 0, idx >= 0)
    elastic.destroy()
    buffer.destroy()


def test_groups_of_gloo_with_cuda_tensors(worlds):
    worlds.get(2, cuda_gloo).run(layers_of_all, timeout=60)


def with_defaults(rank, size):
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device(CUDA)
    try:
        with torch.device("cpu"):
            x, idx, weights = (t.float() if t.is_floating_point() else t for t in routing(rank, size, 40))
        x, idx, weights = x.to(CUDA), idx.to(CUDA), weights.to(CUDA)
        buffer, elastic = deep_ep.Buffer(dist.group.WORLD), deep_ep.ElasticBuffer(dist.group.WORLD)
        rows, indices, beside, _, handle, _ = dispatched(buffer, x, idx, weights)
        y, sums, _ = buffer.combine(applied(rows, indices, beside, rank, size), handle, topk_weights=beside)
        torch.testing.assert_close(y, want(x, idx, weights, size), **CLOSE)
        assert torch.equal(sums, weights)
        assert [t.is_floating_point() for t in handle] == [False] * 6
        for expand in (False, True):
            rows, _, beside, kept, _ = elastic.dispatch(x, idx, weights, num_experts=4 * size, do_expand=expand)
            assert torch.equal(elastic.combine(rows, kept, beside)[1], weights)
        few = buffer.low_latency_dispatch(x[:12].bfloat16(), idx[:12], 12, 4 * size, use_fp8=False)
        y = buffer.low_latency_combine(few[0], idx[:12], torch.ones_like(weights[:12]), few[2])[0]
        chosen = (idx[:12] >= 0).sum(1, keepdim=True)
        torch.testing.assert_close(y, x[:12].bfloat16() * chosen, rtol=0.05, atol=0.05)
        elastic.destroy()
        buffer.destroy()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_default_device_and_type(cuda):
    cuda.run(with_defaults, timeout=60)


# Memory


def steps(rank, size):
    """Memory of torch and of the GPU does not grow with the number of steps."""
    buffer, older, free = deep_ep.Buffer(dist.group.WORLD), [], []
    for seed in range(1000):
        x, idx, weights = routing(rank, size, 30 + seed % 7, seed % 11, CUDA)
        rows, indices, beside, _, handle, _ = dispatched(buffer, x, idx, weights)
        older = [*older[-3:], (handle, rows)]
        buffer.combine(older[0][1], older[0][0])
        if seed in (100, 999):
            torch.cuda.synchronize()
            free.append((torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]))
        del rows, indices, beside, handle
    (before, room), (after, left) = free
    assert after - before < 1 << 20
    assert room - left < 32 << 20
    buffer.destroy()


def test_memory_is_flat(cuda):
    cuda.run(steps, timeout=90)


def routing_bytes(rank, size):
    """Bytes that live routings take, for each token sent and each row received."""
    buffer, tokens, kept = deep_ep.Buffer(dist.group.WORLD), 4096, []
    generator = torch.Generator().manual_seed(rank)
    x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device=CUDA)
    idx = torch.rand(tokens, 4 * size, generator=generator).argsort(1)[:, :8].to(CUDA)
    weights = torch.ones(idx.shape, device=CUDA)
    for seed in range(12):
        rows, _, _, _, handle, _ = dispatched(buffer, x, idx, weights)
        if seed == 3:  # dispatchers and what torch loads are there
            torch.cuda.synchronize()
            before, came = torch.cuda.memory_allocated(), rows.shape[0]
            kept.clear()
        kept.append(handle)
        del rows, _
    torch.cuda.synchronize()
    each = (torch.cuda.memory_allocated() - before) / (len(kept) - 1)
    assert each <= 256 * (tokens + came), f"{each / (tokens + came):.0f} bytes for each token and row"
    buffer.destroy()


def test_a_routing_is_small(cuda):
    cuda.run(routing_bytes, timeout=60)


# Compiled graphs


def compiled(rank, size):
    same_bits(rank, size, CUDA)


def test_compiled_calls_have_the_bits_of_others(cuda):
    cuda.run(compiled, timeout=120)
