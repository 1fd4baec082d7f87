"""Runs a user's program in this process, as `python PROGRAM` does."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["run"]


def run(command: Sequence[str], usage: str | None, prepare: Callable[[], None]) -> int:
    """Run a program with its arguments, or a module: `-m` and its name come first then.

    It finds itself as `__main__`, and modules beside it, as if Python had been started with it.

    Args:
        command: as it follows `python`; `--help` for the usage.
        usage: what is printed then, and where there is no program.
        prepare: called before the program.

    Returns:
        The status to exit with; the program may raise `SystemExit` before.
    """
    asks = command[:1] in (["-h"], ["--help"])
    if asks or not command or command == ["-m"]:
        print(usage, file=sys.stdout if asks else sys.stderr)
        return 0 if asks else 2
    if command[0] != "-m" and not Path(command[0]).exists():
        print(f"no such program, expected a file, got {command[0]!r}", file=sys.stderr)
        return 2  # the status of `python NOFILE`
    prepare()
    if command[0] == "-m":
        sys.argv, sys.path[0] = list(command[1:]), str(Path.cwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = list(command), str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")
    return 0
