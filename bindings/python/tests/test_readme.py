"""The examples of README.md run as they stand there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import gpus
from world import free_port

BLOCKS = re.findall(
    r"^```python\n# ranks: (\d+), needs: (\w+)\n(.*?)^```",
    (Path(__file__).resolve().parents[1] / "README.md").read_text(),
    re.MULTILINE | re.DOTALL,
)


def test_every_example_says_how_it_runs():
    text = (Path(__file__).resolve().parents[1] / "README.md").read_text()
    assert len(BLOCKS) == text.count("```python") > 0


@pytest.mark.parametrize(("ranks", "needs", "code"), BLOCKS, ids=range(len(BLOCKS)))
def test_example(tmp_path, ranks, needs, code):
    if needs == "gpu":
        if gpus() == 0:
            pytest.skip("there is no GPU")
    elif importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    script = tmp_path / "example.py"
    script.write_text(code)
    env = {
        **os.environ, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "SWITCHYARD_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**env, "RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(int(ranks))
    ]
    said = [p.communicate(timeout=600)[0] for p in processes]
    assert [p.returncode for p in processes] == [0] * int(ranks), "\n".join(said)
