"""torch's own tests of calls between two ranks, broadcasts, gathers, scatters and reductions, on the backend "switchyard".

They come with torch (torch.testing._internal) and run as they are, on the CPU, with WORLD_SIZE ranks, 2 by default. Cases that
torch has for gloo alone run too. Arguments are those of unittest, such as -k broadcast.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import tempfile
import unittest
from typing import Any

OPERATIONS = re.compile(r"test_(send|recv|isend|irecv|batch_isend|broadcast|gather|scatter|reduce|all_gather|all_reduce)")
# Cases that are about something else: torch's profiler counts gloo's own events.
OTHERS = re.compile(r"profiler|cuda|nccl")

os.environ.update(BACKEND="gloo", WORLD_SIZE=os.environ.get("WORLD_SIZE", "2"))
scratch = tempfile.TemporaryDirectory()
os.environ.setdefault("TEMP_DIR", scratch.name)
for folder in ("barrier", "test_dir", "init_dir"):
    os.makedirs(os.path.join(os.environ["TEMP_DIR"], folder), exist_ok=True)

from torch.testing._internal.distributed import distributed_test  # noqa: E402

import switchyard.torch  # noqa: E402

distributed_test.BACKEND = "switchyard"  # torch has read what its cases need, which is what gloo has
if int(os.environ["WORLD_SIZE"]) > 2:
    os.environ["BACKEND"] = "mpi"  # cases in a group of ranks 1 and 2 run with fewer than 8 ranks, too


class TestSwitchyard(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """Every case in processes of its own. Nothing of the library is loaded before they are forked."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)

    def run_test(self, test_name: str, pipe: Any) -> None:
        """Run a case in a rank's process, and say which calls torch's own backends have made."""
        super().run_test(test_name, pipe)
        left = {f["operation"] + ": " + f["reason"] for r in switchyard.metrics()["ranks"] for f in r.get("fallbacks", [])}
        if left and self.rank == 0:
            print("fell back:", test_name, sorted(left), file=sys.stderr)


def load_tests(loader: unittest.TestLoader, _: Any, __: Any) -> unittest.TestSuite:
    """The cases of these operations."""
    patterns = loader.testNamePatterns
    names = [n for n in loader.getTestCaseNames(TestSwitchyard) if OPERATIONS.match(n) and not OTHERS.search(n)]
    assert names or patterns
    return unittest.TestSuite(TestSwitchyard(n) for n in names)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v", *sys.argv[1:]])
