"""Runs everything that needs GPUs, from the folder that `make gpu` has made:

    python3 gpu/run.py [--only STEPS] [--tests TESTS] [--seconds 480] [--logs FOLDER]

The machine has Python and torch, and needs neither Go nor this repository. A step is a program, or tests of a package or files.
Some steps run three at a time. Each has a time limit, and so have all together. A test that says nothing for a minute is ended
with a trace of all its processes, and the others of its step run without it. At the end there is the text of tests that failed,
and a line for each step. NVLink multicast stays off: these tests do not need it, and a fault of it can take the GPUs of a host
away from all who use them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional

HERE = Path(__file__).resolve().parent
#: What unpack makes: programs, packages of Python, and files of the repository that tests read.
FILES, BIN, SITE, TREE = HERE / "files", HERE / "files/bin", HERE / "files/site", HERE / "files/tree"

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

BEGINS = re.compile(r"^=== RUN +([^/\s]+)$|^=== ITEM (.+)$")
ENDS = re.compile(r"^--- (PASS|FAIL|SKIP): (.+?)(?: \([\d.]+s\))?$")

#: Goroutines and registers of which nobody learns anything.
RUNTIME = re.compile(r"goroutine \d+ [^\n]*\[(GC |force gc|finalizer|cleanup|GOMAXPROCS)|rax ")

#: pytest's code where there is no test, such as none that is not done yet.
NO_TESTS = 5

#: How many lines of a failed test are printed. The logs have all of them.
LINES = 70


@dataclass
class Outcome:
    """What became of a step: its tests, the texts of those that failed, and why it did not get to its end."""

    seconds: float = 0
    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    cut: str = ""

    def good(self) -> bool:
        return not self.failed and not self.cut


class Step:
    """One of steps.json."""

    def __init__(self, spec: dict[str, Any], tests: str) -> None:
        self.spec, self.tests = spec, tests or spec.get("run", "")
        self.name: str = spec["name"]
        self.whole = "program" in spec or "python" in spec
        self.silence = float(spec.get("silence", spec["seconds"] if self.whole else 60))
        self.folder = TREE / spec.get("package", spec.get("pytest", spec.get("folder", ".")))

    def missing(self) -> str:
        """Why the step cannot run here."""
        if "under" in self.spec and sanitizer() is None:
            return "there is no compute-sanitizer"
        if len(gpus()) < (fewest := self.spec.get("gpus", 0)):
            return f"needs {fewest} GPUs"
        return ""

    def command(self, done: list[str]) -> list[str]:
        """The program and its arguments, without the tests that are done."""
        spec = self.spec
        if "program" in spec:
            return [str(BIN / spec["program"][0]), *spec["program"][1:]]
        if "python" in spec:
            return [sys.executable, *spec["python"]]
        if "pytest" in spec:
            files = [*spec["files"], *(["-k", self.tests] if self.tests else [])]
            return [sys.executable, "-m", "pytest", "-p", "progress", "-q", "-s", "--tb=short", *files]
        command = [str(BIN / (spec["package"].replace("/", "_") + ".test")), "-test.v", "-test.count=1", "-test.timeout=30m"]
        command += [f"-test.run={self.tests}"] if self.tests else []
        command += ["-test.short"] if spec.get("short") else []
        command += [f"-test.skip=^({'|'.join(done)})$"] if done else []
        if "under" in spec:
            tool = ["--tool", spec["under"], "--target-processes", "all", "--error-exitcode", "9"]
            command = [sanitizer() or "compute-sanitizer", *tool, *command]
        return command


def sanitizer() -> Optional[str]:
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def shorten(lines: list[str]) -> str:
    """The lines without goroutines of Go itself, and without the middle of what is long."""
    blocks = ("\n".join(lines)).split("\n\n")
    lines = "\n\n".join(b for b in blocks if not RUNTIME.match(b)).split("\n")
    if len(lines) > LINES:
        left_out = f"... {len(lines) - LINES} lines, which the log has ..."
        lines = [*lines[: LINES // 3], left_out, *lines[len(lines) - 2 * LINES // 3 :]]
    return "\n".join(lines)


def members(group: int) -> list[int]:
    """The processes of a group, the first one last."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[2]) == group:
                found.append(int(stat.parent.name))
    return sorted(found, key=lambda process: (process == group, process))


