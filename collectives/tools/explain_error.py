"""`python -m collectives errors`: cause and remedy of an error message.

The page, `docs/errors.md`, is `collectives/errors.md`, too: a link in a checkout, a file where
the package is installed.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["Entry", "entries", "found", "page_path", "pattern", "run"]

_HEADING = re.compile(r"^(#{2,4}) (.+)$", re.MULTILINE)
# Anchors as the site makes them: of a heading's words.
_NOT_IN_AN_ANCHOR = re.compile(r"[^\w\- ]")


class Entry(NamedTuple):
    """A class of errors, or one message, and what the page says of it.

    Attributes:
        title: the class's name, or the text of the message, with `...` for what is filled in.
        text: what the page says, without the heading; of a class with all its messages.
        is_message: which of the two.
    """

    title: str
    text: str
    is_message: bool

    @property
    def anchor(self) -> str:
        """Where it is on the page."""
        words = _NOT_IN_AN_ANCHOR.sub("", self.title.lower())
        return words.strip().replace(" ", "-")

    def fits(self, text: str) -> bool:
        """Tell whether a text has this message in it; one of several lines as one line."""
        return self.is_message and pattern(self.title).search(" ".join(text.split())) is not None


def page_path() -> Path:
    """Return the page's file."""
    return Path(__file__).resolve().parents[1] / "errors.md"


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Return the classes and messages of the page, in its order."""
    page = page_path().read_text(encoding="utf-8")
    headings = list(_HEADING.finditer(page))
    made = []
    for number, heading in enumerate(headings):
        level, title = len(heading[1]), heading[2].strip("`")
        if level == 2:
            continue
        above = (other.start() for other in headings[number + 1 :] if len(other[1]) <= level)
        text = page[heading.end() : next(above, len(page))].strip()
        made.append(Entry(title, text, level == 4))
    return tuple(made)


def found(words: str) -> list[Entry]:
    """Return what the page has for a class's name, a message, or some words of one.

    Example:
        >>> [entry.title for entry in found("PeerFailure")]
        ['PeerFailure']
        >>> found("allreduce: the ranks do not mean the same call: shape is (3,)")[0].anchor
        'the-ranks-do-not-mean-the-same-call'
    """
    name = words.strip().rsplit(".", 1)[-1]
    if name in ("ValueError", "TypeError"):
        name = "ValueError and TypeError"
    classes = [entry for entry in entries() if not entry.is_message]
    if named := [entry for entry in classes if entry.title.lower() == name.lower()]:
        return named
    messages = [entry for entry in entries() if entry.is_message]
    said = " ".join(words.split()).lower()
    return (
        [entry for entry in messages if entry.fits(words)]
        or [entry for entry in messages if said in entry.title.lower()]
        or [entry for entry in classes if entry.title in words]
    )


def run(words: list[str]) -> int:
    """Print what is found, or all there is where no words are given; returns the exit status."""
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
    """Leave out what is for a browser."""
    without_links = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(
        r"\*\*?(\S[^*]*)\*\*?", r"\1", re.sub(r"^#+ ", "", without_links, flags=re.MULTILINE)
    )


def pattern(text: str) -> re.Pattern[str]:
    """Return an expression for texts like a message of the page, in which `...` is anything."""
    parts = (re.escape(part) for part in text.replace("'", "`").split("..."))
    return re.compile(".*".join(parts).replace("`", "[`']"), re.DOTALL)
