"""Which package of the name deep_ep a program gets: Switchyard's, or another that is installed.

Switchyard's lies in this folder, where no other distribution has files. Python looks here behind all other folders, so another
deep_ep comes first unless a program is told otherwise:

- ``python -m switchyard_deep_ep script.py`` (or ``-m module``) runs a program with Switchyard's, and so are the processes that
  it starts;
- ``PYTHONPATH=$(python -m switchyard_deep_ep --path)`` does the same for any command;
- ``install()`` does for this process and those that it starts, before something imports ``deep_ep``.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys

__all__ = ["FOLDER", "install", "others"]

#: The folder that Switchyard's package deep_ep lies in.
FOLDER = os.path.dirname(os.path.abspath(__file__))


def install() -> None:
    """Have ``import deep_ep`` find Switchyard's package, here and in processes that this one starts."""
    found = sys.modules.get("deep_ep")
    if found is not None and os.path.dirname(found.__path__[0]) != FOLDER:
        raise ImportError(f"switchyard_deep_ep: install: deep_ep is imported already, from {found.__path__[0]}")
    sys.path[:] = [FOLDER, *(path for path in sys.path if path != FOLDER)]
    os.environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *(path for path in _python_path() if path != FOLDER)])


def others() -> list[str]:
    """The other distributions that have a package deep_ep, with their versions."""
    return sorted({f"{d.metadata['Name']} {d.version}" for d in importlib.metadata.distributions() if "deep_ep" in _tops(d)})


def check() -> None:
    """Raise where Switchyard's package is found, another one is installed, and nobody has said which is wanted."""
    if FOLDER not in _python_path():
        found = others()
        if found:
            raise ImportError(
                f"deep_ep: {' and '.join(found)} and switchyard-deep-ep are installed, and have a package deep_ep both: run "
                "the program by `python -m switchyard_deep_ep`, or uninstall one of them"
            )


def _tops(distribution: importlib.metadata.Distribution) -> set[str]:
    """The packages and modules of a distribution that are in no other."""
    named = (distribution.read_text("top_level.txt") or "").split()
    return set(named or (file.parts[0] for file in distribution.files or ()))


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
