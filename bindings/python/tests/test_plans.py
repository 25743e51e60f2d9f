"""Plans of collectives, for arrays of the host."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from world import free_port

import switchyard as sw
from switchyard import errors
from switchyard._core import algorithms

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "plans"


def exchanged(size: int, rank: int, put: str, to: str) -> list[dict]:
    """Steps of a rank that puts something to all others, where each has a chunk for it, and waits for theirs."""
    steps = []
    for peer in [(rank + i) % size for i in range(1, size)]:
        steps.append({"do": "put", "from": [put.format(peer=peer)], "to": f"{to}:{rank}@{peer}"})
        steps.append({"do": "signal", "peer": peer})
    steps += [{"do": "wait", "peer": peer} for peer in range(size) if peer != rank]
    return steps


def all_reduce(size: int, **more: object) -> dict:
    """Everybody adds everything."""
    programs = []
    for rank in range(size):
        terms = ["input:0" if r == rank else f"scratch:{r}" for r in range(size)]
        steps = exchanged(size, rank, "input:0", "scratch")
        programs.append([*steps, {"do": "reduce", "from": terms, "to": "output:0"}])
    return {
        "name": "own", "collective": "all-reduce", "ranks": size, "chunks": 1, "scratch": size, "programs": programs, **more,
    }  # fmt: skip


def all_to_all(size: int) -> dict:
    """Everybody writes the others' outputs."""
    programs = []
    for rank in range(size):
        steps = exchanged(size, rank, "input:{peer}", "output")
        programs.append([{"do": "copy", "from": [f"input:{rank}"], "to": f"output:{rank}"}, *steps])
    return {"name": "direct", "collective": "all-to-all", "ranks": size, "chunks": 1, "programs": programs}


