"""How the site is built: `make docs`, into out/site."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import public_names  # noqa: E402
import search_texts  # noqa: E402
import sidebar  # noqa: E402
import source_links  # noqa: E402
from collectives.core.version import __version__  # noqa: E402

project = "Unisono"
author = "the authors of Unisono"
project_copyright = "2026, the authors of Unisono"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "index"
exclude_patterns = ["drawings"]
highlight_language = "none"  # output and messages; code names its language
default_role = "code"  # docstrings write `names` as Markdown does
nitpicky = False

myst_enable_extensions = ["attrs_inline", "deflist"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"Unisono {version} (alpha)"
html_show_sphinx = False
html_additional_pages = {"search": "search.html"}
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_theme_options = {"navigation_with_keys": True}

napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Collective", "Cost", "Meaning", "Order", "Source"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
suppress_warnings = ["ref.python"]  # annotations name classes that several modules have
# Optional: their users have them, the site does not need them.
autodoc_mock_imports = ["cupy", "jax", "jaxlib", "optax", "torch"]


public_names.write(ROOT / "docs" / "api")


def setup(app: Sphinx) -> None:
    """Read docstrings as we write them, before napoleon does; make sidebars before the theme."""
    app.connect("builder-inited", search_texts.replace_index)
    app.connect("build-finished", search_texts.write)
    app.connect("doctree-resolved", source_links.link)
    app.connect("autodoc-process-docstring", public_names.sentences, priority=400)
    app.connect("html-page-context", sidebar.Sidebar(), priority=400)
