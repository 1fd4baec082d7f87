"""Texts of all sections for the site's search, written to `_static/search-texts.js`.

A script can be loaded from the file system, where pages cannot be fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

# Page or folder -> factor of its score: pages for users rank before lists and internals.
FACTORS = {
    "api/messages": 0.1,
    "api/": 0.4,
    "benchmarks/": 0.4,
    "architecture": 0.4,
    "from-tensorflow": 0.8,
    "glossary": 0.6,
    "how-a-call-goes": 0.4,
    "index": 0.3,
    "operations/horovod": 0.8,
    "proofs": 0.1,
}

TEXT, ROWS = 2, 3  # fields of a section


def replace_index(app: Sphinx) -> None:
    """Build no index of Sphinx's own search, for `builder-inited`."""
    app.builder.search = False


def write(app: Sphinx, error: Exception | None) -> None:
    """Write the texts, for `build-finished`."""
    if error is None and app.builder.name == "html":
        pages = [
            [name, app.env.titles[name].astext(), _factor(name), _sections(app, name)]
            for name in sorted(app.env.found_docs)
        ]
        path = Path(app.outdir) / "_static" / "search-texts.js"
        path.write_text(f"const PAGES = {json.dumps(pages, ensure_ascii=False)};\n", "utf-8")


def _factor(page: str) -> float:
    folder = page.rpartition("/")[0] + "/"
    return FACTORS.get(page, FACTORS.get(folder, 1.0))


def _sections(app: Sphinx, page: str) -> list[list[str]]:
    """Return anchor, heading, text and first cells of rows of each section or public name."""
    found: list[list[str]] = []
    for part in _parts(app.env.get_doctree(page)):
        if isinstance(part, nodes.section):
            found.append([part["ids"][0], part[0].astext(), "", ""])
        elif isinstance(part, addnodes.desc_signature):
            if part["ids"]:
                found.append([part["ids"][0], part["fullname"], "", ""])
            found[-1][TEXT] += part.astext() + " "
        else:
            at = ROWS if isinstance(part, nodes.entry) else TEXT
            found[-1][at] += " ".join(part.astext().split()) + " "
    return found


def _parts(node: nodes.Element) -> Iterator[nodes.Element]:
    """Yield sections, public names, first cells of rows, and whatever else has text, in order."""
    for child in node.children:
        if isinstance(child, nodes.row):
            yield child[0]
        if isinstance(child, nodes.section | addnodes.desc_signature):
            yield child
        if isinstance(child, nodes.TextElement):
            if not isinstance(child, nodes.Invisible | nodes.title | addnodes.desc_signature):
                yield child
        elif isinstance(child, nodes.Element):
            yield from _parts(child)
