"""Execution plans of MSCCL++, converted and run on arrays of the host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_plans import join, meeting

import switchyard as sw

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "plans" / "from_mscclpp.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="the examples are not here")


def gpu(rank, size, buffers, blocks, kind="memory", **more):
    """A GPU with a channel to each other one, and remote buffers of each of these types on each of them."""
    peers = [p for p in range(size) if p != rank]
    remote = [{"rank": p, "type": t, "access_channel_types": [kind]} for t in buffers for p in peers]
    return {
        "id": rank, "channels": [{"channel_type": kind, "connected_to": peers}], "remote_buffers": remote,
        "threadblocks": [
            {
                "id": i, "ops": ops,
                "channels": [{"channel_type": kind, "channel_ids": list(range(len(peers)))}],
                "remote_buffer_refs": [{"access_channel_type": kind, "remote_buffer_ids": list(range(len(remote)))}],
            }
            for i, ops in enumerate(blocks)
        ],
        **more,
    }  # fmt: skip


def local(kind, index, size=1):
    return {"type": kind, "index": index, "size": size}


def remote(number, index, size=1):
    return {"buffer_id": number, "index": index, "size": size}


def described(name, collective, gpus, inplace=True):
    return {"name": name, "collective": collective, "inplace": inplace, "protocol": "Simple", "gpus": gpus}


def reduces(size):
    """In place: a thread block meets the peers, another reads, adds and writes everybody's chunk of its rank."""
    to_all = {"channel_ids": list(range(size - 1)), "channel_type": "memory"}
    gpus = []
    for rank in range(size):
        chunks = [local("i", rank), *(remote(k, rank) for k in range(size - 1))]
        add = {"name": "rres", "src_buff": chunks, "dst_buff": chunks, "channel_type": "memory", "reduce_op": "sum"}
        meets = [
            {"name": "rlxsignal", **to_all}, {"name": "rlxwait", **to_all}, {"name": "nop"},
            {"name": "barrier", "barrier_id": 0, "num_threadblocks": 2}, {"name": "sem_acquire", "semaphore_ids": [0]},
            {"name": "signal", **to_all}, {"name": "wait", **to_all},
        ]  # fmt: skip
        adds = [
            {"name": "barrier", "barrier_id": 0, "num_threadblocks": 2},
            {"name": "pipeline", "iter_context": {"unit_size": 1 << 20, "num_chunks": 1}, "ops": [add]},
            {"name": "sem_release", "semaphore_ids": [0]},
        ]
        # The block that waits for the other comes first or last.
        blocks = [meets, adds] if rank % 2 else [adds, meets]
        gpus.append(gpu(rank, size, "i", blocks, input_chunks=size, output_chunks=size, scratch_chunks=0,
                        semaphores=[{"init_value": 0}]))  # fmt: skip
    return described("theirs", "allreduce", gpus)


def gathers(size):
    """Packets, by groups of two thread blocks: one sends to all, one unpacks what has come."""
    gpus = []
    for rank in range(size):
        sent = [
            {
                "name": "rppkt", "src_buff": [local("s", rank)], "dst_buff": [remote(p, rank) for p in range(size - 1)],
                "channel_type": "memory", "tbg_info": {"tb_id": k, "tbg_size": 2},
            }
            for k in (0, 1)
        ]  # fmt: skip
        own = {"name": "cpkt", "src_buff": [local("o", rank)], "dst_buff": [local("s", rank)]}
        others = [p for p in range(size) if p != rank]
        unpack = [{"name": "upkt", "src_buff": [local("s", p)], "dst_buff": [local("o", p)]} for p in others]
        gpus.append(gpu(rank, size, "s", [unpack, sent[1:], [own, sent[0]]], input_chunks=1, output_chunks=size,
                        scratch_chunks=size))  # fmt: skip
    return described("theirs", "allgather", gpus)


