"""Texts of dtypes in messages."""

import gc
import sys
import time

import numpy as np
import pytest
from calls import together

from collectives.arrays import dtypes

COMPOUND = [
    np.dtype([("a", "i1"), ("b", [("c", "<f4", (2, 3)), ("d", "S5")]), ("e", "<M8[s]")]),
    np.dtype([("é", "<u2"), ("z", "<c16")], align=True),
    np.dtype(("<i4", (2,))),
    np.dtype({"names": ["p"], "formats": ["<f8"], "offsets": [8], "itemsize": 32}),
]


@pytest.mark.parametrize("dtype", COMPOUND, ids=str)
def test_a_compound_dtype_is_restored_with_its_layout(dtype):
    restored = dtypes.named(dtypes.spelled(dtype))
    assert (restored, restored.itemsize) == (dtype, dtype.itemsize)


class _Cycle:
    """Garbage whose finalizer lets another thread run."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0)


def test_threads_read_dtypes_at_the_same_time_while_garbage_is_collected():
    # `ast.literal_eval` failed here: AST constructor recursion depth mismatch.
    text = dtypes.spelled(COMPOUND[0])

    def work(count):
        for _ in range(count):
            _Cycle()
            assert dtypes.named(text) == COMPOUND[0]

    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    try:
        sys.setswitchinterval(1e-6)
        gc.set_threshold(20, 1, 1)
        together(work, [500] * 4)
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
