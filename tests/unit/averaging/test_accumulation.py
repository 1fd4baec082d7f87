"""Gradients of several passes of one rank, before anybody else hears of them."""

from __future__ import annotations

import numpy as np
import pytest

from strategies.averaging.accumulation import GradientAccumulator


class Full:
    """A gradient for which there is no memory."""

    dtype = np.dtype(np.float32)
    shape = (2,)

    def __mul__(self, other):
        raise MemoryError("full")


def test_passes_are_added_until_there_are_enough():
    passes = GradientAccumulator(3)
    assert passes.add([np.ones(2)]) is None
    whole = passes.add([np.full(2, 5.0)], count=2)
    assert whole.gradients[0].tolist() == [6.0, 6.0]
    assert (whole.passes, whole.at_once, whole.error) == (3, False, None)


@pytest.mark.parametrize("before", [0, 1])
def test_they_are_enough_if_they_are_said_to_be_complete(before):
    passes = GradientAccumulator(5)
    for _ in range(before):
        assert passes.add([np.ones(2)], examples=2) is None
    whole = passes.add([np.full(2, 4.0)], examples=2, complete=True)
    assert whole.passes == before + 1
    assert whole.at_once == (not before)
    assert whole.gradients[0].tolist() == [(1.0 + 4.0) / 2] * 2 if before else [4.0] * 2
    assert passes.count == 0


def test_an_error_of_any_kind_waits_for_the_others():
    passes = GradientAccumulator(2)
    assert passes.add([Full()]) is None
    whole = passes.add([np.ones(2)])
    assert isinstance(whole.error, MemoryError)
    assert passes.add([np.ones(2)]) is None  # in the next step nothing is left of it
    assert passes.add([np.ones(2)]).error is None
