"""The page of all messages: every error that the sources raise, by module, as readers see it.

What is filled in when it happens is shown as `...`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("collectives", "strategies")


class Raised(NamedTuple):
    """One place that raises."""

    file: str
    line: int
    kind: str  # the class
    text: str


def raised(root: Path) -> Iterator[Raised]:
    """Yield every place of the sources that raises an error with a text of its own."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                    text = "".join(_parts(node.exc.args[0])).strip()
                    if any(letter.isalpha() for letter in text.replace("...", "")):
                        name = ast.unparse(node.exc.func).rsplit(".", 1)[-1]
                        yield Raised(str(path.relative_to(root)), node.lineno, name, text)


def page(root: Path) -> str:
    """Return the page, which Sphinx reads."""
    lines = ["All messages", "============", ""]
    lines += ["What a class means, and what to do: :doc:`../errors`. ``...`` is filled in when it"]
    lines += ["happens.", ""]
    before = ""
    for file, line, kind, text in raised(root):
        if file != before:
            lines += ["", file, "-" * len(file), ""]
            before = file
        lines += [f"- line {line}, {kind}: ``{text.replace('`', chr(39))}``"]
    return "\n".join(lines) + "\n"


def _parts(node: ast.expr) -> Iterator[str]:
    """Yield the pieces of a text, and `...` for what is not known before it happens."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield " ".join(node.value.split("\n"))
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield from _parts(value)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _parts(node.left)
        yield from _parts(node.right)
    else:
        yield "..."
