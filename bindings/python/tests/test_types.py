"""Type checkers find wrong arguments of the package's functions, and take right ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import switchyard as sw

RIGHT = """
from array import array
import numpy as np
import switchyard as sw

def right(comm: sw.Communicator) -> None:
    x, y = np.ones(4), np.ones(4)
    sw.all_to_all_single(y, x)
    sw.all_to_all_single(y, x, [4], np.array([4]), comm, True)
    sw.all_to_all_single(bytearray(8), b"12345678", (8,), [8])
    sw.all_reduce(array("d", [1.0]), "sum", comm)
    sw.reduce_scatter_tensor(y, x, op="max")
    sw.free(sw.empty(3, 4, dtype="f4"))
    sw.free(sw.empty((3, 4), dtype=np.float32, group=comm))
    d = sw.Dispatcher(4, 2, 8, dtype=np.float32, placement=[[0], [0], [0], [0]], group=comm)
    got = d.dispatch(np.ones((3, 8)), [[0, 1]] * 3, np.ones((3, 2)))
    d.combine(got.rows, got, weighted=False)
"""
WRONG = [
    'sw.all_to_all_single(1, "x")',
    "sw.all_to_all_single(np.ones(3), None)",
    "sw.all_to_all_single(np.ones(3), np.ones(3), 3)",
    "sw.all_reduce([1, 2])",
    "sw.all_gather_into_tensor(np.ones(3), np.ones(3), async_op=1)",
    'sw.init("0", 1)',
    "sw.shrink(leave_out=2)",
    "sw.free(7)",
    'sw.Dispatcher("4", 2, 8)',
    "sw.Dispatcher(4, 2, 8, placement=3)",
    "sw.Dispatcher(4, 2, 8).dispatch(3, 4)",
]


def test_wrong_arguments_are_found(tmp_path):
    page = tmp_path / "page.py"
    page.write_text("import numpy as np\n" + RIGHT + "\n" + "\n".join(WRONG) + "\n")
    first = page.read_text().splitlines().index(WRONG[0]) + 1
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nignore_missing_imports = True\n[mypy-torch.*]\nfollow_imports = skip\n")
    folder = Path(sw.__file__).resolve().parents[1]
    path = {} if folder.name == "site-packages" else {"MYPYPATH": str(folder)}  # an installed package is found by itself
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", tmp_path / "cache", "page.py"],
        cwd=tmp_path, env={**os.environ, **path}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if line.startswith("page.py:") and ": error:" in line}
    assert found == {*range(first, first + len(WRONG))}, done.stdout + done.stderr
