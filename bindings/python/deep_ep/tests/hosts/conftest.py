from __future__ import annotations

import collections

import programs
import pytest
import world

# Tests of the programs run where a command has fetched them, and says where.
collect_ignore = [] if programs.folder() else [f"test_{program}.py" for program in programs.REPLACED]


@pytest.fixture
def ranks(worlds: world.Worlds, request: pytest.FixtureRequest) -> world.World:
    """Ranks with the program that the test's file is named after: two, where the test does not say how many."""
    return worlds.get(getattr(request, "param", 2), getattr(programs, request.path.stem.removeprefix("test_")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What stood in for what a CPU lacks, and how each program did."""
    if programs.folder() is None:
        return
    ended: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, ()):
            ended[report.location[0].rpartition("test_")[2].removesuffix(".py")][outcome] += 1
    for program, replaced in programs.REPLACED.items():
        terminalreporter.section(program)
        terminalreporter.line(f"stand-ins of packages: {programs.STAND_INS[program]}")
        for name, what in replaced.items():
            terminalreporter.line(f"replaced: {name}: {what}")
        terminalreporter.line(", ".join(f"{count} {outcome}" for outcome, count in ended[program].items()) or "did not run")
