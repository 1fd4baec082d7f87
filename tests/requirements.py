"""Tests of what a laptop may not have: skipped there, failures where they are required."""

from __future__ import annotations

import os

import pytest


def require(name: str, reason: str) -> None:
    """Skip a test because of `reason`; fail if UNISONO_REQUIRE lists `name`."""
    if name in os.environ.get("UNISONO_REQUIRE", "").split(","):
        pytest.fail(f"UNISONO_REQUIRE names {name}, but {reason}", pytrace=False)
    pytest.skip(f"{name}: {reason}")
