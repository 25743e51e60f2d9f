"""A plugin of pytest for run.py: it says in Go's words which test begins and how it ended, and leaves out what is done."""

from __future__ import annotations

import os
import sys

import pytest

_failed: set[str] = set()
_took: dict[str, float] = {}


def _say(lines: str) -> None:
    print("\n" + lines, file=sys.stdout, flush=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    done = os.environ.get("SWITCHYARD_TESTS_DONE", "").split("\n")
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logstart(nodeid: str) -> None:
    _say(f"=== ITEM {nodeid}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid
    _took[name] = _took.get(name, 0) + report.duration
    if report.failed:
        _failed.add(name)
        _say(f"{report.when}:\n{report.longreprtext}")
    if report.skipped:
        _say(f"{report.longrepr}\n--- SKIP: {name} ({_took[name]:.2f}s)")
    elif report.when == "teardown":
        _say(f"--- {'FAIL' if name in _failed else 'PASS'}: {name} ({_took[name]:.2f}s)")


def pytest_sessionfinish(exitstatus: int) -> None:
    _say("PASS" if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else "FAIL")
