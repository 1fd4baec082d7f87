"""The examples of docs/migrate-from-horovod.md are true, and its table has all names."""

from __future__ import annotations

import doctest
import re

from launcher import ROOT

PAGE = ROOT / "docs" / "migrate-from-horovod.md"


def test_examples():
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 3
    assert result.failed == 0


def test_every_name_is_on_the_page():
    import strategies.horovod.numpy as hvd

    words = set(re.findall(r"\w+", PAGE.read_text()))
    ours = {"Handle", "HorovodContext", "elastic", "get_process_set_ids_and_ranks"}
    grouped = {name for name in hvd.__all__ if name.startswith("grouped_")}
    assert not set(hvd.__all__) - words - ours - grouped
