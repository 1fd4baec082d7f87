"""The examples of docs/operations.md and docs/operations are true, and so is its table."""

from __future__ import annotations

import doctest

import pytest

from collectives.algorithms import selection
from launcher import ROOT

PAGE = ROOT / "docs" / "operations.md"
# Page -> examples that it has at least.
EXAMPLES = {
    "operations.md": 5,
    "operations/reductions.md": 10,
    "operations/gathers.md": 10,
    "operations/point-to-point.md": 8,
    "operations/asynchronous.md": 5,
    "operations/groups.md": 5,
    "operations/plans.md": 10,
    "operations/objects.md": 3,
    "operations/horovod.md": 4,
}


@pytest.mark.parametrize("page", EXAMPLES)
def test_examples(page):
    result = doctest.testfile(str(ROOT / "docs" / page), module_relative=False)
    assert result.attempted >= EXAMPLES[page]
    assert result.failed == 0


def test_every_page_with_examples_is_run():
    pages = [PAGE, *(ROOT / "docs" / "operations").glob("*.md")]
    with_examples = {page for page in pages if ">>> " in page.read_text()}
    assert with_examples == {ROOT / "docs" / page for page in EXAMPLES}


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
