"""The sidebar of every page, made of titles alone.

The theme asks for all titles, and to get them Sphinx copies, for each page, the contents of all
pages with their public names, and takes these out again: half of the time of a build.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx


class Sidebar:
    """For `html-page-context`, before the theme asks."""

    def __init__(self) -> None:
        self._titles: dict[str, nodes.bullet_list] = {}

    def __call__(
        self, app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object
    ) -> None:
        """Let `toctree(titles_only=True)` read contents that have only titles."""
        made: Callable[..., str] = context["toctree"]
        if not self._titles:
            self._titles = {name: _titles(toc) for name, toc in app.env.tocs.items()}

        def toctree(**options: Any) -> str:
            if not options.get("titles_only"):
                return made(**options)
            contents, app.env.tocs = app.env.tocs, self._titles
            try:
                return made(**options)
            finally:
                app.env.tocs = contents

        context["toctree"] = toctree


def _titles(contents: nodes.bullet_list) -> nodes.bullet_list:
    """Keep of a page's contents its title and the pages below it, as Sphinx would."""
    kept = contents.deepcopy()
    for entry in kept.children:
        if isinstance(entry, nodes.list_item) and len(entry) > 1:
            pages = list(entry.findall(addnodes.toctree))
            entry[1:] = [nodes.bullet_list("", *pages)] if pages else []
    return kept
