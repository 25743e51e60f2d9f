"""Builds the shared library with the Go toolchain, and one wheel for every CPython."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
LIBRARY = "libswitchyard.so"


def build_library(out: Path) -> None:
    """Build the shared library from the Go module that this folder is part of."""
    go = os.environ.get("GO") or shutil.which("go")
    if go is None:
        sys.exit(
            "switchyard: the Go toolchain is not there: building this package needs `go` (https://go.dev/dl) and a C "
            "compiler on PATH, or a prebuilt wheel"
        )
    if not (HERE / "../../go.mod").exists():
        sys.exit("switchyard: the Go sources are not there: build from a checkout (pip install ./bindings/python)")
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [go, "build", "-buildmode=c-shared", "-trimpath", "-tags=netgo,osusergo", "-ldflags=-s -w"]
    done = subprocess.run([*command, "-o", str(out), "./abi"], cwd=HERE, env={**os.environ, "CGO_ENABLED": "1"})
    if done.returncode != 0:
        sys.exit(f"switchyard: `{' '.join(command)}` failed in {HERE}")
    out.with_suffix(".h").unlink(missing_ok=True)


class BuildWithLibrary(build_py):
    """build_py, and the shared library beside the modules."""

    def run(self) -> None:
        super().run()
        root = HERE / "src" if self.editable_mode else Path(self.build_lib)
        build_library(root.resolve() / "switchyard" / LIBRARY)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), os.path.join(self.build_lib, "switchyard", LIBRARY)]


class OneForAll(bdist_wheel):
    """A wheel for every CPython, of the oldest manylinux that its library runs on."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        library = Path(self.bdist_dir) / "switchyard" / LIBRARY
        if not library.exists():
            library = HERE / "src" / "switchyard" / LIBRARY  # an editable install
        if platform.startswith("linux_") and library.exists():
            # The versions of glibc's symbols that the library needs stand in it as text.
            needed = {tuple(map(int, v)) for v in re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())}
            major, minor = max(needed | {(2, 17)})
            platform = f"manylinux_{major}_{minor}_{platform.removeprefix('linux_')}"
        return "py3", "none", platform


class Binary(Distribution):
    """A distribution with machine code in it."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": OneForAll}, distclass=Binary)
