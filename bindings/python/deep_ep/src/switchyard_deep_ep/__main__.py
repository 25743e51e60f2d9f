"""Runs a program with Switchyard's deep_ep, or says which one a program gets."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys

import switchyard_deep_ep

USAGE = "usage: python -m switchyard_deep_ep (script.py | -m module) [arguments], or --path, or --which"


def which() -> str:
    """The package that programs get, and the distributions that have one."""
    spec = importlib.util.find_spec("deep_ep")
    ours = spec is not None and os.path.dirname(os.path.dirname(spec.origin or "")) == switchyard_deep_ep.FOLDER
    others = ", ".join(switchyard_deep_ep.others()) or "no other distribution"
    return f"deep_ep is {'Switchyard' if ours else 'not Switchyard'}'s: {spec and spec.origin}; {others} has one"


def main(arguments: list[str]) -> None:
    if arguments == ["--path"]:
        print(switchyard_deep_ep.FOLDER)
        return
    if arguments == ["--which"]:
        print(which())
        return
    module = arguments[:1] == ["-m"]
    sys.argv = arguments[module:]
    if not sys.argv or sys.argv[0].startswith("-"):
        asked = arguments[:1] in (["-h"], ["--help"])
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        raise SystemExit(0 if asked else 2)
    switchyard_deep_ep.install()
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))  # as Python has it for scripts
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
