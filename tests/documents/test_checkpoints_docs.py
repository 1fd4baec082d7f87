"""The examples of docs/checkpoints.md are true."""

from __future__ import annotations

import doctest

import pytest

from launcher import ROOT
from requirements import needs


def test_examples(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("matplotlib")
    monkeypatch.chdir(str(tmp_path))
    document = str(ROOT / "docs" / "checkpoints.md")
    result = doctest.testfile(document, module_relative=False)
    assert result.attempted > 10
    assert result.failed == 0
