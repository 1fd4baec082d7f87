"""Runs a user's program in this process, as `python PROGRAM` does."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["run"]


def run(command: Sequence[str], usage: str | None, prepare: Callable[[], None]) -> int:
    """Run a program with its arguments, or a module after `-m`.

    The program is `__main__` and can import modules beside it, as if Python had started it.

    Args:
        command: command line after `python`; `--help` prints the usage.
        usage: text printed for `--help`, and without a program.
        prepare: called before the program.

    Returns:
        exit status; the program may raise `SystemExit` instead.
    """
    asks = command[:1] in (["-h"], ["--help"])
    if asks or not command or command == ["-m"]:
        print(usage, file=sys.stdout if asks else sys.stderr)
        return 0 if asks else 2
    if command[0] != "-m" and not Path(command[0]).exists():
        print(f"no such program, expected a file, got {command[0]!r}", file=sys.stderr)
        return 2  # the status of `python NOFILE`
    # After the checks: a wrong command must not start MPI.
    prepare()
    if command[0] == "-m":
        # `python -m` puts the working directory in front, `python FILE` the directory of the file.
        sys.argv, sys.path[0] = list(command[1:]), str(Path.cwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = list(command), str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")
    return 0
