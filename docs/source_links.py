"""Links from paths in the text, such as `examples/train_digits.py`, to copies of the files.

The copies are in `_sources`, beside the copies of the pages, as text that browsers show.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
# Tables of a package's modules leave out the package.
FOLDERS = (ROOT, ROOT / "collectives", ROOT / "strategies")


def link(app: Sphinx, page: nodes.document, name: str) -> None:
    """Link the paths on a page, for `doctree-resolved`."""
    if app.builder.name != "html":
        return
    links = [*page.findall(nodes.reference), *page.findall(addnodes.download_reference)]
    linked = {literal for link in links for literal in link.findall(nodes.literal)}
    for literal in set(page.findall(nodes.literal)) - linked:
        if path := _file(literal.astext()):
            copied = f"_sources/{path.relative_to(ROOT)}.txt"
            copy = Path(app.outdir) / copied
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            refuri = "../" * name.count("/") + copied
            literal.replace_self(
                nodes.reference("", "", literal.deepcopy(), internal=True, refuri=refuri)
            )


def _file(text: str) -> Path | None:
    """Return the file that a text names, if it names one."""
    if not re.fullmatch(r"\w[\w./-]*/[\w-]+\.(c|py|sbatch)", text):
        return None
    return next((folder / text for folder in FOLDERS if (folder / text).is_file()), None)
