"""What the package is to those who read it: its modules, its names, its words."""

from __future__ import annotations

import ast
import contextlib
import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import world

import switchyard as sw
from switchyard import errors
from switchyard._core import comm, failures

SOURCE = Path(sw.__file__).resolve().parent


def imports() -> dict[str, set[str]]:
    """Which modules of the package each of them imports, at once or later; those of folders by "folder.module"."""
    known = {".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in SOURCE.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for name in known:
        of = found[name] = set()
        typing: set[int] = set()
        tree = ast.parse(SOURCE.joinpath(*name.split(".")).with_suffix(".py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
                typing.update(id(inner) for inner in ast.walk(node))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level and id(node) not in typing:
                above = name.split(".")[: -node.level]
                base = [*above, *(node.module or "").split(".")] if node.module else above
                candidates = [".".join(base), *(".".join([*base, alias.name]) for alias in node.names)]
                of.update(module for module in candidates if module in known)
    return found


def test_no_module_imports_one_that_imports_it():
    graph = imports()
    assert "_core.native" in graph["_core.comm"]
    assert "_torch.moe" in graph["_sides"]
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*above, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())
    assert {m for m, others in graph.items() if "__init__" in others} <= {"__main__", "_bench"}


def test_folders_import_only_those_below():
    below = {
        "_core": {"_core"}, "_arrays": {"_arrays", "_core"}, "_torch": {"_torch", "_core"}, "layers": {"layers", "triton"},
    }  # fmt: skip
    for module, others in imports().items():
        folder = module.rpartition(".")[0]
        if folder:
            outside = {m for m in others if (m.rpartition(".")[0] or m) not in below[folder] | {"errors", "_once", "_version"}}
            assert not outside, f"{module} imports {outside}"


def test_every_name_is_listed_and_explained():
    assert set(dir(sw)) == {*sw.__all__, "__version__"}
    assert set(errors.__all__) == {name for name, kind in vars(errors).items() if inspect.isclass(kind)}
    assert sw.__version__ == "0.2.0"
    page = pydoc.render_doc(sw, renderer=pydoc.plaintext)
    for name in sw.__all__:
        assert inspect.getdoc(getattr(sw, name)), name
        assert re.search(rf"\b{name}\b", page), name
    for name in errors.__all__:
        assert inspect.getdoc(getattr(errors, name)), name
    for kind in (sw.Communicator, sw.Dispatcher, sw.Dispatched, sw.Work):
        for name, member in inspect.getmembers(kind):
            if not name.startswith("_"):
                assert inspect.getdoc(member), f"{kind.__name__}.{name}"


def test_help_has_what_is_for_users_and_nothing_else():
    def public(kind):
        return {name for name in dir(kind) if not name.startswith("_")}

    users = {"abort", "admit", "check", "close", "rank", "replace", "shrink", "size", "split", "verify"}
    assert public(sw.Communicator) == users
    assert public(sw.Dispatcher) >= {"local_experts", "dispatch", "combine"}
    assert public(sw.Dispatched) >= {"experts", "tokens", "counts"}
    assert "bind" not in public(sw.Dispatcher)
    assert dir(errors) == sorted(errors.__all__)
    for function in (sw.init, sw.communicator, sw.Dispatcher):
        for name in inspect.signature(function).parameters:
            if name not in ("group", "device"):
                assert f"``{name}" in inspect.getdoc(function), f"{function.__name__}: {name}"
    with sw.init(0, 1, default=False) as comm:
        assert (comm.rank, comm.size) == (0, 1)
        d = sw.Dispatcher(4, 2, 8, group=comm)
        assert repr(d) == '<switchyard.Dispatcher rank 0 of 1: 4 experts, top_k 2, hidden 8, float32, layout "flat">'
        got = d.dispatch(np.ones((3, 8), "f4"), [[0, 1]] * 3)
        assert (d.local_experts, got.experts, got.tokens) == ([0, 1, 2, 3], [0, 1, 2, 3], 3)
        assert repr(got) == "<switchyard.Dispatched of 3 tokens: rows of shape (6, 8)>"
        got.release()
        assert repr(got) == "<switchyard.Dispatched of 3 tokens: given back>"
        for name in vars(d):
            assert name.startswith("_") or f"``{name}``" in inspect.getdoc(d), name


def test_the_words_of_errors_are_pythons():
    for text, said in (
        ("alltoallv: comm: alltoallv: rank 1, epoch 1: timed out", "rank 1, call 1: Timed out"),
        ("rank 1 timed out: rank 0 timed out after 8s; this is call 2, alltoallv (late)",
         "rank 1 Timed out: rank 0 timed out after 8s; this is call 2, all_to_all (late)"),
        ("no answer to /etc/alltoallv.json", "Timed out: no answer to /etc/alltoallv.json"),
        ("core: communicator is closed", "communicator is closed"),
    ):  # fmt: skip
        assert str(failures.of(6, text, 1)) == f"switchyard: {said}"
    said = str(failures.of(9, "core: memory: new heap: out of memory: 5 bytes on cuda:0: cuda: cuMemCreate"))
    assert said == "switchyard: new heap: out of memory: 5 bytes on cuda:0: cuda: cuMemCreate"
    said = str(failures.of(2, "invalid argument: source and destination of the all-gather overlap and are not the same memory"))
    assert "output_tensor and input_tensor overlap and are" in said
    said = str(failures.of(2, "alltoallv: invalid argument: Options.NoSMs, Splits.PeerDispls, Options.MaxTokens, MaxRows 3"))
    assert said == "switchyard: invalid argument: no_sms, peer_displs, max_tokens, max_rows 3"


def test_wrong_arguments_are_named():
    with sw.init(0, 1, default=False) as comm:
        x, y, floats = np.zeros((12, 2), "f4"), np.zeros((8, 2), "f4"), np.array([12.0])
        call, gather = sw.all_to_all_single, sw.all_gather_into_tensor
        for kind, text, run in (
            (ValueError, "output_split_sizes sums to 12 rows, output has 8", lambda: call(y, x, [12], [12], group=comm)),
            (ValueError, "input_split_sizes sums to 11 rows, input has 12", lambda: call(y, x, [8], [11], group=comm)),
            (ValueError, "input_split_sizes has 2 entries, the group 1 ranks", lambda: call(y, x, [8], [6, 6], group=comm)),
            (TypeError, "output is float32, input float64", lambda: call(y, x.astype("f8"), group=comm)),
            (TypeError, "output_tensor is float32, input_tensor float64", lambda: gather(y, x.astype("f8"), comm)),
            (TypeError, "output is float64, input float32", lambda: sw.reduce_scatter_tensor(y.astype("f8"), x, group=comm)),
            (TypeError, "input_split_sizes is float64 values, want a list", lambda: call(y, x, [8], floats, group=comm)),
            (TypeError, "output_split_sizes is a str, want a list", lambda: call(y, x, "8", [12], group=comm)),
            (TypeError, "output_split_sizes is a dict, want a list", lambda: call(y, x, {8: 1}, [12], group=comm)),
            (TypeError, "input_split_sizes is a set, want a list", lambda: call(y, x, None, {12}, group=comm)),
            (TypeError, "input_split_sizes is a bytes", lambda: call(y[:1], x[:1], [1], b"\1" + b"\0" * 7, group=comm)),
            (ValueError, f"is [{2**70}], want integers of 64 bits", lambda: call(y, x, [8], [2**70], group=comm)),
            (TypeError, "output holds Python objects", lambda: call(np.empty(3, object), x, group=comm)),
            (TypeError, "output holds Python objects", lambda: call(np.empty(3, [("a", object)]), x, group=comm)),
            (TypeError, "input is an int; want a torch tensor", lambda: call(y, 3, group=comm)),
            (ValueError, "op is 'median', want one of sum", lambda: sw.all_reduce(x, "median", group=comm)),
            (TypeError, "op is an int, want one of sum", lambda: sw.all_reduce(x, 3, group=comm)),
            (ValueError, "output_tensor has 64 bytes, input_tensor 96 on each of 1", lambda: gather(y, x, comm)),
            (TypeError, "group is an int, want a", lambda: sw.barrier(group=3)),
            (ValueError, "max_sms, copy_sms and no_sms are for CUDA", lambda: call(y, x, peer_displs=[0], group=comm)),
            (ValueError, "max_sms is 0, want at least 1", lambda: call(y, x, max_sms=0, group=comm)),
            (TypeError, "no_sms is 1, want True or False", lambda: call(y, x, no_sms=1, group=comm)),
            (TypeError, "rank is '0', want an integer", lambda: sw.init("0", 1)),
            (TypeError, "world_size is 1.0, want an integer", lambda: sw.init(0, 1.0)),
            (TypeError, "world_size is '2', want an integer", lambda: sw.init(0, "2")),
            (ValueError, "rank, world_size and addr go together", lambda: sw.init(0, 2)),
            (ValueError, "rank, world_size and addr go together", lambda: sw.init(0)),
            (ValueError, "rank is 2, want less than world_size, 1", lambda: sw.init(2, 1, "127.0.0.1:1")),
            (ValueError, "rank is -1, want at least 0", lambda: sw.init(-1, 1)),
            (ValueError, "world_size is 0, want at least 1", lambda: sw.init(0, 0, "127.0.0.1:1")),
            (ValueError, "addr is 'here', want \"host:port\"", lambda: sw.init(0, 2, "here")),
            (ValueError, "addr is 'here:70000', want", lambda: sw.init(0, 2, "here:70000")),
            (TypeError, "addr is an int, want a string", lambda: sw.init(0, 2, 29500)),
            (TypeError, "timeout is 'x', want a number of seconds", lambda: sw.init(0, 1, timeout="x")),
            (ValueError, "timeout is -1, want a positive number of seconds", lambda: sw.init(0, 1, timeout=-1)),
            (ValueError, "join_timeout is inf, want a positive", lambda: sw.init(0, 1, join_timeout=float("inf"))),
            (ValueError, "peer_timeout is 0.01, want at least 0.1", lambda: sw.init(0, 1, peer_timeout=0.01)),
            (TypeError, "heap is '1G', want an integer", lambda: sw.init(0, 1, heap="1G")),
            (ValueError, "heap is -5, want at least 1", lambda: sw.init(0, 1, heap=-5)),
            (TypeError, "secret is an int, want a string", lambda: sw.init(0, 1, secret=5)),
            (TypeError, "validate is 'no', want True or False", lambda: sw.init(0, 1, validate="no")),
            (TypeError, "color is 'a', want an integer", lambda: comm.split(color="a")),
            (TypeError, "key is 0.5, want an integer", lambda: comm.split(0, key=0.5)),
            (TypeError, "tensor is None, want one of switchyard.empty", lambda: sw.free(None)),
            (TypeError, "tensor is a list, want one of switchyard.empty", lambda: sw.free([x])),
            (TypeError, "dtype is object: Python objects", lambda: sw.empty(3, dtype=object, group=comm)),
            (TypeError, "dtype is 'float33', want a data type", lambda: sw.empty(3, dtype="float33", group=comm)),
            (TypeError, "size is 2.5, want an integer", lambda: sw.empty(2.5, dtype="f4", group=comm)),
            (ValueError, "size is -1, want at least 0", lambda: sw.empty((3, -1), dtype="f4", group=comm)),
        ):
            with pytest.raises(kind, match=re.escape(text)) as caught:
                run()
            assert isinstance(caught.value, errors.Error)
            assert not re.search(r"Options\.|Splits\.|(core|alltoallv|allreduce|dispatch): ", str(caught.value))


def test_what_cannot_be_reduced_is_named():
    floats = "float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2"
    with sw.init(0, 1, default=False) as comm:
        for x, op, text in (
            (np.zeros(3, "datetime64[s]"), "sum", "tensor is datetime64[s]; op 'sum' takes bool, int8,"),
            (np.array(["a"]), "sum", "tensor is <U1; op 'sum' takes bool, int8,"),
            (np.zeros(3, "i8"), "avg", f"tensor is int64; op 'avg' takes {floats}"),
            (np.zeros(3, "f4"), "band", "op is 'band', which is for torch tensors; want one of sum, avg, min, max, prod"),
        ):
            with pytest.raises(errors.Unsupported, match=re.escape(text)):
                sw.all_reduce(x, op, group=comm)
        with pytest.raises(errors.Unsupported, match="input is int16; op 'max' takes bool, uint8, int32"):
            sw.reduce_scatter_tensor(np.zeros(3, "i2"), np.zeros(3, "i2"), "max", group=comm)


def test_wrong_arguments_of_a_dispatcher_are_named():
    with sw.init(0, 1, default=False) as comm:
        d = sw.Dispatcher(4, 2, 8, group=comm)
        x, idx, weights = np.ones((3, 8), "f4"), [[0, 1]] * 3, np.ones((3, 2))
        got = d.dispatch(x, idx, weights)
        for kind, text, run in (
            (TypeError, "experts is 'a', want an integer", lambda: sw.Dispatcher("a", 2, 8, group=comm)),
            (TypeError, "capacity is None, want an integer", lambda: sw.Dispatcher(4, 2, 8, capacity=None, group=comm)),
            (ValueError, "experts", lambda: sw.Dispatcher(-4, 2, 8, group=comm)),
            (TypeError, "dtype is int32, want float32", lambda: sw.Dispatcher(4, 2, 8, dtype="int32", group=comm)),
            (TypeError, "index_dtype is float32, want", lambda: sw.Dispatcher(4, 2, 8, index_dtype="float32", group=comm)),
            (TypeError, "combine_dtype is int8, want", lambda: sw.Dispatcher(4, 2, 8, combine_dtype="int8", group=comm)),
            (TypeError, "placement is 3, want a list", lambda: sw.Dispatcher(4, 2, 8, placement=3, group=comm)),
            (TypeError, "placement is 'a', want an integer", lambda: sw.Dispatcher(1, 1, 8, placement=["a"], group=comm)),
            (TypeError, "experts is float64, want integers", lambda: d.dispatch(x, experts=np.zeros((3, 2)), weights=weights)),
            (TypeError, "x is float64, the dispatcher was made for", lambda: d.dispatch(x.astype("f8"), idx, weights)),
            (TypeError, "dispatched is None, want what dispatch", lambda: d.combine(x, None)),
        ):
            with pytest.raises(kind, match=re.escape(text)) as caught:
                run()
            assert isinstance(caught.value, errors.Error)
            assert not re.search(r"Options\.|(core|dispatch): ", str(caught.value))
        assert d.combine(got.rows, got).shape == (3, 8)
        for text, beside in (
            ("weights are (3,), want (6,)", {"weights": np.ones(3)}),
            ("bias has 2 rows, the dispatch had 3 tokens", {"bias": x[:2]}),
            ("sum_weights without weights", {"sum_weights": True}),
        ):
            with pytest.raises(ValueError, match=re.escape(text)):
                d.combine(got.rows, got, **beside)
        del got
        assert d.dispatch(np.ones((0, 8), "f4"), np.empty((0, 2)), np.empty((0, 2))).num_rows == 0


def test_the_library_knows_the_environment(monkeypatch):
    page = SOURCE.joinpath("nowhere")
    for root in Path(__file__).resolve().parents:
        if root.joinpath("docs", "environment.md").exists():
            page = root / "docs" / "environment.md"
    if not page.exists():
        pytest.skip("needs the sources")
    names = re.findall(r"^\| `([A-Z0-9_]+)`", page.read_text(), re.MULTILINE)
    assert "NVTX_INJECTION64_PATH" in names
    for name in names:
        monkeypatch.setenv(name, "1")
    assert set(names) <= set(comm.environ())


def no_expert(rank, size):
    with pytest.warns(UserWarning, match="rank 1 of 2 has no expert of 1") if rank else contextlib.nullcontext() as caught:
        d = sw.Dispatcher(1, 1, 8)
    assert not caught or caught[0].filename == __file__
    got = d.dispatch(np.ones((3, 8), "f4"), [[0]] * 3)
    assert d.combine(got.rows, got).tolist() == [[1] * 8] * 3


def test_ranks_without_experts_are_warned(worlds):
    worlds.get(2, world.plain).run(no_expert)


def test_the_package_says_what_it_is():
    def said(*arguments, status=0):
        done = subprocess.run([sys.executable, "-m", "switchyard", *arguments], capture_output=True, text=True, timeout=600)
        assert done.returncode == status, done
        return done.stdout or done.stderr

    assert said("--version") == f"switchyard {sw.__version__}\n"
    page = said()
    assert f"switchyard  {sw.__version__}, {SOURCE}\n" in page
    assert "library     a group of one rank works\n" in page
    assert "python -m switchyard.torch" in said("--help")
    assert said("nonsense", status=2).startswith("usage:")


def test_a_slab_overflows_where_tokens_have_an_expert_twice():
    with sw.init(0, 1, default=False) as comm:
        d = sw.Dispatcher(2, 2, 8, max_tokens=3, layout="slab", group=comm)
        x = np.ones((3, 8), "f4")
        assert d.dispatch(x, [[0, 1]] * 3).num_rows == 6
        with pytest.raises(errors.Overflow):
            d.dispatch(x, [[0, 0]] * 3)


def test_arrays_and_tuples_are_split_sizes():
    with sw.init(0, 1, default=False) as comm:
        x = np.arange(6)
        for splits in ([6], (6,), np.array([6]), np.array([6], "i4"), [np.int64(6)], range(6, 7), iter([6])):
            y = np.zeros(6, int)
            sw.all_to_all_single(y, x, splits if not hasattr(splits, "__next__") else [6], splits, group=comm)
            assert y.tolist() == x.tolist()
        before = len(comm._shapes)
        for n in range(1, 1200):  # more than are remembered
            y = np.zeros((n, 1), "i1")
            sw.all_to_all_single(y, np.ones((n, 1), "i1"), [n], [n], group=comm)
            assert y.all()
        assert before < len(comm._shapes) <= 1024
