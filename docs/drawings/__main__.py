"""Make the drawings of the pages: `python docs/drawings [FOLDER]`, into docs/drawings at first.

They are kept beside this program, since a folder of pages is read where nothing is built; a test
makes them again and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

import house  # noqa: E402
import schedules  # noqa: E402
import stories  # noqa: E402

DRAWINGS = {
    "double_tree": schedules.double_tree,
    "doubling": schedules.doubling,
    "engine": stories.engine,
    "floors": house.floors,
    "halving": schedules.halving,
    "hierarchical": schedules.hierarchical,
    "pipeline": stories.pipeline,
    "ring": schedules.ring,
    "tree": schedules.tree,
    "waiting": stories.waiting,
}


def main() -> None:
    """Write every drawing."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (folder / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
