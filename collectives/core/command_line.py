"""Command lines of both packages: errors in one line, and the end of a closed pipe."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

__all__ = ["CommandParser", "at_least", "closed_pipe_ends"]


class CommandParser(argparse.ArgumentParser):
    """Parser that reports errors in one line instead of printing all options.

    It takes whole names of options only: `collectives simulate` looks for `--cluster` before it
    parses, which an abbreviation would evade.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and the message."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def at_least(least: int) -> Callable[[str], int]:
    """Return a `type=` of arguments that are integers >= `least`."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"expected an integer >= {least}, got {text!r}")
        return value

    return integer


@contextlib.contextmanager
def closed_pipe_ends() -> Iterator[None]:
    """End the block without an error if the reader of stdout has gone, as after `| head`."""
    try:
        yield
        # Here, because an error in the flush at exit could not be handled.
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
