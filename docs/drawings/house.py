"""The layers of both packages, from the tables of docs/architecture.md."""

from __future__ import annotations

import re
from pathlib import Path

from canvas import Canvas

_PAGE = Path(__file__).resolve().parent.parent / "architecture.md"
_LEFT, _RIGHT = 216, 860  # pixels between which boxes are drawn


def floors() -> Canvas:
    """Draw every component in its layer; it imports from lower layers only."""
    page = _PAGE.read_text()
    drawn = []
    for name in ("collectives", "strategies"):
        section = page.split(f"\n## {name}\n", 1)[1].split("\n### ", 1)[0]
        drawn.append((name, re.findall(r"^\| (\d+) \| `([^`]+)` \|", section, re.MULTILINE)))
    rows: list[tuple[str, int | None, list[tuple[float, str]]]] = []  # from the top down
    for name, components in reversed(drawn):
        for layer in sorted({int(layer) for layer, _ in components}, reverse=True):
            first: int | None = layer
            for row in _rows(
                [component.removesuffix(".py") for at, component in components if int(at) == layer]
            ):
                rows.append((name, first, row))
                first = None
    canvas = Canvas(
        880,
        72 + 34 * len(rows),
        "The layers of both packages",
        "Components of the two packages, strategies above collectives. A component imports "
        "lower layers only; the tables below list the same components with their purpose.",
    )
    y, before, kind = 48, "", ""
    for name, layer, row in rows:
        if name != before:
            canvas.text(20, y + 20, name)
            before = name
        if layer is not None:
            canvas.text(140, y + 20, f"layer {layer}", "soft small")
            kind = f"h{layer % 5}"
        for x, component in row:
            canvas.box(x, y, _width(component), 28, component, kind)
        y += 34
    return canvas


def _width(component: str) -> float:
    return 8 * len(component) + 18


def _rows(components: list[str]) -> list[list[tuple[float, str]]]:
    """Return the positions of the components of one layer, in as many rows as they need."""
    rows: list[list[tuple[float, str]]] = [[]]
    x = _LEFT
    for component in components:
        if x + _width(component) > _RIGHT:
            rows.append([])
            x = _LEFT
        rows[-1].append((x, component))
        x += _width(component) + 6
    return rows
