"""Which rows an answer has to bring."""

import numpy as np
import pytest

from strategies.variables.variable_group import DirtyRows


def noted(*updates, rows=100):
    """Note an update for each version from 1 on: rows, or None for all of them."""
    changes = DirtyRows((rows, 2))
    for version, indices in enumerate(updates, 1):
        if indices is None:
            changes.all(version)
        else:
            changes.rows(version, np.array(indices, np.int64))
    return changes


@pytest.mark.parametrize(
    ("version", "rows"), [(0, [1, 3, 5, 9]), (1, [5, 9]), (2, [9]), (3, []), (7, [])]
)
def test_rows_changed_since_a_version_in_order_and_once(version, rows):
    changes = noted([3, 1, 5], [9, 5], [9])
    assert changes.since(version).tolist() == rows


def test_after_an_update_of_all_older_copies_need_the_whole():
    changes = noted([1], None, [2])
    assert [changes.since(v) is None for v in range(4)] == [True, True, False, False]
    assert changes.since(2).tolist() == [2]


def test_what_is_more_than_half_of_the_rows_is_forgotten_from_the_oldest():
    changes = noted([0, 1, 2], [3, 4], [5], rows=10)
    assert changes.since(0) is None
    assert changes.since(1).tolist() == [3, 4, 5]
    changes.rows(4, np.arange(6))
    assert changes.since(3) is None
    assert changes.since(4).tolist() == []


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
def test_variables_with_no_row_or_one_are_sent_whole(shape):
    changes = DirtyRows(shape)
    assert changes.since(0).tolist() == []
    changes.rows(1, np.zeros(min(1, len(shape)), np.int64)) if shape == (1,) else changes.all(1)
    assert changes.since(0) is None
    assert changes.since(1).tolist() == []
