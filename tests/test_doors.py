"""Tests come in by the public doors: reaches into private attributes are counted, and get fewer."""

from __future__ import annotations

import ast

from launcher import ROOT

# How many there may be. Lower it with each one that goes; a test that needs another needs a door.
MOST = 113

# Public in spite of their underscore: of named tuples, and of the standard library.
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit", "_getframe", "_current_frames"}


def reaches(tree):
    """Yield each `thing._name` in a file, but for what a class does to itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and not node.attr.startswith("__") and node.attr not in PUBLIC:
                yield f"{node.lineno}: {ast.unparse(node)}"


def test_private_attributes_are_reached_into_less_and_less():
    found = [
        f"{file.relative_to(ROOT)}:{reach}"
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for reach in reaches(ast.parse(file.read_text()))
    ]
    assert len(found) <= MOST, "\n".join(found)


def test_what_counts():
    text = "a._b\na._b._c\nself._d\nself._d._e\ncls._f\na.b\na.__class__\nt._replace()\n_g"
    assert list(reaches(ast.parse(text))) == [
        "1: a._b", "2: a._b._c", "4: self._d._e", "2: a._b",
    ]  # fmt: skip
