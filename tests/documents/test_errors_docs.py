"""The page of errors has every kind, and a traceback that ends a job leads there."""

from __future__ import annotations

import inspect

import pytest

import collectives as cc
import collectives.errors
from launcher import ROOT, mpirun
from strategies import errors

PAGE = (ROOT / "docs" / "errors.md").read_text()
KINDS = [
    kind
    for module in (collectives.errors, errors)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, (cc.CollectiveError, errors.OpError)) and kind is not errors.OpError
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_error_has_its_place(kind):
    assert f"\n### {kind.__name__}\n" in PAGE
    assert collectives.errors.page(kind("x")) == f"docs/errors.md#{kind.__name__.lower()}"


def test_what_is_derived_from_ours_leads_to_ours_and_others_nowhere():
    class Special(cc.PeerFailure):
        pass

    assert collectives.errors.page(Special("x")) == "docs/errors.md#peerfailure"
    assert collectives.errors.page(ValueError("x")) is None


def test_the_last_line_of_a_traceback_leads_to_the_page(tmp_path):
    (tmp_path / "wrong.py").write_text(
        "import numpy as np, collectives as cc\n"
        "comm = cc.init()\n"
        "comm.allreduce(np.zeros(3 + comm.rank))\n"
    )
    result = mpirun(2, "wrong.py", cwd=tmp_path, timeout=60, PYTHONPATH=str(ROOT))
    assert result.status != 0
    assert "[0/2] what to do: docs/errors.md#mismatcherror\n" in result.stderr
