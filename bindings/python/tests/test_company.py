"""Other libraries in the process set what belongs to all of it, and this package relies on none of that and changes none."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = Path(__file__).with_name("company_probe.py")
TORCH = ["torch"] if importlib.util.find_spec("torch") is not None else []


@pytest.mark.parametrize("modules", [["hostile"], *([["torch", "hostile"]] if TORCH else [])], ids=" ".join)
@pytest.mark.parametrize("order", ["before", "after"])
def test_functions_of_the_interpreter_have_types_of_our_own(order, modules):
    done = subprocess.run([sys.executable, PROBE, order, *modules], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
