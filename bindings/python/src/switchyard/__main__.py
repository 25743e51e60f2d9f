"""python -m switchyard: what this installation is, and whether it works here."""

from __future__ import annotations

import os
import platform
import sys
from importlib.util import find_spec

from . import __version__, errors

USAGE = """\
usage: python -m switchyard             says what is installed, and makes a group of one rank
       python -m switchyard --version   says the version
       python -m switchyard status      says who waits for whom in this user's jobs on this host; --json: all of it
       python -m switchyard dump PREFIX [JOB]
                                        writes the last calls of each rank to PREFIX and its number, for torchfrtrace --prefix
       python -m switchyard.torch ...   runs a script, or a module with -m, with Switchyard in the place of gloo and NCCL
"""


def _about_torch() -> str:
    if find_spec("torch") is None:
        return "not installed: numpy arrays, DLPack and the buffer protocol"
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{torch.__version__}, {', '.join(gpus) or 'no GPU'}"


def _works() -> str:
    """Make a group of one rank, and what goes wrong with it."""
    from array import array

    from . import all_reduce, init

    with init(0, 1, default=False) as comm:
        x = array("d", [1, 2, 3])
        all_reduce(x, group=comm)
        if list(x) != [1, 2, 3]:
            raise errors.Error(f"switchyard: an all_reduce of one rank made {list(x)} of [1, 2, 3]")
    return "a group of one rank works"


def _status(flags: list[str]) -> int:
    from ._core.observe import ALL, TABLE, observe

    try:
        print(observe(ALL if flags else TABLE), end="" if not flags else "\n")
    except errors.Error as err:
        print(err, file=sys.stderr)
        return 1
    return 0


def _dump(prefix: str, job: str = "") -> int:
    from ._core.flight import write

    try:
        print("\n".join(write(prefix, job)))
    except (errors.Error, ValueError, OSError) as err:
        print(err, file=sys.stderr)
        return 1
    return 0


def main(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        print(f"switchyard {__version__}")
        return 0
    if arguments in (["status"], ["status", "--json"]):
        return _status(arguments[1:])
    if len(arguments) in (2, 3) and arguments[0] == "dump":
        return _dump(*arguments[1:])
    if arguments:
        asked = arguments[0] in ("-h", "--help")
        print(USAGE, end="", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    print(f"switchyard  {__version__}, {os.path.dirname(os.path.abspath(__file__))}")
    print(f"python      {platform.python_version()}, {sys.executable}")
    print(f"torch       {_about_torch()}")
    for name in sorted(os.environ):
        if name.startswith("SWITCHYARD_"):
            print(f"{name}={'(set)' if 'SECRET' in name else os.environ[name]}")
    try:
        print(f"library     {_works()}")
    except errors.Error as err:
        print(f"library     {err}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
