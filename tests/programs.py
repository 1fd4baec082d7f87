"""Programs of a page, run as a reader would: files are written, commands typed, outputs compared.

On a page a file is a line that names it, such as "`train.py`:" at the end of a paragraph, and the
next block of Python. A block of `sh` is typed in a folder that has these files; a block without a
language after it is what it prints, in which the lines of several ranks may come in any order.
Where a comment before it says so, its numbers, folders and spans are those of one run. A command
that ends with `|| echo WORDS` has to fail.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from launcher import ROOT, mpirun_path, run

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OF_ONE_RUN = "<!-- numbers and folders are of one run -->"
# The span of the longest wait is left out: on a busy machine a rank may be late for another reason.
_ANY = re.compile(r", while it was in '\w+'|\d+(?:\.\d+)?|/[\w./-]+(?=/)")
_NAME = re.compile(r"`([\w-]+\.py)`")


class Session(NamedTuple):
    """Commands, and what they print; None where the page does not say."""

    commands: list[str]
    output: str | None
    exact: bool = True


class Page(NamedTuple):
    """What a reader copies from a page, in its order."""

    files: dict[str, str]
    sessions: list[Session]


def read(path: Path) -> Page:
    """Return the files and sessions of a page; a program without a name is not one of them."""
    text = path.read_text()
    files: dict[str, str] = {}
    sessions: list[Session] = []
    end = 0
    for block in _BLOCK.finditer(text):
        between = text[end : block.start()]
        language, body = block.groups()
        if language == "python" and (names := _NAME.findall(between.strip().split("\n\n")[-1])):
            files[names[-1]] = body
        elif language == "sh":
            sessions.append(Session(body.strip().splitlines(), None))
        elif not language and sessions and between.strip() in ("", _OF_ONE_RUN):
            sessions[-1] = sessions[-1]._replace(output=body, exact=not between.strip())
        end = block.end()
    return Page(files, sessions)


def try_out(
    page: Page, folder: Path, timeout: float, leave_out: tuple[str, ...] = (),
    python: str = sys.executable, **extra: str,
) -> int:  # fmt: skip
    """Type what a page says; returns how many outputs were compared.

    Args:
        page: to try.
        folder: an empty one.
        timeout: seconds for each command.
        leave_out: parts of commands that this machine cannot run.
        python: the interpreter, of the environment that the page tells to make.
        **extra: variables for the commands; without PYTHONPATH they find this checkout.
    """
    extra.setdefault("PYTHONPATH", str(ROOT))
    for name, text in page.files.items():
        (folder / name).write_text(text)
    compared = 0
    for commands, output, exact in page.sessions:
        if any(word in command for word in leave_out for command in commands):
            continue
        printed = ""
        for command in commands:
            command, _, last_words = command.partition(" || echo ")
            result = run(_words(command, python), cwd=folder, timeout=timeout, **extra)
            said = f"{command}\n{result.stdout}\n{result.stderr}"
            assert (result.status == 0) == (not last_words), said
            printed += f"{result.stdout}{last_words}\n"
        if output is not None:
            compare(commands, output.splitlines(), printed.splitlines(), exact)
            compared += 1
    return compared


def _words(command: str, python: str) -> list[str]:
    first, *rest = shlex.split(command)
    if first == "mpirun":
        return [mpirun_path(python), *(python if word == "python" else word for word in rest)]
    assert first == "python", f"no program that a page may type: {command}"
    return [python, *rest]


def compare(
    commands: list[str], expected: list[str], printed: list[str], exact: bool = True
) -> None:
    """Compare lines in any order."""

    def bare(lines: list[str]) -> Counter[str]:
        texts = lines if exact else [" ".join(_ANY.sub("#", line).split()) for line in lines]
        return Counter(text.rstrip() for text in texts if text.strip())

    assert bare(printed) == bare(expected), f"{commands} print\n" + "\n".join(printed)
