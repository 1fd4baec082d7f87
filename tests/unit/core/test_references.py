"""Whether a program still refers to an array."""

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from collectives.core import references


@pytest.mark.parametrize("kind", ["attribute", "item", "item of a tuple"])
@pytest.mark.parametrize("hold", [lambda x: x, lambda x: x[1:], lambda x: x.view(np.uint8)[:0]])
# Of a call's own references to its argument, CPython 3.14 counts one less than 3.11.
@pytest.mark.parametrize("uncounted", [0, 1])
def test_views_and_names_are_references(kind, hold, uncounted, monkeypatch):
    counted = sys.getrefcount
    monkeypatch.setattr(sys, "getrefcount", lambda x: counted(x) - 1 - uncounted)
    spec = importlib.util.find_spec(references.__name__)
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    is_referenced_elsewhere = fresh.is_referenced_elsewhere
    holder = SimpleNamespace(array=np.empty(8))
    box = {"item": [holder.array], "item of a tuple": (holder.array,)}.get(kind)
    if box is not None:
        holder.array = None

    def is_held():
        if box is None:
            return is_referenced_elsewhere(holder.array)
        return is_referenced_elsewhere(box[0])

    assert not is_held()
    held = hold(holder.array if box is None else box[0])
    assert is_held()
    del held
    assert not is_held()
