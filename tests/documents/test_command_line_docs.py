"""What docs/command-line.md shows of commands is what docs/commands.py writes there."""

import runpy

import pytest

from launcher import ROOT
from pairwise import also
from requirements import needs


@pytest.mark.parametrize(
    ("command", "examples"), [("check", 1), ("explain", 3), also("simulate", 2)]
)
def test_the_page_shows_what_commands_print(command, examples):
    if command == "simulate":
        needs("greenlet")
    commands = runpy.run_path(str(ROOT / "docs" / "commands.py"))
    page = commands["PAGE"].read_text()
    assert page.count(f"-m collectives {command}") >= examples
    assert commands["text"](command) == page, "run python docs/commands.py"
