"""The examples of docs/reliability.md are true."""

from __future__ import annotations

import doctest
import sys

from launcher import ROOT, run


def test_examples():
    result = doctest.testfile(str(ROOT / "docs" / "reliability.md"), module_relative=False)
    assert result.attempted > 8
    assert result.failed == 0


def test_the_table_is_of_the_file_that_is_kept():
    script, file = ROOT / "benchmarks/recovery.py", ROOT / "docs/benchmarks/recovery.json"
    table = run([sys.executable, str(script), "table", str(file)], timeout=60).stdout.strip()
    assert "| all | 50 | 50 |" in table
    assert table in (ROOT / "docs" / "reliability.md").read_text()