def scatters(size):
    """In place, a put with a signal in one, by a proxy: everybody sends each peer its slice, which is then added."""
    gpus = []
    for rank in range(size):
        peers = [p for p in range(size) if p != rank]
        ops = [
            {
                "name": "pwsf", "src_buff": [local("i", 2 * p, 2)], "dst_buff": [remote(k, 2 * rank, 2)], "channel_ids": [k],
                "channel_type": "port",
            }
            for k, p in enumerate(peers)
        ]  # fmt: skip
        ops.append({"name": "wait", "channel_ids": list(range(size - 1)), "channel_type": "port"})
        terms = [local("i", 2 * rank, 2), *(local("s", 2 * p, 2) for p in peers)]
        ops.append({"name": "re", "src_buff": terms, "dst_buff": [local("i", 2 * rank, 2)], "reduce_op": "sum"})
        gpus.append(gpu(rank, size, "s", [ops], "port", input_chunks=2 * size, output_chunks=2, scratch_chunks=2 * size))
    return described("theirs", "reducescatter", gpus)


def turns(size):
    """Not in place: everybody reads its slices."""
    gpus = []
    to_all = {"channel_ids": list(range(size - 1)), "channel_type": "memory"}
    for rank in range(size):
        peers = [p for p in range(size) if p != rank]
        ops = [
            {"name": "copy", "src_buff": [local("i", rank)], "dst_buff": [local("o", rank)]},
            {
                "name": "get", "channel_type": "memory",
                "src_buff": [remote(k, rank) for k in range(size - 1)], "dst_buff": [local("o", p) for p in peers],
            },
            {"name": "signal", **to_all}, {"name": "wait", **to_all},
        ]  # fmt: skip
        gpus.append(gpu(rank, size, "i", [ops], input_chunks=size, output_chunks=size, scratch_chunks=0))
    return described("theirs", "alltoall", gpus, inplace=False)


def converted(tmp_path, plan):
    theirs = tmp_path / "theirs.json"
    theirs.write_text(json.dumps(plan))
    return subprocess.run([sys.executable, str(SCRIPT), str(theirs)], capture_output=True, text=True, timeout=600, check=False)


def runs(rank, size, name, plan):
    kind, total = plan["collective"], sum(range(size))
    with join(rank, size, name, plans=[plan], algorithm="theirs") as comm:
        for n in (1, 7, 5000):
            whole, slice_ = np.arange(size * n, dtype="float32"), slice(rank * n, (rank + 1) * n)
            x, y = whole + rank, np.zeros(size * n, "float32")
            if kind == "all-reduce":
                assert sw.explain(x, x, group=comm, call="all_reduce").startswith("plan theirs (forced)")
                sw.all_reduce(x, group=comm)
                np.testing.assert_array_equal(x, size * whole + total)
            elif kind == "reduce-scatter":
                assert sw.explain(y[:n], x, group=comm, call="reduce_scatter_tensor").startswith("plan theirs (forced)")
                sw.reduce_scatter_tensor(y[:n], x, group=comm)
                np.testing.assert_array_equal(y[:n], (size * whole + total)[slice_])
            elif kind == "all-gather":
                assert sw.explain(y, x[:n], group=comm, call="all_gather_into_tensor").startswith("plan theirs (forced)")
                sw.all_gather_into_tensor(y, x[:n], group=comm)
                np.testing.assert_array_equal(y, np.concatenate([whole[:n] + r for r in range(size)]))
            else:
                sw.all_to_all_by_plan(y, x, comm)
                np.testing.assert_array_equal(y, np.concatenate([whole[slice_] + r for r in range(size)]))


@pytest.mark.parametrize("make", [reduces, gathers, scatters, turns])
def test_a_converted_plan_runs(plain, tmp_path, make):
    done = converted(tmp_path, make(plain.size))
    assert done.returncode == 0, done.stderr
    plain.run(runs, meeting(), json.loads(done.stdout))


def spoiled(change):
    plan = reduces(2)
    change(plan)
    return plan


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (spoiled(lambda p: p.update(collective="sendrecv")), "collective 'sendrecv', want one of allreduce, "),
        (spoiled(lambda p: p["gpus"][1].pop("scratch_chunks")), "no 'scratch_chunks' where execution plans have one"),
        (
            spoiled(lambda p: p["gpus"][0]["threadblocks"][1]["ops"].insert(0, {"name": "gstore"})),
            "GPU 0, thread block 1: operation 'gstore' has no counterpart",
        ),
        (
            spoiled(lambda p: p["gpus"][1]["threadblocks"][1]["ops"].pop()),
            "GPU 0, thread block 1 waits for ever in {\"name\": \"wait\"",
        ),
        ([], "no execution plan"),
    ],
)
def test_what_cannot_be_converted(tmp_path, plan, said):
    done = converted(tmp_path, plan)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stdout == ""
