"""The examples of docs/cluster.md are true."""

from __future__ import annotations

import doctest

from launcher import ROOT


def test_examples():
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    document = str(ROOT / "docs" / "cluster.md")
    result = doctest.testfile(document, module_relative=False, optionflags=options)
    assert result.attempted > 10
    assert result.failed == 0
