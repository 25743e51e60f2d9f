"""python -m switchyard: what this installation is, and whether it works here."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import textwrap
import time
from importlib.util import find_spec

from . import __version__, errors

USAGE = """\
usage: python -m switchyard             says what is installed, and makes a group of one rank
       python -m switchyard --version   says the version
       python -m switchyard doctor      looks at this machine, and has two ranks exchange bytes; every finding has its cure;
                                        --json: an object a line
       python -m switchyard bench [SIZE ...]
                                        times calls among the ranks that a launcher starts, such as srun or mpirun
       python -m switchyard status      says who waits for whom in this user's jobs on this host; --json: all of it
       python -m switchyard top [N]     the same once a second, or N times, with findings of that second; --json too
       python -m switchyard explain     looks at them for a second, and says why their steps take their time; --json: all of it
       python -m switchyard dump PREFIX [JOB]
                                        writes the last calls of each rank to PREFIX and its number, for torchfrtrace --prefix
       python -m switchyard dump --json prints them as lines of JSON, behind one with the state
       python -m switchyard trace       prints them as a timeline for Perfetto; -d SECONDS: only calls of that time, from now on
                                        status, top, explain, trace and dump --json take -job JOB: only of the job whose
                                        identity or program begins so
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


def _doctor(arguments: list[str]) -> int:
    from ._core.observe import doctor, trial

    try:
        if arguments[:1] == ["--trial"]:
            print(trial(arguments[1]))
            return 0
        findings = doctor([sys.executable, "-m", "switchyard", "doctor", "--trial"])
    except errors.Error as err:
        print(err, file=sys.stderr)
        return 1
    width = shutil.get_terminal_size().columns
    for f in findings:
        if arguments:
            print(json.dumps(f))
            continue
        indent = " " * 21
        print(textwrap.fill(f["says"], width, initial_indent=f"{f['state']:8} {f['check']:11} ", subsequent_indent=indent))
        if "cure" in f:
            print(textwrap.fill(f"cure: {f['cure']}", width, initial_indent=indent, subsequent_indent=indent))
    return int(any(f["state"] == "problem" for f in findings))


def _ask(command: str, as_json: bool, job: str, times: int = 1) -> int:
    from ._core.observe import ALL, RECENT, RECENT_TABLE, TABLE, WHY, WHY_TABLE, observe

    table, whole = {"status": (TABLE, ALL), "explain": (WHY_TABLE, WHY), "top": (RECENT_TABLE, RECENT)}[command]
    while times != 0:
        times -= 1
        try:
            text = observe(whole if as_json else table, job)
        except errors.Error as err:
            print(err, file=sys.stderr)
            return 1
        if command == "top" and not as_json:
            if sys.stdout.isatty():
                print("\x1b[H\x1b[2J", end="")
            print(time.strftime("%H:%M:%S"))
        print(text, end="\n" if as_json else "", flush=True)
    return 0


def _calls(job: str) -> int:
    from ._core.observe import ALL, CALLS, observe

    try:
        print(observe(ALL, job))
        for call in json.loads(observe(CALLS, job)) or []:
            print(json.dumps(call))
    except errors.Error as err:
        print(err, file=sys.stderr)
        return 1
    return 0


def _bench(sizes: list[str]) -> int:
    from ._bench import bench

    try:
        return bench(sizes)
    except errors.Error as err:
        print(err, file=sys.stderr)
        return 1


def _trace(job: str, seconds: str = "0") -> int:
    from ._core.observe import TRACE, observe

    try:
        wait = float(seconds)
        begin = time.time_ns()
        time.sleep(wait)
        trace = json.loads(observe(TRACE, job))
    except (errors.Error, ValueError) as err:
        print(err, file=sys.stderr)
        return 1
    if wait > 0:
        begin_us = (begin - trace["baseTimeNanoseconds"]) / 1e3
        trace["traceEvents"] = [
            e for e in trace["traceEvents"] if e["ph"] in "MB" or e.get("ts", 0) + e.get("dur", 0) >= begin_us
        ]
    print(json.dumps(trace))
    return 0


def _dump(prefix: str, job: str = "") -> int:
    from ._core.observe import records

    try:
        print("\n".join(records(prefix, job)))
    except errors.Error as err:
        print(err, file=sys.stderr)
        return 1
    return 0


def _job(arguments: list[str]) -> tuple[str, list[str]]:
    """The job that -job names, "" for none, and the other arguments."""
    for i, word in enumerate(arguments[:-1]):
        if word in ("-job", "--job"):
            return arguments[i + 1], arguments[:i] + arguments[i + 2 :]
    return "", arguments


def main(arguments: list[str]) -> int:
    job = ""
    if arguments[:1] and arguments[0] in ("status", "top", "explain", "dump", "trace"):
        job, arguments = _job(arguments)
    if arguments == ["--version"]:
        print(f"switchyard {__version__}")
        return 0
    if arguments[:1] in (["status"], ["explain"]) and arguments[1:] in ([], ["--json"]):
        return _ask(arguments[0], bool(arguments[1:]), job)
    if arguments in (["doctor"], ["doctor", "--json"]) or (arguments[:2] == ["doctor", "--trial"] and len(arguments) == 3):
        return _doctor(arguments[1:])
    if arguments[:1] == ["bench"] and not any(a.startswith("-") for a in arguments):
        return _bench(arguments[1:])
    if arguments[:1] == ["top"]:
        rest = [a for a in arguments[1:] if a != "--json"]
        if not rest or (len(rest) == 1 and rest[0].isdigit()):
            return _ask("top", "--json" in arguments, job, int(rest[0]) if rest else -1)
    if arguments == ["dump", "--json"]:
        return _calls(job)
    if arguments[:1] == ["trace"] and (len(arguments) == 1 or (len(arguments) == 3 and arguments[1] == "-d")):
        return _trace(job, *arguments[2:])
    if arguments[:1] == ["dump"] and (len(arguments) == 2 or (len(arguments) == 3 and not job)):
        return _dump(arguments[1], *(arguments[2:] or [job]))
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
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # who reads the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 1
    sys.exit(code)
