"""Damaged files of all kinds give documented errors and take little memory; see `damage.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# The number of files, and seconds that they may take.
USUALLY, LONG = (3000, 300), (100_000, 3600)


@pytest.mark.timeout(LONG[1] + 60)
def test_damaged_files(tmp_path, pytestconfig):
    files, seconds = LONG if pytestconfig.getoption("--long") else USUALLY
    program = Path(__file__).with_name("damage.py")
    command = [sys.executable, str(program), f"--files={files}", "--folder", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["grown_mib"] < 64
    # All of these happen, or the files are not what they should be.
    for error in ("OutOfRangeError", "DataLossError", "InvalidArgumentError"):
        assert report["errors"][error] > files / 50
