"""The floors of both packages, as the tables of docs/architecture.md give them."""

from __future__ import annotations

import re
from pathlib import Path

from canvas import Canvas

_PAGE = Path(__file__).resolve().parent.parent / "architecture.md"
_LEFT, _RIGHT = 216, 860  # pixels, between which rooms stand


def floors() -> Canvas:
    """Draw every room on its floor; it imports from lower floors only."""
    page = _PAGE.read_text()
    drawn = []
    for name in ("collectives", "strategies"):
        section = page.split(f"\n## {name}\n", 1)[1].split("\n### ", 1)[0]
        drawn.append((name, re.findall(r"^\| (\d+) \| `([^`]+)` \|", section, re.MULTILINE)))
    rows: list[tuple[str, int | None, list[tuple[float, str]]]] = []  # from the roof down
    for name, rooms in reversed(drawn):
        for floor in sorted({int(floor) for floor, _ in rooms}, reverse=True):
            first: int | None = floor
            for row in _rows([room.removesuffix(".py") for at, room in rooms if int(at) == floor]):
                rows.append((name, first, row))
                first = None
    canvas = Canvas(
        880,
        72 + 34 * len(rows),
        "The floors of the house",
        "Rooms of the two packages, strategies above collectives. A room imports from rooms of "
        "lower floors only; the tables below list the same rooms with what they are for.",
    )
    y, before, kind = 48, "", ""
    for name, floor, row in rows:
        if name != before:
            canvas.text(20, y + 20, name)
            before = name
        if floor is not None:
            canvas.text(140, y + 20, f"floor {floor}", "soft small")
            kind = f"h{floor % 5}"
        for x, room in row:
            canvas.box(x, y, _width(room), 28, room, kind)
        y += 34
    return canvas


def _width(room: str) -> float:
    return 8 * len(room) + 18


def _rows(rooms: list[str]) -> list[list[tuple[float, str]]]:
    """Return where the rooms of one floor stand, in as many rows as they need."""
    rows: list[list[tuple[float, str]]] = [[]]
    x = _LEFT
    for room in rooms:
        if x + _width(room) > _RIGHT:
            rows.append([])
            x = _LEFT
        rows[-1].append((x, room))
        x += _width(room) + 6
    return rows
