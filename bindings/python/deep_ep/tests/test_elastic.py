"""ElasticBuffer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from layers import HIDDEN, TOP_K, applied, factors, routing, want

import deep_ep


def served(rank, size, expand, cpu_sync):
    """Layers whose bound of tokens differs from call to call."""
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=64, hidden=HIDDEN)
    assert buffer.num_bytes >= buffer.get_buffer_size_hint(dist.group.WORLD, 64, HIDDEN)
    kept = []
    for seed, most in enumerate((8, 64, 16, 128, 8)):
        x, idx, weights = routing(rank, size, max(most // 2 - rank, 0), seed)
        stats = torch.zeros(4, dtype=torch.int32)
        rows, indices, beside, handle, event = buffer.dispatch(
            x, idx, weights, stats, 4 * size, most, expert_alignment=16, do_expand=expand, do_cpu_sync=cpu_sync
        )
        assert event.event is None
        came = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        counts = handle.num_unaligned_recv_tokens_per_expert
        assert torch.equal(stats, counts)
        aligned = [-(-n // 16) * 16 for n in counts.tolist()]
        assert handle.num_recv_tokens_per_expert_list == (aligned if cpu_sync else [])
        if expand:
            assert indices is None
            ends = handle.psum_num_recv_tokens_per_expert.tolist()
            starts = [-(-n // 16) * 16 for n in [0, *ends[:-1]]]
            assert [b - a for a, b in zip(starts, ends)] == counts.tolist()
            most_rows = size * most * min(TOP_K, 4) + 15 * 4
            assert rows.shape[0] == (sum(aligned) if cpu_sync else -(-most_rows // 16) * 16)
            scale = torch.zeros(rows.shape[0])
            for e, (a, b) in enumerate(zip(starts, ends)):
                scale[a:b] = factors(size).view(size, 4)[rank, e]
                assert not rows[b : a + aligned[e]].any()
            out, sent = rows * (scale * beside)[:, None], beside
        else:
            assert rows.shape[0] == indices.shape[0] == (came if cpu_sync else size * most)
            assert (indices[came:] == -1).all()
            assert handle.psum_num_recv_tokens_per_expert.tolist() == torch.tensor(aligned).cumsum(0).tolist()
            out, sent = applied(rows, indices, beside, rank, size), beside
        metadata = handle.recv_src_metadata[:came]
        mine = metadata[metadata[:, 0] // most == rank]
        where = mine[:, 2:].max(1).values.long() if expand else (metadata[:, 0] // most == rank).nonzero()[:, 0]
        assert torch.equal(rows[where], x[(mine[:, 0] % most).long()])
        y, sums, _ = buffer.combine(out, handle, sent)
        torch.testing.assert_close(y, want(x, idx, weights, size), rtol=1e-4, atol=1e-5)
        assert torch.equal(sums, weights)
        kept.append((handle, rows, x))
    for handle, rows, x in reversed(kept):
        before = buffer.capture()
        again, _, _, same, event = buffer.dispatch(
            x, handle=handle, previous_event=before, async_with_compute_stream=True, do_expand=expand
        )
        event.current_stream_wait()
        assert same is handle
        came = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        assert torch.equal(again if expand else again[:came], rows if expand else rows[:came])
    buffer.barrier()
    buffer.destroy()


@pytest.mark.parametrize("cpu_sync", [True, False])
@pytest.mark.parametrize("expand", [True, False])
def test_layers(gloo, expand, cpu_sync):
    gloo.run(served, expand, cpu_sync)


def handles(rank, size):
    """The indices in a handle, scales in columns, and two biases."""
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=16)
    x, idx, weights = routing(rank, size, 7)
    for copied in (True, False):
        handle = buffer.dispatch(x, idx, weights, num_experts=4 * size, do_handle_copy=copied)[3]
        assert (handle.topk_idx.data_ptr() != idx.data_ptr()) == copied
        assert torch.equal(handle.dst_buffer_slot_idx >= 0, idx >= 0)
    handle.recv_src_metadata = saved = handle.recv_src_metadata.clone()
    assert handle.recv_src_metadata is saved
    q, scales = x.to(torch.float8_e4m3fn), torch.rand(7, 2)
    for expand in (True, False):
        (rows, sf), _, _, handle, _ = buffer.dispatch(
            (q, scales), idx, weights, num_experts=4 * size, do_expand=expand, use_tma_aligned_col_major_sf=True
        )
        assert sf.shape == (rows.shape[0], 2)
        assert sf.stride() == (1, -(-rows.shape[0] // 4) * 4)
        out = torch.zeros(rows.shape, dtype=torch.bfloat16)
        biases = tuple(torch.full((7, HIDDEN), k, dtype=torch.bfloat16) for k in (1.0, 2.0))
        assert (buffer.combine(out, handle, bias=biases)[0] == 3).all()
    buffer.destroy()


def test_handles(gloo):
    gloo.run(handles)


def refused(rank, size):
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=8)
    x, idx, weights = routing(rank, size, 7)
    rows, _, beside, handle, _ = buffer.dispatch(x, idx, weights, num_experts=4 * size)
    for kind, text, call in (
        (NotImplementedError, "engram_write: Engram is not", lambda: buffer.engram_write(x)),
        (NotImplementedError, "pp_send", lambda: buffer.pp_send(x, 1)),
        (NotImplementedError, "all_gather", lambda: buffer.all_gather(x)),
        (NotImplementedError, "num_cpu_bytes", lambda: deep_ep.ElasticBuffer(dist.group.WORLD, 1 << 21, 1 << 21)),
        (ValueError, "7 tokens, num_max_tokens_per_rank is 6", lambda: buffer.dispatch(x, idx, None, None, 4 * size, 6)),
        (ValueError, "num_experts are needed", lambda: buffer.dispatch(x, idx)),
        (ValueError, "do not go with a handle", lambda: buffer.dispatch(x, idx, handle=handle)),
        (
            ValueError,
            "expert_alignment is 4, that of",
            lambda: buffer.dispatch(x, handle=handle, expert_alignment=4),
        ),
        (ValueError, "do_expand with a handle", lambda: buffer.dispatch(x, handle=handle, do_expand=True)),
        (ValueError, "rows, the dispatch brought", lambda: buffer.combine(rows[1:], handle)),
        (ValueError, "topk_weights is", lambda: buffer.combine(rows, handle, beside[:, :1])),
        (TypeError, "handle is tuple", lambda: buffer.combine(rows, ())),
    ):
        with pytest.raises(kind, match=text):
            call()
    assert torch.equal(buffer.combine(rows, handle, beside)[1], weights)
    buffer.destroy()


def test_wrong_arguments(pair):
    pair.run(refused)
