"""Switchyard as a guest in somebody's process: import, fork, signals, exit, threads."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from world import free_port

import switchyard as sw
from switchyard import errors
from switchyard._core import native

HERE = Path(__file__).resolve().parent


def start(code: str, rank: int = 0, size: int = 1, port: int = 0, **kwargs) -> subprocess.Popen:
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "SWITCHYARD_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)],
        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=hears_ctrl_c, **kwargs,
    )  # fmt: skip


def hears_ctrl_c() -> None:
    """Jobs in the background ignore it, and so do their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ranks(code: str, size: int) -> list[subprocess.Popen]:
    port = free_port()
    return [start(code, rank, size, port) for rank in range(size)]


def end(process: subprocess.Popen, text: str = "", timeout: float = 100) -> str:
    try:
        out, err = process.communicate(text, timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            out, err = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            out, err = "", "a child of it lives on"
        pytest.fail(f"did not end within {timeout} s\n{out}\n{err}")
    assert process.returncode == 0, f"{process.returncode}\n{out}\n{err}"
    return out


def test_import_loads_nothing():
    code = """
        import sys, threading
        import switchyard
        assert not {"torch", "numpy", "ctypes"} & set(sys.modules), sys.modules
        assert "libswitchyard" not in open("/proc/self/maps").read()
        assert threading.active_count() == 1
        switchyard.Communicator, switchyard.Dispatcher
        assert "libswitchyard" not in open("/proc/self/maps").read()
    """
    end(start(code))


def test_a_call_after_fork_raises():
    code = """
        import os, sys, time
        import numpy as np
        import switchyard as sw
        comm = sw.init(0, 1)
        kept = sw.empty(4, dtype="f4")
        d = sw.Dispatcher(2, 1, 4)
        rows = d.dispatch(np.ones((3, 4), "f4"), np.zeros((3, 1), int), np.ones((3, 1)))
        pid = os.fork()
        if pid == 0:
            for call in (lambda: sw.all_reduce(np.ones(3)), sw.barrier, comm.close, lambda: sw.init(0, 1),
                         lambda: sw.empty(3, dtype="f4"), lambda: d.combine(rows.rows, rows)):
                try:
                    call()
                except sw.errors.Forked as err:
                    assert "spawn" in str(err)
                else:
                    os._exit(3)
            del rows, d, comm, kept  # nothing of it calls the library
            sys.exit(0)  # and neither does the end of the interpreter
        _, status = os.waitpid(pid, 0)
        assert status == 0, status
        x = np.ones(3)
        sw.all_reduce(x)  # the parent goes on
        assert x.tolist() == [1, 1, 1]
    """
    end(start(code))


def test_fork_before_the_first_call_is_fine():
    code = """
        import os
        import numpy as np
        import switchyard as sw
        pid = os.fork()
        with sw.init(0, 1):
            sw.all_reduce(np.ones(3))
        if pid:
            assert os.waitpid(pid, 0)[1] == 0
    """
    end(start(code))


def test_exit_with_work_under_way_that_peers_complete():
    code = """
        import numpy as np
        import switchyard as sw
        comm = sw.init()
        for k in range(20):
            sw.all_to_all_single(np.empty(500_000), np.full(500_000, float(k)), async_op=True)
    """
    for process in ranks(code, 2):
        end(process)


def test_exit_with_work_under_way_that_nobody_completes():
    code = """
        import sys
        import numpy as np
        import switchyard as sw
        comm = sw.init()
        if comm.rank == 0:
            sw.all_to_all_single(np.empty(500_000), np.ones(500_000), async_op=True)
        else:
            sys.stdin.read()
            try:
                sw.barrier()
            except (sw.errors.PeerLost, sw.errors.Aborted) as err:
                assert err.rank == 0, err
            else:
                sys.exit(3)
    """
    first, second = ranks(code, 2)
    began = time.monotonic()
    end(first)
    assert time.monotonic() - began < 25
    end(second)


def test_a_rank_that_has_left_is_named():
    code = """
        import sys
        import switchyard as sw
        comm = sw.init()
        sw.barrier()
        print("met", flush=True)
        if comm.rank == 0:
            try:
                sw.barrier()
            except sw.errors.PeerLost as err:
                assert err.rank == 1 and "closed its end" in str(err), err
            else:
                sys.exit(3)
        else:
            sys.stdin.read()  # the end of a rank may overtake others in the barrier
    """
    first, second = ranks(code, 2)
    assert first.stdout.readline() == "met\n"
    began = time.monotonic()
    end(second)
    end(first)
    assert time.monotonic() - began < 25


def test_a_barrier_that_a_rank_does_not_come_to():
    code = """
        import sys
        import switchyard as sw
        comm = sw.init(timeout=4)
        sw.barrier()
        if comm.rank == 1:
            sys.stdin.read()  # until the other has given up
        else:
            try:
                sw.barrier()
            except sw.errors.TimedOut as err:
                assert err.rank == 1, err
                print(err)
    """
    first, second = ranks(code, 2)
    said = end(first)
    assert "barrier: rank 1, call 2: Timed out after 4s: rank 1 has made 1 call; this is call 2, barrier" in said
    second.communicate()


def test_a_lost_rank_is_named():
    code = """
        import os, sys
        import switchyard as sw
        comm = sw.init()
        sw.barrier()
        if comm.rank == 1:
            sys.stdin.read()
            os.kill(os.getpid(), 9)
        print("met", flush=True)
        try:
            sw.barrier()
        except sw.errors.PeerLost as err:
            assert err.rank == 1, err
        else:
            sys.exit(3)
    """
    first, second = ranks(code, 2)
    assert first.stdout.readline() == "met\n"  # its end may overtake others in the barrier
    second.communicate()
    began = time.monotonic()
    end(first)
    assert time.monotonic() - began < 25


WAITING = """
    import signal, sys, time
    import numpy as np
    import switchyard as sw
    comm = sw.init()
    x = np.full(2, comm.rank + 1.0)
    if comm.rank == 1:
        calls = sys.stdin.readline()
        sw.all_reduce(x)
        if calls == "2\\n":
            sw.all_reduce(np.ones(0))
        sys.exit(0)
    seen = []
    signal.signal(signal.SIGUSR1, lambda *_: (seen.append(1), print("handled", flush=True)))
    print("waiting", flush=True)
    try:
        sw.all_reduce(x)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sw.all_reduce(np.ones(0))  # comes behind the call that was interrupted, which goes on
        assert x.tolist() == [3, 3]
    print("done", seen, x.tolist(), flush=True)
"""


def test_ctrl_c_ends_a_wait_and_leaves_the_group_whole():
    first, second = ranks(WAITING, 2)
    assert first.stdout.readline() == "waiting\n"
    time.sleep(1)
    began = time.monotonic()
    first.send_signal(signal.SIGINT)
    assert first.stdout.readline() == "interrupted\n"
    assert time.monotonic() - began < 20
    second.stdin.write("2\n")
    second.stdin.flush()
    assert "done [] [3.0, 3.0]" in end(first)
    end(second)


def test_signal_handlers_run_during_a_wait():
    first, second = ranks(WAITING, 2)
    assert first.stdout.readline() == "waiting\n"
    for _ in range(3):
        time.sleep(0.2)
        first.send_signal(signal.SIGUSR1)
        assert first.stdout.readline() == "handled\n"
    second.stdin.write("1\n")
    second.stdin.flush()
    assert "done [1, 1, 1] [3.0, 3.0]" in end(first)
    end(second)


def test_ctrl_c_ends_a_join():
    code = """
        import switchyard as sw
        print("joining", flush=True)
        try:
            sw.init()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    process = start(code, 0, 2, free_port())
    assert process.stdout.readline() == "joining\n"
    time.sleep(1)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert end(process) == "interrupted\n"
    assert time.monotonic() - began < 20


def test_errors_belong_to_their_thread():
    lib = native.library()
    barrier, texts = threading.Barrier(8), {}

    def fail(k: int) -> None:
        for _ in range(50):
            barrier.wait()
            code = lib.verify(10_000 + k, 0, native.c_uint64())
            barrier.wait()
            texts.setdefault(k, set()).add(str(lib.error(code)))

    threads = [threading.Thread(target=fail, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert texts == {k: {f"switchyard: invalid argument: handle {10_000 + k} is not in use"} for k in range(8)}


def test_handles_and_memory_are_given_back():
    lib = native.library()
    sw.init(0, 1).close()
    before, fds = lib.live(), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with sw.init(0, 1, default=False) as comm:
            x = sw.empty(1000, dtype="f4", group=comm)
            sw.all_reduce(x, group=comm)
            sw.free(x)
            d = sw.Dispatcher(4, 2, 8, group=comm)
            got = d.dispatch(np.ones((3, 8), "f4"), [[0, 1]] * 3, np.ones((3, 2)))
            assert d.combine(got.rows, got).tolist() == [[2.0] * 8] * 3
            del got
            d.close()
        del comm, d, x
    assert lib.live() == before
    assert len(os.listdir("/proc/self/fd")) <= fds + 2


def test_symmetric_arrays_outlive_their_group():
    comm = sw.init(0, 1, default=False)
    x = sw.empty(1000, dtype="f4", group=comm)
    x.fill(3)
    comm.close()
    assert x.sum() == 3000
    with pytest.raises(errors.Closed):
        sw.barrier(group=comm)
    comm.close()  # again


# A library as a profiler injects it: it writes down the names of the ranges that it is told of.
PROFILER = """
    #include <stddef.h>
    #include <stdint.h>
    #include <stdio.h>
    #include <stdlib.h>

    typedef void (*function)(void);
    typedef struct { size_t bytes; int (*table)(int, function ***, unsigned int *); } callbacks;

    typedef struct {
        uint16_t version, size;
        uint32_t category;
        int32_t color_kind;
        uint32_t color;
        int32_t payload_kind, reserved;
        int64_t payload;
        int32_t message_kind;
        const char *message;
    } attributes;

    static FILE *out;
    static uint64_t start(const attributes *a)
    {
        fprintf(out, "%s, %ld\\n", a->message, a->payload_kind == 2 ? a->payload : -1L);
        fflush(out);
        return 1;
    }
    static void end(uint64_t range) { }

    int InitializeInjectionNvtx2(const void *(*export)(uint32_t))
    {
        function **table;
        unsigned int size;
        const callbacks *c = export(1);
        if (!c->table(1, &table, &size) || !(out = fopen(getenv("RANGES"), "w")))
            return 0;
        *table[4] = (function)start;
        *table[7] = (function)end;
        return 1;
    }
"""


def test_a_profiler_is_told_of_calls(tmp_path, monkeypatch):
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("no C compiler to make a profiler with")
    source, lib, said = tmp_path / "profiler.c", tmp_path / "profiler.so", tmp_path / "ranges"
    source.write_text(PROFILER)
    subprocess.run([cc, "-shared", "-fPIC", "-o", lib, source], check=True)
    code = """
        import os, sys
        import numpy as np
        import switchyard as sw
        os.environ["SWITCHYARD_NVTX"] = sys.stdin.read()  # later than Go's own environment
        try:
            sw.init(0, 1)
        except ValueError as err:
            print(err)
            sys.exit()
        sw.all_reduce(np.ones(3))
    """
    monkeypatch.setenv("NVTX_INJECTION64_PATH", str(lib))
    monkeypatch.setenv("RANGES", str(said))
    assert 'SWITCHYARD_NVTX is "yes", want 0 or 1' in end(start(code), "yes")
    assert end(start(code), "0") == ""
    assert not said.exists()
    assert end(start(code), "1") == ""
    assert "all-reduce, 24\n" in said.read_text()  # and the bytes of its input


def test_ranks_that_do_not_come_are_named():
    with pytest.raises(errors.TimedOut, match="1"):
        sw.init(0, 2, f"127.0.0.1:{free_port()}", join_timeout=0.5)


def test_the_library_does_not_import_nvml():
    # A shared library that does, does not load: its symbols are missing (DESIGN, section 4).
    go = shutil.which("go")
    root = HERE.parents[2]
    if go is None or not (root / "go.mod").exists():
        pytest.skip("needs the Go toolchain and the sources")
    packages = subprocess.run(
        [go, "list", "-deps", "./bindings/python/abi"], cwd=root, check=True, capture_output=True, text=True
    ).stdout.split()
    assert "github.com/switchyard-moe/switchyard/alltoallv" in packages
    assert not [p for p in packages if "nvml" in p.lower()]
