"""Test files can be read where nothing optional is installed, as on a stranger's machine."""

from __future__ import annotations

import sys

from launcher import run
from requirements import OPTIONAL

READ = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # none of them can be found or imported
import pytest
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "tests"]))
"""


def test_every_test_file_asks_for_optional_packages_before_it_imports_them():
    command = [sys.executable, "-c", READ, *OPTIONAL]
    listed = run(command, timeout=300, UNISONO_REQUIRE="").checked().stdout
    assert "test_collection.py" in listed
