"""switchyard.layers on the host, and its kernels in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import layer_cases as cases  # noqa: E402

CPU = "cpu"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", list(cases.LAYOUTS))
def test_gradients(gloo, layout, dtype):
    gloo.run(cases.gradients, CPU, layout, dtype, {})


def test_experts_weigh_rows_by_expert(gloo):
    gloo.run(cases.gradients, CPU, "flat", "float32", {"row_weights": True})


@pytest.mark.parametrize("layout", ["flat", "token_major"])
def test_router_shared_expert_and_lora(gloo, layout):
    gloo.run(cases.trained, CPU, layout)


@pytest.mark.parametrize("layout", ["flat", "token_major"])
def test_float8(gloo, layout):
    gloo.run(cases.float8, CPU, layout, {})


def test_refused(gloo):
    gloo.run(cases.refused, CPU)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_in_the_interpreter():
    script = Path(__file__).with_name("layer_products.py")
    done = subprocess.run(
        [sys.executable, script, CPU], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
