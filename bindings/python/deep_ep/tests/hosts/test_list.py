"""The page about the programs lists all that is not their own."""

from __future__ import annotations

from pathlib import Path

import programs
import pytest

PAGE = Path(__file__).parents[5] / "docs" / "deep-ep-hosts.md"
TITLES = {"sglang": "SGLang", "torchtitan": "torchtitan", "vllm": "vLLM"}


@pytest.mark.parametrize("program", TITLES)
def test_the_page_lists_what_is_replaced(program):
    part = PAGE.read_text().partition(f"\n## {TITLES[program]}\n")[2].partition("\n## ")[0]
    listed = [line for line in part.splitlines() if line.startswith("| ") and line != "| replaced | what it stands for |"]
    assert listed == programs.table(program)
    names = " ".join(f"`{name}`" for name in programs.STAND_INS[program].split())
    assert names in " ".join(part.split())