def noted(plan: str) -> bool:
    """Whether this process has made all-reduces by a plan. The answer may be 100 ms old."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any(
            o["operation"] == "all-reduce" and o.get("algorithm") == plan
            for r in sw.metrics()["ranks"] for o in r["operations"]
        ):  # fmt: skip
            return True
    return False


def join(rank, size, name, **options):
    return sw.init(rank, size, f"@{name}", timeout=60, default=False, **options)


def meeting() -> str:
    return f"switchyard-plans-{uuid.uuid4().hex}"


def reduces(rank, size, name, path, how):
    plan = all_reduce(size)
    given = {"path": path, "text": str(path), "dict": plan}[how]
    with join(rank, size, name, plans=[given], algorithm="own") as comm:
        for n in (0, 1, 7, 100_000):
            x = np.arange(n, dtype="float32") + rank
            why = sw.explain(x, x, group=comm, call="all_reduce")
            assert why.startswith("plan own (forced)"), why
            sw.all_reduce(x, group=comm)
            np.testing.assert_array_equal(x, size * np.arange(n, dtype="float32") + sum(range(size)))
        work = sw.all_reduce(x, "max", comm, async_op=True)
        work.wait()
        assert noted("own")
        # Another collective takes what is chosen for it.
        y, part = np.ones(4 * size, "float32"), np.zeros(4, "float32")
        assert "plan" not in sw.explain(part, y, group=comm, call="reduce_scatter_tensor").splitlines()[0]
        sw.reduce_scatter_tensor(part, y, group=comm)
        assert part.tolist() == [size] * 4


@pytest.mark.parametrize("how", ["path", "text", "dict"])
def test_reductions_by_a_plan(plain, tmp_path, how):
    path = tmp_path / "own.json"
    path.write_text(json.dumps(all_reduce(plain.size)))
    plain.run(reduces, meeting(), path, how)


def times(rank, size, name):
    plan = all_reduce(size, bytes=[1 << 10, 1 << 16], us=[0.5, 5000.0])
    with join(rank, size, name, plans=[plan]) as comm:
        small, large = np.ones(64, "float32"), np.ones(1 << 17, "float32")
        assert sw.explain(small, small, group=comm, call="all_reduce").startswith("plan own (lowest estimate)")
        why = sw.explain(large, large, group=comm, call="all_reduce")
        assert not why.startswith("plan own")
        assert "as the plan says" in why
        for x in (small, large):
            sw.all_reduce(x, group=comm)
            assert (x == size).all()


def test_times_choose_a_plan(plain):
    plain.run(times, meeting())


def exchanges(rank, size, name):
    with join(rank, size, name, plans=[all_to_all(size)]) as comm:
        for dtype in ("float32", "int8", "complex128", "datetime64[s]"):
            for n in (0, 1, 3, 5000):
                x = np.arange(size * n).astype(dtype).reshape(size * n, 1)
                x += np.asarray(rank).astype(dtype.replace("datetime64", "timedelta64"))
                want = np.concatenate([np.arange(size * n)[rank * n : (rank + 1) * n] + r for r in range(size)]).astype("i8")
                y = np.zeros_like(x)
                assert sw.all_to_all_by_plan(y, x, comm) is None
                np.testing.assert_array_equal(y[:, 0], want.astype("i8").astype(dtype))
                sw.all_to_all_by_plan(x, x, comm, async_op=True).wait()
                np.testing.assert_array_equal(x, y)
        assert sw.explain(y, x, group=comm, call="all_to_all_by_plan").startswith("plan direct")
        with pytest.raises(errors.InvalidArgument, match=r"output has shape \(1, 1\), input"):
            sw.all_to_all_by_plan(y[:1], x, comm)
        with pytest.raises(errors.InvalidArgument, match="has no split sizes"):
            sw.explain(y, x, [1] * size, group=comm, call="all_to_all_by_plan")
    x, y = np.ones(size), np.zeros(size)
    with pytest.raises(errors.Unsupported, match="no plan of 0 does that"):
        sw.all_to_all_by_plan(y, x)
    with pytest.raises(errors.InvalidArgument, match="call 'all_to_all', want"):
        sw.explain(y, x, call="all_to_all")
    sw.all_to_all_single(y, x)
    assert y.tolist() == x.tolist()


def test_all_to_alls_by_a_plan(plain):
    plain.run(exchanges, meeting())


def spoiled(size: int) -> list[tuple[dict, str]]:
    """Plans that are wrong, with what is said of them."""
    good = all_reduce(size)

    def but(change):
        plan = copy.deepcopy(good)
        change(plan)
        return plan

    def early(plan):  # all wait before they signal
        plan["programs"] = [sorted(p, key=lambda s: s["do"] != "wait") for p in plan["programs"]]

    def unordered(plan):  # rank 0 adds before it has waited
        plan["programs"][0].sort(key=lambda s: s["do"] == "wait")

    def backwards(plan):
        plan["programs"][0][-1]["from"].reverse()

    def undone(plan):
        plan["programs"][0].pop()

    return [
        (but(early), "a cycle: each waits for the next, and the last for the first: rank 0, step 0 (wait for rank 1"),
        (but(unordered), '"own": '),
        (but(undone), "a hole: nothing writes output:0 of rank 0, which should be input:0 of all ranks"),
        (but(backwards), "their bits may differ"),
        (but(lambda p: p.update(ranks=size + 1)), f"{size} programs for {size + 1} ranks"),
        (but(lambda p: p.update(steps=[])), 'unknown field "steps"'),
    ]


def refused(rank, size, names, path):
    for (plan, said), name in zip(spoiled(size), names):
        for given in (plan, path):
            if rank == 0 and given == path:
                Path(path).write_text(json.dumps(plan))
            sw.barrier()
            with pytest.raises(errors.InvalidArgument) as e:
                join(rank, size, f"{name}{given == path}", plans=[given])
            assert said in str(e.value)
            assert "plan: " in str(e.value)
            assert (path in str(e.value)) == (given == path)
            sw.barrier()
            # Others hear what is wrong with the plan of one.
            own = [given] if rank == size - 1 else [all_reduce(size)]
            with pytest.raises(errors.InvalidArgument, match=None if own[0] is given else f"rank {size - 1} refused: ") as e:
                join(rank, size, f"{name}{given == path}one", plans=own)
            assert said in str(e.value)
    with join(rank, size, names[-1] + "good", plans=[all_reduce(size)], algorithm="own") as comm:
        x = np.ones(3)
        sw.all_reduce(x, group=comm)
        assert x.tolist() == [size] * 3


def test_wrong_plans_are_refused_on_all_ranks(plain, tmp_path):
    plain.run(refused, [meeting() for _ in spoiled(2)], str(tmp_path / "plan.json"))


def differ(rank, size, names):
    mine = all_reduce(size, bytes=[1024], us=[1.0 + rank])
    with pytest.raises(errors.Mismatch, match=r'plan "own" of digest .* plan "own" of digest '):
        join(rank, size, names[0], plans=[mine])
    with pytest.raises(errors.InvalidArgument, match=f'plan "own" is for {size + 1} ranks, the group has {size}'):
        join(rank, size, names[1], plans=[all_reduce(size + 1)])
    with pytest.raises(errors.InvalidArgument, match='two plans are called "own"'):
        join(rank, size, names[2], plans=[all_reduce(size)] * 2)
    with pytest.raises(errors.InvalidArgument, match='no algorithm is called "other"'):
        join(rank, size, names[3], plans=[all_reduce(size)], algorithm="other")
    with pytest.raises(errors.InvalidArgument, match="no such file"):
        join(rank, size, names[4], plans=["/nowhere/plan.json"])


def test_plans_that_do_not_fit(plain):
    plain.run(differ, [meeting() for _ in range(5)])


def inherited(rank, size, name):
    with join(rank, size, name, plans=[all_reduce(size)], algorithm="own") as comm:
        same, alone = comm.split(0), comm.split(rank)
        x = np.ones(3)
        assert sw.explain(x, x, group=same, call="all_reduce").startswith("plan own (forced)")
        assert "plan" not in sw.explain(x, x, group=alone, call="all_reduce")
        for group, n in ((same, size), (alone, 1)):
            x = np.ones(3)
            sw.all_reduce(x, group=group)
            assert x.tolist() == [n] * 3
        alone.close()
        same.close()


def test_subgroups_have_the_plans_for_their_ranks(plain):
    plain.run(inherited, meeting())


def steps(size):
    """An all-reduce as an algorithm's schedule has it."""
    return {key: all_reduce(size)[key] for key in ("chunks", "scratch", "programs")}


