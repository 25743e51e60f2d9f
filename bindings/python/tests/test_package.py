"""What the package is to those who read it: its modules, its names, its words."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
from pathlib import Path

import numpy as np
import pytest

import switchyard as sw
from switchyard import errors

SOURCE = Path(sw.__file__).resolve().parent


def imports() -> dict[str, set[str]]:
    """Which modules of the package each of them imports, at once or later."""
    known = {path.stem for path in SOURCE.glob("*.py")}
    found: dict[str, set[str]] = {}
    for path in SOURCE.glob("*.py"):
        of = found[path.stem] = set()
        typing: set[int] = set()
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
                typing.update(id(inner) for inner in ast.walk(node))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 1 and id(node) not in typing:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                of.update(name for name in names if name in known)
    return found


def test_no_module_imports_one_that_imports_it():
    graph = imports()
    assert "_native" in graph["_comm"]
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*above, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())
    assert not [m for m, others in graph.items() if "__init__" in others]


def test_every_name_is_listed_and_explained():
    assert set(sw.__all__) <= set(dir(sw))
    assert sw.__version__ == "0.2.0"
    page = pydoc.render_doc(sw, renderer=pydoc.plaintext)
    for name in sw.__all__:
        assert inspect.getdoc(getattr(sw, name)), name
        assert re.search(rf"\b{name}\b", page), name
    for name in errors.__all__:
        assert inspect.getdoc(getattr(errors, name)), name
    for kind in (sw.Communicator, sw.Dispatcher, sw.Dispatched, sw.Work):
        for name, member in inspect.getmembers(kind):
            if not name.startswith("_") and callable(member):
                assert inspect.getdoc(member), f"{kind.__name__}.{name}"


def test_the_words_of_errors_are_pythons():
    said = str(errors.of(6, "alltoallv: comm: alltoallv: rank 1, epoch 1: timed out", 1))
    assert said == "switchyard: Timed out: rank 1, epoch 1: timed out"
    said = str(errors.of(2, "alltoallv: invalid argument: Options.NoSMs, Splits.PeerDispls, Options.MaxTokens, MaxRows 3"))
    assert said == "switchyard: invalid argument: no_sms, peer_displs, max_tokens, max_rows 3"


def test_wrong_arguments_are_named():
    with sw.init(0, 1, default=False) as comm:
        x, y, floats = np.zeros((12, 2), "f4"), np.zeros((8, 2), "f4"), np.array([12.0])
        call, gather = sw.all_to_all_single, sw.all_gather_into_tensor
        for kind, text, run in (
            (ValueError, "output_split_sizes sums to 12 rows, output has 8", lambda: call(y, x, [12], [12], group=comm)),
            (ValueError, "input_split_sizes sums to 11 rows, input has 12", lambda: call(y, x, [8], [11], group=comm)),
            (ValueError, "input_split_sizes has 2 entries, the group 1 ranks", lambda: call(y, x, [8], [6, 6], group=comm)),
            (ValueError, "output is float32, input float64", lambda: call(y, x.astype("f8"), group=comm)),
            (TypeError, "input_split_sizes is float64 values, want a list", lambda: call(y, x, [8], floats, group=comm)),
            (TypeError, "output_split_sizes is a str, want a list", lambda: call(y, x, "8", [12], group=comm)),
            (TypeError, "output holds Python objects", lambda: call(np.empty(3, object), x, group=comm)),
            (TypeError, "input is a int; want a torch tensor", lambda: call(y, 3, group=comm)),
            (ValueError, "op is 'median', want one of sum", lambda: sw.all_reduce(x, "median", group=comm)),
            (TypeError, "op is a int, want one of sum", lambda: sw.all_reduce(x, 3, group=comm)),
            (ValueError, "output_tensor has 64 bytes, input_tensor 96 on each of 1", lambda: gather(y, x, comm)),
            (TypeError, "group is a int, want a", lambda: sw.barrier(group=3)),
            (ValueError, "max_sms, copy_sms and no_sms are for CUDA", lambda: call(y, x, peer_displs=[0], group=comm)),
        ):
            with pytest.raises(kind, match=re.escape(text)) as caught:
                run()
            assert isinstance(caught.value, errors.Error)
            assert not re.search(r"Options\.|Splits\.|(core|alltoallv|allreduce|dispatch): ", str(caught.value))


def test_arrays_and_tuples_are_split_sizes():
    with sw.init(0, 1, default=False) as comm:
        x = np.arange(6)
        for splits in ([6], (6,), np.array([6]), np.array([6], "i4"), [np.int64(6)], range(6, 7), iter([6])):
            y = np.zeros(6, int)
            sw.all_to_all_single(y, x, splits if not hasattr(splits, "__next__") else [6], splits, group=comm)
            assert y.tolist() == x.tolist()
        before = len(comm.shapes)
        for n in range(1, 1200):  # more than are remembered
            y = np.zeros((n, 1), "i1")
            sw.all_to_all_single(y, np.ones((n, 1), "i1"), [n], [n], group=comm)
            assert y.all()
        assert before < len(comm.shapes) <= 1024
