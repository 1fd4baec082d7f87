"""The examples of docs/reliability.md are true."""

from __future__ import annotations

import doctest

from launcher import ROOT


def test_examples():
    result = doctest.testfile(str(ROOT / "docs" / "reliability.md"), module_relative=False)
    assert result.attempted > 8
    assert result.failed == 0