def registers(rank, size, names):
    def cost(nbytes, ranks):
        assert ranks in (2, 3, 4)
        return 0.01 if nbytes <= 4096 else math.inf

    sw.register_algorithm("mine", cost, steps, ranks=(2, 3, 4))
    sw.register_algorithm("turns", lambda n, r: 1, lambda r: {"programs": all_to_all(r)["programs"]}, collective="all-to-all")
    # One for GPUs has the same name, and times of its own, by which calls of the host do not go.
    sw.register_algorithm("mine", lambda n, r: 0.001, steps, ranks=(2, 3, 4), device="cuda")
    sw.register_algorithm("gpus", lambda n, r: 0.001, steps, ranks=(2, 3, 4), device="cuda")
    small, large = np.ones(1024, "float32"), np.ones(1025, "float32")
    with join(rank, size, names[0]) as comm, comm.split(0) as same:
        for group in (comm, same):
            assert sw.explain(small, small, group=group, call="all_reduce").startswith("plan mine (lowest estimate)")
            assert not sw.explain(np.ones(1 << 12), large, group=group, call="all_reduce").startswith("plan")
            for x in (small.copy(), large.copy()):
                sw.all_reduce(x, group=group)
                assert (x == size).all()
            x, y = np.arange(size) + 10 * rank, np.zeros(size, "int64")
            sw.all_to_all_by_plan(y, x, group)
            assert y.tolist() == [10 * r + rank for r in range(size)]
    with join(rank, size, names[1], algorithm="mine") as comm:
        assert sw.explain(large, large, group=comm, call="all_reduce").startswith("plan mine (forced)")
    with join(rank, size, names[6], algorithm="gpus") as comm, comm.split(0) as same:
        for group in (comm, same):
            assert sw.explain(small, small, group=group, call="all_reduce").startswith("plan mine (lowest estimate)")
    with pytest.raises(errors.InvalidArgument, match='two plans are called "mine"'):
        join(rank, size, names[2], plans=[all_reduce(size, name="mine")])
    # Steps that are wrong are not registered, and those from before stay.
    with pytest.raises(errors.InvalidArgument, match="a hole: nothing writes output:0 of rank 0"):
        sw.register_algorithm("mine", cost, lambda size: {"programs": [[]] * size}, ranks=[size])
    with join(rank, size, names[3]) as comm:
        assert sw.explain(small, small, group=comm, call="all_reduce").startswith("plan mine (lowest estimate)")
    with join(0, 1, names[4]) as comm:
        assert "mine" not in sw.explain(small, small, group=comm, call="all_reduce")
    sw.register_algorithm("mine", lambda n, r: 1 + rank, steps, ranks=[size])
    with pytest.raises(errors.Mismatch, match=r'plan "mine" of digest .* plan "mine" of digest '):
        join(rank, size, names[5])
    algorithms._algorithms.clear()  # other tests make groups of these ranks


def test_a_registered_algorithm_is_chosen_by_size(plain):
    plain.run(registers, [meeting() for _ in range(7)])


def rounds(size):
    """The orders of an exchange in which everybody goes round backwards."""
    return [[(rank - i) % size for i in range(1, size)] for rank in range(size)]


