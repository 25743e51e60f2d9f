"""Messages, puts, gets and signals between two ranks, on arrays."""

from __future__ import annotations

import random
import time

import pytest
from world import hears_of

import switchyard as sw

np = pytest.importorskip("numpy")


def against_a_model(rank, size):
    for n in range(20):
        rnd, mine = random.Random(n), random.Random(100 * n + rank)
        plan = {}  # (src, dst, tag): arrays in order
        for i in range(30):
            src, dst = rnd.sample(range(size), 2)
            shape = (rnd.randrange(1 << rnd.randrange(16)), rnd.randrange(1, 4))
            kind = rnd.choice(["u1", "f4", "c16"])
            x = (np.arange(np.prod(shape)) * 3 + i).astype(kind).reshape(shape)
            plan.setdefault((src, dst, rnd.randrange(3)), []).append(x)
        lines = [([*arrays], key) for key, arrays in plan.items() if rank in key[:2]]
        work, got = [], []
        while lines:
            ops = []
            for _ in range(mine.randrange(1, 4)):
                if not lines:
                    break
                line = mine.choice(lines)
                x, (src, dst, tag) = line[0].pop(0), line[1]
                if not line[0]:
                    lines.remove(line)
                if src == rank:
                    ops.append(sw.P2POp(sw.isend, x, dst, tag=tag))
                else:
                    out = np.empty_like(x)
                    got.append((out, x))
                    ops.append(sw.P2POp(sw.irecv, out, src, tag=tag))
            if len(ops) == 1 and mine.random() < 0.5:
                work.append(ops[0].op(ops[0].tensor, ops[0].peer, tag=ops[0].tag))
            else:
                work += sw.batch_isend_irecv(ops)
        mine.shuffle(work)
        for each in work:
            each.wait()
        for out, want in got:
            assert np.array_equal(out, want)
    sw.barrier()


def rings(rank, size):
    for n in (0, 1, 100, 10_000, 5_000_000):
        x, out = np.full(n, rank, "i4"), np.full(n, -1, "i4")
        sw.send(x, (rank + 1) % size, tag=n)  # all send first
        x[:] = -2
        assert sw.recv(out, (rank - 1) % size, tag=n) == (rank - 1) % size
        assert (out == (rank - 1) % size).all()
    out = np.empty(1, "i4")
    if rank == 0:
        assert sorted(sw.recv(out, tag=1) for _ in range(size - 1)) == list(range(1, size))
        work = [sw.irecv(np.empty(1, "i4"), tag=2) for _ in range(size - 1)]
        for each in work:
            each.wait()
        assert sorted(each.source_rank() for each in work) == list(range(1, size))
    else:
        for tag in (1, 2):
            sw.isend(np.full(1, rank, "i4"), 0, tag=tag)  # nobody keeps the work or the array
    sw.barrier()


def symmetric(rank, size):
    x = sw.empty(4, dtype=np.int64)
    x[:] = -1
    sw.barrier()
    for n in range(100):
        sw.put(np.full(2, 1000 * rank + n), x[1:3], (rank + 1) % size)
        sw.signal((rank + 1) % size, 5)
        sw.wait((rank - 1) % size, 5)
        assert x.tolist() == [-1, *[1000 * ((rank - 1) % size) + n] * 2, -1]
        got = np.empty(1, np.int64)
        sw.get(got, x[:1], (rank + 1) % size)
        assert got[0] == -1
        sw.signal((rank - 1) % size, 0)  # it may put again
        sw.wait((rank + 1) % size, 0)
    sw.barrier()
    sw.free(x)


