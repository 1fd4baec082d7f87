"""What docs/command-line.md shows of the commands that need no ranks is what they print."""

from __future__ import annotations

import re
import shlex

import pytest

from collectives import __main__
from launcher import ROOT
from pairwise import also
from requirements import needs

PAGE = ROOT / "docs" / "command-line.md"


def shown() -> list[tuple[list[str], str]]:
    """The commands of the page with what it shows below each; those of mpirun are of a machine."""
    blocks = re.findall(r"```\n\$ (.*)\n([\s\S]*?)\n```", PAGE.read_text())
    return [(shlex.split(line), text) for line, text in blocks if "mpirun" not in line]


@pytest.mark.parametrize(("command", "examples"), [("explain", 3), also("simulate", 2)])
def test_commands_print_what_the_page_shows(command, examples, capsys, monkeypatch):
    if command == "simulate":
        needs("greenlet")
    tried = 0
    for words, text in shown():
        at = words.index("python")
        if words[at + 3] != command:
            continue
        with monkeypatch.context() as variables:
            variables.setenv("UNISONO_TUNED", "off")
            for setting in words[:at]:
                variables.setenv(*setting.split("=", 1))
            assert words[at : at + 3] == ["python", "-m", "collectives"]
            assert __main__.main(words[at + 3 :]) == 0
        assert capsys.readouterr().out.rstrip() == text.rstrip(), shlex.join(words)
        tried += 1
    assert tried == examples
