"""`python -m collectives errors`: cause and remedy of an error message.

The page `docs/errors.md` is also `collectives/errors.md`: a link in a checkout, a file in an
installed package.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["Entry", "entries", "found", "page_path", "pattern", "run"]

_HEADING = re.compile(r"^(#{2,4}) (.+)$", re.MULTILINE)
# Anchors are the words of a heading, as on the site.
_NOT_IN_AN_ANCHOR = re.compile(r"[^\w\- ]")


class Entry(NamedTuple):
    """An error class or a message, with its text from the page.

    Attributes:
        title: name of the class, or the message, with `...` for variable parts.
        text: text of the page without the heading; for a class, with all its messages.
        is_message: whether it is a message.
    """

    title: str
    text: str
    is_message: bool

    @property
    def anchor(self) -> str:
        """Its anchor on the page."""
        words = _NOT_IN_AN_ANCHOR.sub("", self.title.lower())
        return words.strip().replace(" ", "-")

    def fits(self, text: str) -> bool:
        """Return whether a text contains this message; line ends count as spaces."""
        return self.is_message and pattern(self.title).search(" ".join(text.split())) is not None


def page_path() -> Path:
    """Return the path of the page."""
    return Path(__file__).resolve().parents[1] / "errors.md"


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Return the classes and messages of the page, in order."""
    page = page_path().read_text(encoding="utf-8")
    headings = list(_HEADING.finditer(page))
    made = []
    for number, heading in enumerate(headings):
        level, title = len(heading[1]), heading[2].strip("`")
        # Sections of the page have no entry of their own.
        if level == 2:
            continue
        # Up to the next heading of this level or above, so a class includes its messages.
        above = (other.start() for other in headings[number + 1 :] if len(other[1]) <= level)
        text = page[heading.end() : next(above, len(page))].strip()
        made.append(Entry(title, text, level == 4))
    return tuple(made)


def found(words: str) -> list[Entry]:
    """Return the entries for a class's name, a message, or some words of a message.

    Example:
        >>> [entry.title for entry in found("PeerFailure")]
        ['PeerFailure']
        >>> found("allreduce: calls differ between ranks: shape is (3,)")[0].anchor
        'calls-differ-between-ranks'
    """
    # A qualified name, as in a traceback.
    name = words.strip().rsplit(".", 1)[-1]
    # The page describes both under one heading.
    if name in ("ValueError", "TypeError"):
        name = "ValueError and TypeError"
    classes = [entry for entry in entries() if not entry.is_message]
    if named := [entry for entry in classes if entry.title.lower() == name.lower()]:
        return named
    messages = [entry for entry in entries() if entry.is_message]
    said = " ".join(words.split()).lower()
    # Messages that fit, then words of a message, then a class in the text.
    return (
        [entry for entry in messages if entry.fits(words)]
        or [entry for entry in messages if said in entry.title.lower()]
        or [entry for entry in classes if entry.title in words]
    )


def run(words: list[str]) -> int:
    """Print matching entries, or a list of all without words; return the exit status."""
    if not words:
        for entry in entries():
            print(f"    {entry.title}" if entry.is_message else entry.title)
        print(f"\npython -m collectives errors NAME, or words of a message; all: {page_path()}")
        return 0
    chosen = found(" ".join(words))
    for entry in chosen:
        print(f"{entry.title}\n\n{_plain(entry.text)}\n")
    place = f"{page_path()}#{chosen[0].anchor}" if chosen else f"nothing like it in {page_path()}"
    print(place)
    return 0 if chosen else 1


def _plain(text: str) -> str:
    """Return a text without links and emphasis."""
    without_links = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(
        r"\*\*?(\S[^*]*)\*\*?", r"\1", re.sub(r"^#+ ", "", without_links, flags=re.MULTILINE)
    )


def pattern(text: str) -> re.Pattern[str]:
    """Return an expression for a message of the page, in which `...` matches anything."""
    # Quotes and backticks match each other, because messages and page use both.
    parts = (re.escape(part) for part in text.replace("'", "`").split("..."))
    return re.compile(".*".join(parts).replace("`", "[`']"), re.DOTALL)
