"""Makes a folder that trains the GPT of train.py on a machine without a network: python folder.py FOLDER

It has Megatron-Core of ../requirements.txt, what that needs beside torch and numpy, and train.py, and no shared libraries. The
packages switchyard and deep_ep come from elsewhere, such as the folder gpu/files/site of `make gpu`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
MOST = 30 << 20
#: What Megatron-Core imports beside torch, numpy and what these need. torch.utils.cpp_extension imports setuptools.
BESIDE = ["packaging==26.4", "setuptools==80.9.0"]


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as wheels:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", wheels]
        for wanted in (["--ignore-requires-python", "-r", str(HERE.parent / "requirements.txt")], BESIDE):
            subprocess.run([*pip, "--only-binary", ":all:", *wanted], check=True)
        for wheel in sorted(Path(wheels).iterdir()):
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(folder, [name for name in packed.namelist() if not name.endswith((".so", ".exe"))])
    shutil.copy2(HERE / "train.py", folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > MOST:
        raise SystemExit(f"{folder} has {size >> 20} MiB, want at most {MOST >> 20}")
    print(f"{folder}: {size / (1 << 20):.1f} MiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
