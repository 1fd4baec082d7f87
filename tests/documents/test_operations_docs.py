"""The table of algorithms of docs/operations.md is true."""

from __future__ import annotations

from collectives.algorithms import selection
from launcher import ROOT

PAGE = ROOT / "docs" / "operations.md"


def test_table_of_algorithms():
    lines = PAGE.read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("| operation | `auto`"))
    names = cells(lines[begin])[1:]
    found = {}
    for line in lines[begin + 2 : lines.index("", begin)]:
        operations, *marks = cells(line)
        for operation in operations.split(", "):
            found[operation] = {n for n, mark in zip(names, marks, strict=True) if mark == "x"}
    assert found == {name: {"auto", "node", *known} for name, known in selection.ALGORITHMS.items()}


def cells(line: str) -> list[str]:
    return [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
