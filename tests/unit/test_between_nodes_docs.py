"""The examples of docs/between-nodes.md are true."""

from __future__ import annotations

import doctest

from launcher import ROOT


def test_examples():
    document = str(ROOT / "docs" / "between-nodes.md")
    result = doctest.testfile(document, module_relative=False)
    assert result.attempted >= 7
    assert result.failed == 0
