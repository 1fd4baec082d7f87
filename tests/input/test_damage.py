"""Damaged files of all kinds give documented errors and take little memory; see `damage.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# 100,000 take minutes: UNISONO_DAMAGED_FILES=100000
FILES = int(os.environ.get("UNISONO_DAMAGED_FILES", "3000"))


@pytest.mark.timeout(0 if FILES > 3000 else 300)
def test_damaged_files(tmp_path):
    pytest.importorskip("google_crc32c")
    program = Path(__file__).with_name("damage.py")
    command = [sys.executable, str(program), f"--files={FILES}", "--folder", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["grown_mib"] < 64
    # All of these happen, or the files are not what they should be.
    for error in ("OutOfRangeError", "DataLossError", "InvalidArgumentError"):
        assert report["errors"][error] > FILES / 50