def refused(rank, size):
    x = np.ones(3)
    for kind, words, call in (
        (ValueError, f"dst is {rank}, want another of the {size} ranks than {rank}", lambda: sw.send(x, rank)),
        (ValueError, f"src is {size}, want another", lambda: sw.recv(x, size)),
        (TypeError, "dst is None, want an integer", lambda: sw.send(x, None)),
        (ValueError, "tag is -1, want at least 0", lambda: sw.send(x, (rank + 1) % size, tag=-1)),
        (TypeError, "tensor is a str", lambda: sw.send("x", (rank + 1) % size)),
        (ValueError, "tensor is not contiguous", lambda: sw.send(np.ones((3, 3)).T, (rank + 1) % size)),
        (ValueError, "semaphore is 8, want 0 to 7", lambda: sw.signal((rank + 1) % size, 8)),
        (ValueError, "put: tensor has 24 bytes, at 8", lambda: sw.put(x, np.ones(1), (rank + 1) % size)),
        (TypeError, "put: tensor is int64, at float64", lambda: sw.put(np.ones(1, np.int64), np.ones(1), (rank + 1) % size)),
        (ValueError, "symmetric", lambda: sw.put(x, x, (rank + 1) % size)),
        (ValueError, "streams are for CUDA tensors", lambda: sw.put(x, x, (rank + 1) % size, stream=7)),
        (ValueError, "streams are for CUDA tensors", lambda: sw.isend(x, (rank + 1) % size, stream=7)),
        (ValueError, "the list is empty", lambda: sw.batch_isend_irecv([])),
        (TypeError, r"p2p_op_list\[0\] is 3", lambda: sw.batch_isend_irecv([3])),
    ):
        with pytest.raises(kind, match=words):
            call()
    sw.barrier()


def disagreements(rank, size):
    # A large message: both get both sizes in this call, unless the receiver was late and the sender done with it. Of a
    # small one its sender hears in its next send, which has sent nothing.
    if rank == 0:
        told = hears_of(lambda: sw.send(np.ones(50_000), 1), "sends 400000 bytes to rank 1, which expects 8")
        sw.barrier()
        assert told or hears_of(lambda: sw.send(np.ones(3), 1), "sends 400000 bytes to rank 1, which expects 8")
        sw.send(np.ones(3), 1)
        sw.barrier()
        with pytest.raises(sw.errors.Mismatch, match="sends 24 bytes to rank 1, which expects 16"):
            sw.send(np.ones(2), 1)
        sw.send(np.full(2, 7.0), 1)
    elif rank == 1:
        with pytest.raises(sw.errors.Mismatch, match="sends 400000 bytes to rank 1, which expects 8"):
            sw.recv(np.ones(1), 0)
        sw.barrier()
        with pytest.raises(sw.errors.Mismatch, match="sends 24 bytes to rank 1, which expects 16"):
            sw.recv(np.ones(2), 0)
        sw.barrier()
        out = np.ones(2)
        sw.recv(out, 0)
        assert out.tolist() == [7, 7]
    else:
        sw.barrier()
        sw.barrier()
    sw.barrier()


@pytest.mark.parametrize("case", [against_a_model, rings, symmetric, refused, disagreements], ids=lambda f: f.__name__)
def test_pairs(plain, case):
    plain.run(case)


def nobody_receives(rank, size, port):
    with sw.init(rank, size, f"127.0.0.1:{port}", timeout=4, default=False) as comm:
        if rank == 0:
            began = time.monotonic()
            words = r"tag 3, 8 bytes from rank 1.*rank 1 has sent what rank 0 has not received: tag 4, 16 bytes"
            with pytest.raises(sw.errors.TimedOut, match=words) as e:
                sw.recv(np.ones(1), 1, comm, 3)
            assert e.value.rank == 1
            assert time.monotonic() - began < 20
        else:
            sw.send(np.ones(2), 0, comm, 4)
            time.sleep(6)  # in no call when the other gives up, and in the barrier before that ends
        sw.barrier(comm)
        if rank == 0:
            sw.recv(np.ones(2), 1, comm, 4)
        sw.barrier(comm)


def test_a_tag_that_nobody_sends(worlds):
    from world import free_port, plain

    worlds.get(2, plain).run(nobody_receives, free_port())
