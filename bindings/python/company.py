"""Installs libraries that are often in one process with this package, and runs tests/company_probe.py in a process with each.

    python company.py        installs into the environment of this Python, where torch and switchyard are

It says which of them have a package, which of those can be imported on this machine, and ends with 1 where the probe fails
next to one that can.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROBE = Path(__file__).resolve().parent / "tests" / "company_probe.py"
#: The packages to install, and the modules to import. DeepEP is built from source; its users have it already.
COMPANY = {
    "flashinfer": ("flashinfer-python", "flashinfer"),
    "DeepEP": ("", "deep_ep"),
    "NCCL EP": ("nccl-extensions", "nccl_ep"),
    "NCCL for Python": ("nccl4py", "nccl.core"),
    "xformers": ("xformers", "xformers.ops"),
    "numba": ("numba", "numba"),
    "cupy": ("cupy-cuda12x", "cupy"),
}


def run(*command: object) -> tuple[int, str]:
    """The exit status of a Python command, and the last line of what it says."""
    try:
        done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=1200)
    except subprocess.TimeoutExpired:
        return 1, "not done within 1200 s"
    lines = (done.stderr or done.stdout).strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def beside(name: str, package: str, module: str) -> tuple[str, bool]:
    """A line about a library, and whether its result is good."""
    if package:
        # Its torch stays what it is: a library that wants another one does not go with this one.
        status, why = run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", package)
        if status:
            return f"no package: {why}", True
    status, why = run("-c", f"import torch, {module}")
    if status:
        return f"cannot be imported here: {why}", True
    for order in ("before", "after"):
        status, why = run(PROBE, order, module)
        if status:
            return f"imported {order}: FAILED: {why}", False
    return "imported before and after: works", True


def main() -> None:
    good = True
    for name, (package, module) in COMPANY.items():
        said, fine = beside(name, package, module)
        good = good and fine
        print(f"{name:16} {said}", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