def end(process: subprocess.Popen[bytes], gently: bool) -> None:
    """End a process and its children. Gently, each says first where it is: Go by itself, Python by its faulthandler."""
    with contextlib.suppress(ProcessLookupError):
        for member in members(process.pid) if gently else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGABRT)
            time.sleep(0.3)  # so that they do not speak at the same time
        os.killpg(process.pid, signal.SIGKILL)


def lines_of(process: subprocess.Popen[bytes], silence: float, until: float, why: Callable[[str], None]) -> Any:
    """The lines that the process prints. It is ended when it is silent for too long or its time is over, of which why hears."""
    assert process.stdout is not None
    pipe, rest, heard, ended = process.stdout.fileno(), b"", time.monotonic(), False
    silence, patience = max(silence, 60), silence  # it may take a while to begin
    os.set_blocking(pipe, False)
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            now = time.monotonic()
            if not ended and now >= min(heard + silence, until):
                quiet = f"it said nothing for {now - heard:.0f} s"
                why(f"{quiet}, and the step's time was over" if now >= until else quiet)
                threading.Thread(target=end, args=(process, True)).start()
                ended, until = True, now + 20
            elif ended and now >= until:  # a child that has left the group holds the pipe
                break
            if process.poll() is not None and not ended:
                ended, until = True, now + 5
            if not selector.select(min(0.5, max(0.01, until - now))):
                continue
            piece = os.read(pipe, 1 << 16)
            if not piece:
                break
            heard, silence = now, patience
            *whole, rest = (rest + piece).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")


