"""The table of docs/migrate-from-horovod.md has all names."""

import re

from launcher import ROOT

PAGE = ROOT / "docs" / "migrate-from-horovod.md"


def test_every_name_is_on_the_page():
    import strategies.horovod.numpy as hvd

    words = set(re.findall(r"\w+", PAGE.read_text()))
    ours = {"Handle", "HorovodContext", "elastic", "get_process_set_ids_and_ranks"}
    grouped = {name for name in hvd.__all__ if name.startswith("grouped_")}
    assert not set(hvd.__all__) - words - ours - grouped