EXCHANGE = {"collective": "exchange", "schedule": lambda size: {"orders": rounds(size)}}


def waiting(plan):
    """All wait before they signal."""
    return {**plan, "programs": [sorted(p, key=lambda s: s["do"] != "wait") for p in plan["programs"]]}


def registers_exchanges(rank, size, names, more):
    def cost(nbytes, ranks):
        assert ranks in (size, size + 1)
        return 0.01 if nbytes >= 1 << 14 else math.inf

    def schedule(ranks):
        return {"orders": rounds(ranks), **more}

    sw.register_algorithm("backwards", cost, schedule, collective="exchange", ranks=(size, size + 1))
    # Rank r sends more to those behind it, and no two splits of one are equal. The last rank sends itself nothing.
    rows = [[(10 + 7 * src + 3 * dst) * (src != dst or src < size - 1) for dst in range(size)] for src in range(size)]
    send, receive = rows[rank], [rows[src][rank] for src in range(size)]
    with join(rank, size, names[0]) as comm, comm.split(0) as same, comm.split(rank) as alone:
        for group in (comm, same):
            for scale, chosen in ((1, False), (5000, True), (1, False)):
                to, of = [n * scale for n in send], [n * scale for n in receive]
                x = np.concatenate([np.arange(n, dtype="int16") + 100 * rank + dst for dst, n in enumerate(to)])
                want = np.concatenate([np.arange(n, dtype="int16") + 100 * src + rank for src, n in enumerate(of)])
                y = np.empty_like(want)
                assert sw.explain(y, x, of, to, group=group).startswith("backwards (lowest estimate)") == chosen
                sw.all_to_all_single(y, x, of, to, group)
                np.testing.assert_array_equal(y, want)
                work = sw.all_to_all_single(y, x, of, to, group, async_op=True)
                work.wait()
                np.testing.assert_array_equal(y, want)
        x = np.ones(1 << 16)
        assert "backwards" not in sw.explain(x.copy(), x, group=alone)
    with join(rank, size, names[1], algorithm="backwards") as comm, comm.split(rank) as alone:
        x = np.arange(size)
        y = np.zeros_like(x)
        assert sw.explain(y, x, group=comm).startswith("backwards (forced)")
        assert "forced" not in sw.explain(x, x, group=comm, call="all_reduce")
        sw.all_to_all_single(y, x, group=comm)
        assert y.tolist() == [rank] * size
        assert "forced" not in sw.explain(y, x, group=alone)
    # Ranks that register other algorithms of one name hear of both.
    for name, differs in zip(names[2:], ({"window": rank % 2}, {"staged": rank == 0}, {"chunk_bytes": 4096 + rank})):
        sw.register_algorithm(
            "backwards", cost, lambda n, differs=differs: {"orders": rounds(n), **differs}, collective="exchange", ranks=[size]
        )
        with pytest.raises(errors.Mismatch, match=r"backwards of digest [0-9a-f]{16}.*backwards of digest [0-9a-f]{16}"):
            join(rank, size, name)
    if rank == size - 1:
        algorithms._algorithms.clear()
    else:
        sw.register_algorithm("backwards", cost, schedule, collective="exchange", ranks=[size])
    with pytest.raises(errors.Mismatch, match=r"ring copy backwards of digest"):
        join(rank, size, names[5])
    algorithms._algorithms.clear()


@pytest.mark.parametrize("more", [{}, {"window": 1, "chunk_bytes": 5000}, {"staged": True}])
def test_a_registered_exchange_is_chosen_by_size(plain, more):
    plain.run(registers_exchanges, [meeting() for _ in range(6)], more)


