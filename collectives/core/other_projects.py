"""Other projects with the names of these packages, which replace or hide their files."""

from __future__ import annotations

import importlib.util
import os
import re
from importlib import metadata
from pathlib import Path

__all__ = ["conflicts"]

_NAMES = ("collectives", "strategies")

# Folders of installed distributions with these names.
_METADATA = re.compile(rf"({'|'.join(_NAMES)})-.*\.(dist|egg)-info")

_REMEDY = "Run `pip uninstall collectives strategies`, then install unisono again (docs/faq.md)"


def conflicts() -> list[str]:
    """Describe each other project that replaces or hides files of these packages.

    The distribution of this project is called unisono, so one called collectives or strategies in
    the same folder has overwritten files. Cost: below 1 ms, for a listing of the folder.
    """
    here = Path(__file__).resolve().parents[2]
    found = []
    try:
        folders = sorted(os.listdir(here))
    except OSError:  # packages in a zip file
        folders = []
    for folder in filter(_METADATA.fullmatch, folders):
        other = metadata.Distribution.at(here / folder)
        if any(file.parts[0] in _NAMES for file in other.files or ()):
            name = f"{other.metadata['Name']} {other.version}"
            found.append(f"{name} of another project overwrites files in {here}. {_REMEDY}")
    place = _place("strategies")
    if place is not None and place.resolve().parent != here:
        found.append(
            f"import strategies finds another project, expected {here / 'strategies'}, got "
            f"{place}. Rename it, or remove its folder from sys.path"
        )
    return found


def _place(package: str) -> Path | None:
    """Return the folder that a package is imported from; None if it is not found."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a program has put an object without a spec in its place
        return None
    folders = None if spec is None else spec.submodule_search_locations
    if folders:
        return Path(next(iter(folders)))
    return None if spec is None or spec.origin is None else Path(spec.origin)
