"""The table of hooks of docs/sessions.md is true."""

import re

from launcher import ROOT
from strategies.session import Summaries, hooks

PAGE = ROOT / "docs" / "sessions.md"


def test_the_table_of_hooks_is_the_order_of_the_hooks():
    rows = re.findall(r"^\| `(\w+)[`(].*?\| (\d\d) \|", PAGE.read_text(), re.M)
    kinds = vars(hooks) | {"Summaries": Summaries}
    assert [(name, kinds[name].order) for name, _ in rows] == [(n, int(o)) for n, o in rows]
    assert len(rows) == 8