@pytest.mark.parametrize(
    ("kind", "said", "given"),
    [
        (TypeError, "name is None, want a string", {"name": None}),
        (ValueError, "name is '', want a name", {"name": ""}),
        (TypeError, "cost is a float, want a function", {"cost": 3.0}),
        (TypeError, "schedule is None, want a function", {"schedule": None}),
        (ValueError, "collective 'all_reduce', want \"all-reduce\", ", {"collective": "all_reduce"}),
        (ValueError, "device 'gpu', want \"cpu\" or \"cuda\"", {"device": "gpu"}),
        (TypeError, "ranks is an int, want numbers of ranks", {"ranks": 2}),
        (ValueError, "a number of ranks is 1, want at least 2", {"ranks": [2, 1]}),
        (TypeError, r"schedule\(2\) returns a list, want a dict", {"schedule": lambda n: []}),
        (ValueError, r"a dict with \['name'\], want programs, chunks and scratch", {"schedule": lambda n: {"name": "x"}}),
        (ValueError, r"schedule\(2\) returns what is no JSON", {"schedule": lambda n: {"programs": {1}}}),
        (TypeError, r"cost\(64, 2\) is None, want microseconds", {"cost": lambda n, size: None}),
        (ValueError, r"cost\(64, 2\) is -1.0, want positive microseconds", {"cost": lambda n, size: -1}),
        (ValueError, r"cost\(128, 2\) is nan, want positive", {"cost": lambda n, size: 1 if n < 100 else math.nan}),
        (ValueError, "a cycle: each waits for the next", {"schedule": lambda n: waiting(steps(n))}),
        (ValueError, "returns a dict with .*, want orders, window, staged and chunk_bytes", {"collective": "exchange"}),
        *(
            (kind, said, {"collective": "exchange", "ranks": [3], "schedule": lambda n, given=given: given})
            for kind, said, given in [
                (TypeError, r"schedule\(3\) returns a list, want a dict", []),
                (TypeError, r"schedule\(3\) has the orders 3, want a list of peers for every rank", {"orders": 3}),
                (TypeError, r"schedule\(3\) has the orders \[1\], want a list", {"orders": [1]}),
                (TypeError, "a peer in orders is '1', want an integer", {"orders": ["12", "20", "01"]}),
                (ValueError, "a peer in orders is -1, want at least 0", {"orders": [[1, 2], [2, 0], [0, -1]]}),
                (ValueError, r"schedule\(3\) has orders of 2 ranks, want 3", {"orders": [[1, 2], [2, 0]]}),
                (ValueError, "algorithm mine orders 1 peers of rank 2 among 3 ranks", {"orders": [[1, 2], [2, 0], [0]]}),
                (ValueError, r"the order \[1 3\] of rank 0 does not name every", {"orders": [[1, 3], [2, 0], [0, 1]]}),
                (ValueError, "ranks 0 and 2 both send to rank 1 in step 0", {"orders": [[1, 2], [2, 0], [1, 0]]}),
                (TypeError, "window is 1.5, want an integer", {"orders": rounds(3), "window": 1.5}),
                (ValueError, 'algorithm "mine" has a window of 3 peers, want 0 to 2', {"orders": rounds(3), "window": 3}),
                (TypeError, "staged is 1, want True or False", {"orders": rounds(3), "staged": 1}),
                (ValueError, "chunk_bytes is -1, want at least 0", {"orders": rounds(3), "chunk_bytes": -1}),
            ]
        ),
        (ValueError, 'two algorithms are called "direct"', {"name": "direct", **EXCHANGE}),
        (ValueError, 'exchanges is called "one-shot", as one of reductions is', {"name": "one-shot", **EXCHANGE}),
    ],
)
def test_what_is_no_algorithm(kind, said, given):
    args = {"name": "mine", "cost": lambda n, size: 1, "schedule": steps, **given}
    with pytest.raises(kind, match=said):
        sw.register_algorithm(args.pop("name"), args.pop("cost"), args.pop("schedule"), **args)
    assert algorithms.registered() == {}


@pytest.mark.parametrize(
    ("kind", "said", "options"),
    [
        (TypeError, "plans is a str, want a list of paths and of plans as dicts", {"plans": "plan.json"}),
        (TypeError, "plans is a dict, want a list", {"plans": {}}),
        (TypeError, "plans is an int, want a list", {"plans": 3}),
        (TypeError, "plans has an int, want a path, or a plan as a dict", {"plans": [3]}),
        (ValueError, "plans has the path '', want a file", {"plans": [""]}),
        (ValueError, "plans has a dict that is no JSON", {"plans": [{"name": {1}}]}),
        (ValueError, "plans has a dict that is no JSON", {"plans": [{"us": [float("nan")]}]}),
        (TypeError, "algorithm is an int, want a string", {"algorithm": 3}),
    ],
)
def test_options_that_are_no_plans(kind, said, options):
    with pytest.raises(kind, match=said):
        sw.init(0, 1, default=False, **options)


@pytest.mark.parametrize("example", ["own.py", "exchange.py"])
def test_the_examples_run(example):
    if not EXAMPLES.exists():
        pytest.skip("the examples are not here")
    env = {
        **os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "SWITCHYARD_PORT": str(free_port()),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(EXAMPLES / example)],
            env={**env, "RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for r in range(3)
    ]  # fmt: skip
    said = [p.communicate(timeout=600)[0] for p in ranks]
    assert [p.returncode for p in ranks] == [0] * 3, "\n".join(said)
