"""The table of docs/reliability.md is that of the measurements."""

import sys

from launcher import ROOT, run


def test_the_table_is_of_the_file_that_is_kept():
    script, file = ROOT / "benchmarks/recovery.py", ROOT / "docs/benchmarks/recovery.json"
    table = run([sys.executable, str(script), "table", str(file)], timeout=60).stdout.strip()
    assert "| all | 50 | 50 |" in table
    assert table in (ROOT / "docs" / "reliability.md").read_text()