def attempt(step: Step, outcome: Outcome, done: list[str], until: float, log: Any) -> bool:
    """Run the step without the tests that are done, to which it adds. Whether the step got to its end."""
    environment = {**os.environ, **NO_MULTICAST, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "NO_COLOR": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(SITE), str(SITE / "switchyard_deep_ep"), str(HERE), str(TREE / "bindings/python/tests")]
    )
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    environment["SWITCHYARD_TESTS_DONE"] = "\n".join(done)
    process = subprocess.Popen(
        step.command(done), cwd=step.folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    name, text, last, complete, killed = "", [], [], False, ""

    def why(words: str) -> None:
        nonlocal killed
        killed = words

    for line in lines_of(process, step.silence, until, why):
        print(line, file=log, flush=True)
        last = [*last[-LINES:], line]
        text.append(line)
        if killed:  # what its processes say when one after the other ends
            continue
        if begin := BEGINS.match(line):
            name, text = begin[1] or begin[2], [line]
        elif (finish := ENDS.match(line)) and finish[2] not in done:
            done.append(finish[2])
            if finish[1] == "FAIL":
                outcome.failed[finish[2]] = shorten(text)
            else:
                (outcome.passed if finish[1] == "PASS" else outcome.skipped).append(finish[2])
            name, text = "", []
        elif line in ("PASS", "FAIL"):
            complete = True
    end(process, gently=False)
    code = process.wait()
    if name:  # in the middle of this test
        outcome.failed[name] = shorten([*text, killed or f"the process ended with code {code} in this test"])
        done.append(name)
    elif not complete and done and code == 2 and done[-1] in outcome.failed:  # Go says FAIL and then why
        outcome.failed[done[-1]] += "\n" + shorten(text)
    elif step.whole:
        complete = True
        if code != 0:
            outcome.failed[step.name] = shorten([*last, killed or f"ended with code {code}"])
        else:
            outcome.passed.append(step.name)
    elif code not in ((0, 1, NO_TESTS) if outcome.failed else (0, NO_TESTS)):  # 1 is what tests end with that have failed
        outcome.failed[f"{step.name}: the process"] = shorten([*last, killed or f"ended with code {code}"])
    return complete


def play(step: Step, seconds: float, log: Any) -> Outcome:
    outcome, done, began = Outcome(cut=step.missing()), [], time.monotonic()
    until = began + min(seconds, step.spec["seconds"])
    while not outcome.cut:
        before = len(done)
        if attempt(step, outcome, done, until, log):
            break
        if time.monotonic() >= until:
            outcome.cut = f"cut at its limit of {until - began:.0f} s"
        elif len(done) == before:
            outcome.cut = "it ended before its tests"
    if not (outcome.cut or outcome.passed or outcome.skipped or outcome.failed):
        outcome.cut = "no test ran"
    outcome.seconds = time.monotonic() - began
    return outcome


def unpack() -> None:
    """Unpack what is in the archive, unless that has been done."""
    archive, ready = HERE / "files.tar.xz", FILES / "ready"
    if not archive.exists() or (ready.exists() and ready.stat().st_mtime >= archive.stat().st_mtime):
        return
    shutil.rmtree(FILES, ignore_errors=True)
    with tarfile.open(archive) as files:
        files.extractall(HERE, filter="data")
    ready.touch()


@functools.cache
def gpus() -> list[str]:
    """The name and driver of each GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout.split("\n")[:-1]
    except (OSError, subprocess.SubprocessError):
        return []


def machine() -> str:
    return f"{len(gpus())} x {gpus()[0]}, {os.cpu_count()} cores" if gpus() else "no GPUs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="steps whose name this regular expression matches somewhere")
    parser.add_argument("--tests", default="", help="tests of these steps: what -test.run takes, or pytest's -k")
    parser.add_argument("--seconds", type=float, default=480, help="for all steps together")
    parser.add_argument("--logs", type=Path, default=HERE / "logs", help="where the whole output goes, a file for each step")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    began = time.monotonic()
    unpack()
    about = json.loads((FILES / "steps.json").read_text())
    print(f"commit {about['commit']}, {machine()}, ready after {time.monotonic() - began:.0f} s", flush=True)
    options.logs.mkdir(parents=True, exist_ok=True)
    steps = [Step(spec, options.tests) for spec in about["steps"] if re.search(options.only, spec["name"])]
    outcomes = {step.name: Outcome(cut="not run: no time was left") for step in steps}

    def run(step: Step) -> None:
        left = options.seconds - (time.monotonic() - began)
        if left < 5:
            return
        with open(options.logs / (re.sub(r"\W+", "_", step.name) + ".log"), "w") as log:
            outcome = outcomes[step.name] = play(step, left, log)
        print(row(step.name, outcome), flush=True)

    for step in steps:
        if not step.spec.get("beside"):
            run(step)
    with ThreadPoolExecutor(3) as pool:  # which mostly start processes and compile, and leave the GPUs time for one another
        list(pool.map(run, [step for step in steps if step.spec.get("beside")]))
    print("\n" + "\n".join(f"==== {step}: {test}\n{text}\n" for step, o in outcomes.items() for test, text in o.failed.items()))
    print("\n".join(row(name, outcome) for name, outcome in outcomes.items()))
    bad = [name for name, outcome in outcomes.items() if not outcome.good()]
    print(f"{len(outcomes)} steps in {time.monotonic() - began:.0f} s, " + (f"bad: {', '.join(bad)}" if bad else "all good"))
    return 1 if bad or not outcomes else 0


def row(name: str, o: Outcome) -> str:
    counts = f"{len(o.passed):4} passed {len(o.skipped):3} skipped {len(o.failed):3} failed {o.seconds:5.0f} s"
    return f"{name:44}{counts}{'  ' + o.cut if o.cut else ''}" + "".join(f"\n    FAIL {test}" for test in o.failed)


if __name__ == "__main__":
    sys.exit(main())
