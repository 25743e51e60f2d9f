"""Builds the sdist, and the wheel from it, and tries both as somebody does who has nothing else of Switchyard.

    python check_package.py FOLDER      leaves them in FOLDER; needs build and twine, and Go
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
NEWEST = (2, 28)  # of the C library

# Run where there is no Go, no C compiler and no checkout.
TRY = """
import importlib.metadata as about
import switchyard as sw
from array import array

assert sw.__version__ == about.version("switchyard-moe") == VERSION, sw.__version__
meta = about.metadata("switchyard-moe")
assert meta["License-Expression"] == "Apache-2.0" and {"LICENSE", "NOTICE"} <= set(meta.get_all("License-File")), meta
with sw.init(0, 1) as comm:
    x, y = array("d", [1, 2, 3]), array("d", [0, 0, 0])
    sw.all_to_all_single(y, x)
    assert list(y) == [1, 2, 3]
    sw.all_reduce(y, "sum")
print("works:", comm)
"""


# A rank of two. It says how the join went.
MEET = """
import sys
import switchyard as sw

try:
    with sw.init(int(sys.argv[1]), 2, addr=sys.argv[2]) as comm:
        print(sw.__version__, "works")
except sw.Error as err:
    print(sw.__version__, "refused:", err)
"""


def run(*command: object, **options: object) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(c) for c in command], check=True, **options)  # type: ignore[call-overload]


def needed(library: bytes) -> tuple[int, int]:
    """The newest version of the C library's symbols that a library asks for. Their names stand in it as text."""
    return max(tuple(map(int, v)) for v in re.findall(rb"GLIBC_(\d+)\.(\d+)", library))  # type: ignore[return-value]


def install(package: Path, version: str, path: str) -> None:
    """Install into a clean environment, and use what is there outside any checkout."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        env = {name: value for name, value in os.environ.items() if name not in ("CC", "PYTHONPATH")}
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package, env={**env, "PATH": path})
        text = TRY.replace("VERSION", repr(version))
        run(python, "-c", text, cwd=folder, env={**env, "PATH": os.path.join(folder, "bin")})


def later(sdist: Path, version: str, out: Path) -> Path:
    """The wheel of the next minor version, which is these sources with another number."""
    major, minor, _ = version.split(".", 2)
    following = f"{major}.{int(minor) + 1}.0"
    with tarfile.open(sdist) as t:
        t.extractall(out, filter="data")
    (tree,) = out.iterdir()
    for file in (tree / "go/switchyard.go", tree / "src/switchyard/_version.py"):
        text = file.read_text()
        assert text.count(f'"{version}"') == 1, file
        file.write_text(text.replace(f'"{version}"', f'"{following}"'))
    env = {name: value for name, value in os.environ.items() if name != "CC"}
    run(sys.executable, "-m", "build", "--wheel", "--outdir", out, tree, env=env, stdout=subprocess.DEVNULL)
    (wheel,) = out.glob("*.whl")
    return wheel


def upgrade(wheel: Path, sdist: Path, version: str) -> None:
    """Two wheels of one version work in one group, and one of this and one of the next are refused with both numbers."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "later").mkdir()
        wheels = [wheel, later(sdist, version, place / "later")]
        for i, w in enumerate(wheels):
            with zipfile.ZipFile(w) as z:
                z.extractall(place / str(i))
        following = wheels[1].name.split("-")[1]
        for ranks in ((0, 0), (0, 1), (1, 0)):
            ps = [
                subprocess.Popen(
                    [sys.executable, "-c", MEET, str(rank), f"@switchyard-upgrade-{os.getpid()}-{ranks[0]}{ranks[1]}"],
                    cwd=folder, env={**os.environ, "PYTHONPATH": str(place / str(which))}, stdout=subprocess.PIPE, text=True,
                )
                for rank, which in enumerate(ranks)
            ]  # fmt: skip
            said = [p.communicate(timeout=180)[0].strip() for p in ps]
            if ranks == (0, 0):
                assert said == [f"{version} works"] * 2, said
                continue
            connects, connected = (following, version)[:: 1 if ranks[1] else -1]
            build = r"\(build \w+\)"
            want = f"the rank that connects has Switchyard {connects} {build}, the rank it connects to {connected} {build}"
            for text in said:
                assert re.search(want, text), (want, said)
            print("refused:", said[0].split(": ", 1)[1])


def main(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    env = {name: value for name, value in os.environ.items() if name != "CC"}
    run(sys.executable, "-m", "build", "--outdir", out, HERE, env=env, stdout=subprocess.DEVNULL)
    run(sys.executable, "-m", "twine", "check", "--strict", *out.iterdir())
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    version = re.match(r"switchyard_moe-(.+)\.tar\.gz$", sdist.name)[1]  # type: ignore[index]
    tag = f"switchyard_moe-{version}-py3-none-manylinux_{NEWEST[0]}_{NEWEST[1]}_{os.uname().machine}.whl"
    assert wheel.name == tag, f"the wheel is {wheel.name}, want {tag}"
    with zipfile.ZipFile(wheel) as z:
        newest = needed(z.read("switchyard/libswitchyard.so"))
        assert newest <= NEWEST, f"the library asks for symbols of glibc {newest}"
        print(f"the library asks for symbols of glibc {newest[0]}.{newest[1]} at the newest")
        for name in ("LICENSE", "NOTICE"):
            inside = next(n for n in z.namelist() if n.endswith(f".dist-info/licenses/{name}"))
            assert z.read(inside) == (HERE / name).read_bytes(), f"the wheel's {inside} is not the repository's"
        page = next(z.read(name) for name in z.namelist() if name.endswith("METADATA")).decode()
        links = re.findall(r"\]\((?!https://|#)([^)]*)\)", page)
        assert not links, f"links of the README that lead nowhere on an index: {links}"
    with tarfile.open(sdist) as t:
        names = t.getnames()
        for name in ("go/go.mod", "go/bindings/python/abi/abi.go", "go/vendor/modules.txt", "LICENSE", "NOTICE", "setup.py"):
            assert f"switchyard_moe-{version}/{name}" in names, f"the sdist lacks {name}"
    install(wheel, version, "/nowhere")
    install(sdist, version, os.environ["PATH"])
    upgrade(wheel, sdist, version)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).resolve())
