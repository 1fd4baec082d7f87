"""Output of commands in docs/command-line.md; `python docs/commands.py` regenerates it.

The output of `mpirun` is from one machine and stays, except for the cases that `check` lists.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

from collectives import __main__
from collectives.tools import check

PAGE = Path(__file__).resolve().parent / "command-line.md"
_BLOCK = re.compile(r"(?<=```\n\$ )(.*)\n([\s\S]*?)(?=\n```)")


def output(command: str, shown: str) -> str:
    """Return what a command prints; of one that needs ranks, what the page shows."""
    words = shlex.split(command)
    if "mpirun" in words:
        return re.sub(
            r"(?m)^(\w+)( +ok +)\d+ cases.*", lambda m: m[1] + m[2] + check.passed(m[1]), shown
        )
    at = words.index("python")
    assert words[at : at + 3] == ["python", "-m", "collectives"], command
    changed = {"UNISONO_TUNED": "off", **dict(word.split("=", 1) for word in words[:at])}
    before = dict(os.environ)
    os.environ.update(changed)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert __main__.main(words[at + 3 :]) == 0, command
    finally:
        os.environ.clear()
        os.environ.update(before)
    return printed.getvalue().rstrip()


def text(only: str = "") -> str:
    """Return the page as it should be; `only` runs the commands of this name, all if empty."""

    def block(found: re.Match[str]) -> str:
        command, shown = found[1], found[2]
        wanted = not only or f"collectives {only} " in f"{command} "
        return f"{command}\n{output(command, shown) if wanted else shown}"

    return _BLOCK.sub(block, PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(text())
