"""The examples of docs/input.md are true."""

from __future__ import annotations

import doctest

import pytest

from launcher import ROOT


def test_examples(tmp_path, monkeypatch):
    pytest.importorskip("google_crc32c")
    monkeypatch.chdir(tmp_path)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    document = str(ROOT / "docs" / "input.md")
    result = doctest.testfile(document, module_relative=False, optionflags=options)
    assert result.attempted > 10
    assert result.failed == 0
