"""The example of persistent buffers in symmetric memory, as torchrun starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import gpus
from world import free_port

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "symmetric" / "persistent.py"


@pytest.mark.parametrize("order", ["same", "other"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_sum_is_right(device, order):
    if not EXAMPLE.exists():
        pytest.skip("the examples are not here")
    if device == "cuda" and not gpus():
        pytest.skip("there is no GPU")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", f"--master-port={free_port()}", str(EXAMPLE),
        "--device", device, "--order", order,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    # The ranks share a pipe: one may print in the middle of another's line.
    assert len(re.findall(r"rank \d: 16 of 16 reductions are right", done.stdout)) == 3, done.stdout
    assert len(re.findall(r"\d  ok", done.stdout)) == 16, done.stdout
