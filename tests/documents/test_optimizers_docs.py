"""The examples of docs/optimizers.md are true."""

from __future__ import annotations

import doctest

from launcher import ROOT


def test_examples():
    document = str(ROOT / "docs" / "optimizers.md")
    result = doctest.testfile(document, module_relative=False)
    assert result.attempted > 20
    assert result.failed == 0
