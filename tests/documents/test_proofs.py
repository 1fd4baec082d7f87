"""docs/proofs.md has a row for every page, and names tests that are there."""

from __future__ import annotations

import re

from launcher import ROOT

DOCS = ROOT / "docs"
PAGE = (DOCS / "proofs.md").read_text()
ROWS = dict(re.findall(r"^\| \[[^]]+\]\(([^)]+)\) \| (.+) \|$", PAGE, re.MULTILINE))


def test_every_page_has_a_row():
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    pages = {page for page in pages if not page.startswith("api/")}
    assert pages | {"api/index.rst", "api/messages.md"} == set(ROWS)


def test_what_is_named_is_there():
    for page, proof in ROWS.items():
        for name in re.findall(r"`((?:tests|benchmarks)[/\w.]*)`", proof):
            assert (ROOT / name).exists(), f"{page}: {name}"


def test_a_page_whose_examples_run_is_named_by_their_test():
    for page, proof in ROWS.items():
        if proof.startswith(("all examples run", "program run", "all programs")):
            tests = re.findall(r"`(tests/[\w/]+/test_\w+\.py)`", proof)
            text = "".join((ROOT / name).read_text() for name in tests)
            assert page.rpartition("/")[2] in text, page
