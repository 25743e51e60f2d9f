"""Prints the end of a run of .ci/run or .ci/full, from the files in which its steps have left the results of their tests."""

from __future__ import annotations

import pathlib
import re
import sys
import textwrap
from collections import defaultdict
from xml.etree import ElementTree

LAST_LINES = 20


def reason(text: str) -> str:
    """What a test said when it was skipped, without its place in the file and the lines of the runner."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("=== ", "--- "))]
    if not lines:
        return "no reason"
    module = re.fullmatch(r"""\(['"].*['"], \d+, ['"](?:Skipped: )?(.*)['"]\)""", lines[-1])  # pytest's, of a whole file
    return module[1] if module else re.sub(r"^\S+\.(go|py):\d+: ", "", lines[-1])


def main(folder: pathlib.Path) -> int:
    took: list[tuple[float, str]] = []
    skipped: dict[str, list[str]] = defaultdict(list)
    failures: dict[str, str] = {}
    passed: set[str] = set()
    again: set[str] = set()
    broken: list[str] = []
    for file in sorted(folder.glob("*.xml")):
        python = file.with_suffix(".again")  # of pytest, whose results do not have what has failed before it ran again
        try:
            cases = list(ElementTree.parse(file).iter("testcase"))
        except ElementTree.ParseError as e:  # the runner was killed
            broken.append(f"the results of {file.stem} cannot be read: {e}")
            continue
        for case in cases:
            package = case.get("classname", "").removeprefix("github.com/switchyard-moe/switchyard/")
            name = f"{package} {case.get('name')}"
            took.append((float(case.get("time") or 0), name))
            said = {child.tag: f"{child.get('message') or ''}\n{child.text or ''}" for child in case}
            if "failure" in said or "error" in said:
                failures[name] = said.get("failure", said.get("error", ""))
            elif "skipped" in said:
                skipped[reason(said["skipped"])].append(name)
            elif not python.exists():
                passed.add(name)
        if python.exists():
            failed = {name.split(" ", 1)[1] for name in failures}
            again.update(line for line in python.read_text().splitlines() if line.split("::", 1)[-1] not in failed)

    print("== the ten slowest tests")
    for seconds, name in sorted(took, reverse=True)[:10]:
        print(f"{seconds:7.1f} s  {name}")
    print("== tests that were skipped")
    for why, names in sorted(skipped.items(), key=lambda item: (-len(item[1]), item[0])):
        # Tests of a package together, and parts of a test as one.
        packages: dict[str, dict[str, None]] = defaultdict(dict)
        for package, name in (n.split(" ", 1) for n in names):
            packages[package][re.split(r"[/\[]", name)[0]] = None
        listed = "; ".join(f"{package} {', '.join(tests)}" for package, tests in packages.items())
        print(textwrap.fill(f"{why} ({len(names)}): {listed}", 160, subsequent_indent="    ", break_long_words=False))
    for name in sorted(again | failures.keys() & passed):
        print(f"FLAKY {name}")
    failing = [name for name in failures if name not in passed]
    for name in failing:
        print(f"== FAILED: {name}")
        print("\n".join(failures[name].rstrip().splitlines()[-LAST_LINES:]))
    for what in broken:
        print(f"== FAILED: {what}")
    for step in (folder / "failed").read_text().splitlines():
        print(f"== FAILED: step {step}")
    if failing:
        print(textwrap.fill(f"failing tests: {', '.join(failing)}", 160, break_long_words=False))
    return 1 if failing or broken else 0


sys.exit(main(pathlib.Path(sys.argv[1])))
