"""Errors that tests see are on the page of all messages."""

from __future__ import annotations

import re
import sys

from launcher import ROOT

__all__ = ["check", "check_output"]

_RAISED = re.compile(r"(?:collectives\.core|strategies)\.errors\.(\w+): (.*)")


def check(text: str) -> None:
    """Assert that a text is one of those that docs/messages.py finds in the sources."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import messages
    finally:
        sys.path.pop(0)
    assert messages.listed(ROOT, text), f"docs/messages.py does not find: {text}"


def check_output(output: str) -> None:
    """Assert it of the errors of ours that end tracebacks in what programs print."""
    for _, text in _RAISED.findall(output):
        check(text)
