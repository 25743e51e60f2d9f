"""Builds the wheel: the package deep_ep lies in the folder switchyard_deep_ep, which Python looks into behind all others."""

from __future__ import annotations

import os
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDER = "switchyard_deep_ep"


class BuildWithPath(build_py):
    """build_py, and the file that puts the folder on the path of Python."""

    def path_file(self) -> str:
        return os.path.join(self.build_lib, FOLDER + ".pth")

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)  # what an older build has left would go into the wheel
        super().run()
        with open(self.path_file(), "w") as file:
            file.write(FOLDER + "\n")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), self.path_file()]


setup(cmdclass={"build_py": BuildWithPath})
