"""Builds what run.py needs on a machine with GPUs into one folder of at most 60 MB: `make gpu`.

    python3 test/gpu/build.py FOLDER [--deepep CHECKOUT]

These are the tests of Go packages, soak and perf as programs, the packages switchyard and deep_ep, and the files that tests
read, in an archive. --deepep adds DeepEP's own tests, from a checkout of DeepEP 2.1.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GO = os.environ.get("GO", "go")
MOST = 60 << 20

#: Programs that steps and people run, and what is on the path of Python.
PROGRAMS = ["test/perf", "test/soak"]
PYTHON = ["bindings/python", "bindings/python/deep_ep"]
#: What tests read, apart from testdata of their packages. The sources of kernels stay here: their emulation needs no GPU.
READ = [f"{project}/{part}" for project in PYTHON for part in ("pyproject.toml", "tests")]
# No Go: unpacked, it would be a package here.
READ += ["examples/kernels/all_gather.cu", "examples/kernels/all_gather_triton.py", "examples/moe/train.py", "LICENSE"]
#: The programs hold the same kernels, which a dictionary as large as all of them finds again.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 2, "dict_size": 256 << 20}]


def do(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def install(project: str, site: Path) -> None:
    """Put what is in the wheel of a project into the folder site, which an archive packs better than a wheel."""
    with tempfile.TemporaryDirectory() as made:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
        do(*pip, "--wheel-dir", made, "./" + project)
        for wheel in Path(made).iterdir():
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(site)


def copy(name: str, tree: Path) -> None:
    """Copy a file or folder of the repository to its place in tree."""
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    if (ROOT / name).is_dir():
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.test"))
    else:
        shutil.copy2(ROOT / name, tree / name)


def build(files: Path, steps: list[dict], deepep: Path | None) -> None:
    """Write everything into the folder files."""
    (files / "bin").mkdir(parents=True)
    small, packages = "-ldflags=-s -w", sorted({step["package"] for step in steps if "package" in step})
    jobs = [(GO, "build", small, "-o", str(files / "bin" / Path(program).name), "./" + program) for program in PROGRAMS]
    for package in packages:
        out = str(files / "bin" / (package.replace("/", "_") + ".test"))
        jobs.append((GO, "test", "-c", "-vet=off", small, "-o", out, "./" + package))
        (files / "tree" / package).mkdir(parents=True, exist_ok=True)
        if package != "kernels/cuda" and (ROOT / package / "testdata").exists():
            copy(f"{package}/testdata", files / "tree")
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:  # a job has several threads
        done = [pool.submit(install, project, files / "site") for project in PYTHON] + [pool.submit(do, *job) for job in jobs]
        for job in done:
            job.result()
    for name in READ:
        copy(name, files / "tree")
    if deepep is not None:
        for part in ("tests", "deep_ep/utils"):
            shutil.copytree(deepep / part, files / "tree/DeepEP" / part)
    commit = do("git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*").strip()
    (files / "steps.json").write_text(json.dumps({"commit": commit, "steps": steps}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--deepep", type=Path)
    options = parser.parse_args()
    steps = json.loads((HERE / "steps.json").read_text())
    if options.deepep is None:
        steps = [step for step in steps if "DeepEP" not in step["name"]]
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as work:
        build(Path(work), steps, options.deepep)
        archive = options.folder / "files.tar.xz"
        with lzma.open(archive, "wb", filters=FILTERS) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
            tar.add(work, "files")
    for name in ("run.py", "progress.py"):
        shutil.copy2(HERE / name, options.folder / name)
    size = sum(f.stat().st_size for f in options.folder.iterdir())
    if size > MOST:
        sys.exit(f"{options.folder} has {size / 1e6:.0f} MB, want {MOST / 1e6:.0f} at most")
    print(f"{options.folder} has {size / 1e6:.0f} MB. Where the GPUs are: python3 {options.folder.name}/run.py")


if __name__ == "__main__":
    main()
