"""Builds the shared library with the Go toolchain, one wheel for every CPython, and an sdist with the Go sources in it."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
LIBRARY = "libswitchyard.so"
#: What C programs include, and tests read: the functions, and the structures that they take.
HEADERS = ("libswitchyard.h", "switchyard.h")
PACKAGE = "./bindings/python/abi"
#: The headers that kernels of others include.
DEVICE_HEADERS = [Path("kernels/cuda/include") / name for name in ("switchyard.cuh", "switchyard_device.cuh")]
# The C library that wheels run on, and what PEP 600 calls that.
GLIBC = (2, 28)


def module() -> Path:
    """Where the Go module is: around this folder in a checkout, inside it in an sdist."""
    for root in (HERE / "go", HERE.parents[1]):
        if (root / "go.mod").exists() and (root / PACKAGE).exists():
            return root
    sys.exit("switchyard: the Go sources are not there: build from a checkout or from an sdist")


def go(*arguments: str, at: Path, **env: str) -> str:
    """Run the Go toolchain and return what it prints."""
    program = os.environ.get("GO") or shutil.which("go")
    if program is None:
        sys.exit(
            "switchyard: the Go toolchain is not there: building this package needs `go` (https://go.dev/dl) on PATH, or a "
            "prebuilt wheel"
        )
    done = subprocess.run([program, *arguments], cwd=at, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"switchyard: `go {' '.join(arguments)}` failed in {at}")
    return done.stdout


#: What Python and what Go call a machine.
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def machine() -> str:
    """The machine that the wheel is for: GOARCH says another than this one."""
    wanted = os.environ.get("GOARCH") or MACHINES.get(platform.machine())
    for name, arch in MACHINES.items():
        if arch == wanted:
            return name
    sys.exit(f"switchyard: machines are x86_64 and aarch64: it cannot be built for {wanted or platform.machine()}")


def compiler() -> str:
    """A C compiler that asks for no newer C library than wheels may: zig's, which comes from PyPI, unless CC says another."""
    if os.environ.get("CC"):
        return os.environ["CC"]
    target = f"{machine()}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    return f"{shlex.quote(sys.executable)} -m ziglang cc -target {target}"


def build_library(out: Path) -> None:
    """Build the shared library and its headers."""
    if sys.platform != "linux":
        sys.exit(f"switchyard: Linux is what this package is for: it cannot be built on {sys.platform}")
    out.parent.mkdir(parents=True, exist_ok=True)
    # The C compiler's own objects have debug information with the folder that it is installed in: -Wl,-s leaves it out.
    link = "-ldflags=-s -w -buildid= -extldflags=-Wl,-s"
    flags = ["-buildmode=c-shared", "-trimpath", "-tags=netgo,osusergo", link, "-buildvcs=false"]
    go("build", *flags, "-o", str(out), PACKAGE, at=module(), CGO_ENABLED="1", GOARCH=MACHINES[machine()], CC=compiler())
    shutil.copy(module() / PACKAGE / HEADERS[1], out.with_name(HEADERS[1]))  # which the other includes
    for header in DEVICE_HEADERS:
        shutil.copy(module() / header, out.with_name(header.name))


class BuildWithLibrary(build_py):
    """build_py, and the shared library and its headers next to the modules."""

    def run(self) -> None:
        super().run()
        root = HERE / "src" if self.editable_mode else Path(self.build_lib)
        build_library(root.resolve() / "switchyard" / LIBRARY)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        names = (LIBRARY, *HEADERS, *(header.name for header in DEVICE_HEADERS))
        made = [os.path.join(self.build_lib, "switchyard", name) for name in names]
        return [*super().get_outputs(include_bytecode), *made]


class OneForAll(bdist_wheel):
    """A wheel for every CPython, of the oldest manylinux that its library runs on."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        _, _, tag = super().get_tag()
        library = Path(self.bdist_dir) / "switchyard" / LIBRARY
        if not library.exists():
            library = HERE / "src" / "switchyard" / LIBRARY  # an editable install
        if tag.startswith("linux_") and library.exists():
            # The versions of glibc's symbols that the library needs stand in it as text.
            needed = {tuple(map(int, v)) for v in re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())}
            major, minor = max(needed | {GLIBC})
            tag = f"manylinux_{major}_{minor}_{machine()}"
        return "py3", "none", tag


class WithSources(sdist):
    """An sdist with the part of the Go module that the library is made of, and the modules that this needs."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        base, root = Path(base_dir).resolve(), module()
        for name in ("LICENSE", "NOTICE"):  # links in a checkout
            (base / name).unlink(missing_ok=True)
            shutil.copy(HERE / name, base / name)
        inside = base / "go"
        for folder, names in self._sources(root).items():
            for name in names:
                target = inside / folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / folder / name, target)
        for header in DEVICE_HEADERS:
            (inside / header).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / header, inside / header)
        if root != HERE / "go":
            for name in ("go.mod", "go.sum"):
                shutil.copy(root / name, inside / name)
            for tool in json.loads(go("mod", "edit", "-json", at=inside)).get("Tool") or []:
                go("mod", "edit", f"-droptool={tool['Path']}", at=inside)
            go("mod", "vendor", at=inside)
        else:  # an sdist of an sdist
            shutil.copytree(root, inside, dirs_exist_ok=True)

    @staticmethod
    def _sources(root: Path) -> dict[Path, list[str]]:
        """The files of the packages that the library is made of, on every kind of machine, by folder."""
        found: dict[Path, set[str]] = {}
        for arch in ("amd64", "arm64"):
            form = "{{if and .Module .Module.Main}}{{.Dir}}|{{join .EmbedFiles `|`}}{{end}}"
            for line in go("list", "-deps", "-f", form, PACKAGE, at=root, GOARCH=arch, CGO_ENABLED="1").splitlines():
                if not line:
                    continue
                folder, *embedded = line.split("|")
                names = found.setdefault(Path(folder).relative_to(root), set())
                names.update(name for name in embedded if name)
                for path in Path(folder).iterdir():
                    if path.suffix in (".go", ".c", ".h", ".s") and not path.name.endswith("_test.go"):
                        names.add(path.name)
        return {folder: sorted(names) for folder, names in found.items()}


class Binary(Distribution):
    """A distribution with machine code in it."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": OneForAll, "sdist": WithSources},
    distclass=Binary,
    setup_requires=[] if os.environ.get("CC") else ["ziglang>=0.15"],
)
