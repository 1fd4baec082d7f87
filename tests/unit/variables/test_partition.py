"""How many parts a variable has: TensorFlow's numbers, and the rules for all."""

import numpy as np
import pytest

from strategies.variables import partition

F32 = np.dtype(np.float32)


@pytest.mark.parametrize(
    ("partitioner", "shape", "expected"),
    [
        (partition.fixed_size(3), (10, 4), [3, 1]),
        (partition.fixed_size(30), (10, 4), [10, 1]),
        (partition.fixed_size(3, axis=1), (10, 4), [1, 3]),
        (partition.fixed_size(3), (0, 4), [1, 1]),
        (partition.variable_axis_size(131072, 0), (4, 8, 16, 32), [1, 1, 1, 1]),
        (partition.variable_axis_size(65536, 1), (4, 8, 16, 32), [1, 1, 1, 1]),
        (partition.variable_axis_size(32768, 2), (4, 8, 16, 32), [1, 1, 2, 1]),
        (partition.variable_axis_size(2048, 3), (4, 8, 16, 32), [1, 1, 1, 32]),
        (partition.variable_axis_size(1024, 3), (4, 8, 16, 32), [1, 1, 1, 32]),
        (partition.variable_axis_size(1024, 3, max_parts=2), (4, 8, 16, 32), [1, 1, 1, 2]),
        (partition.min_max_variable(100, 0, min_part_bytes=2 << 10), (2048,), [4]),
        (partition.min_max_variable(100, 0, min_part_bytes=256 << 10), (2048, 1024), [32, 1]),
        (partition.min_max_variable(16, 0, min_part_bytes=256 << 10), (2048, 1024), [16, 1]),
        (partition.min_max_variable(100, 0, min_part_bytes=128 << 10), (2048, 1024), [64, 1]),
        (partition.min_max_variable(100, 0, min_part_bytes=512 << 10), (2048, 1024), [16, 1]),
        (partition.min_max_variable(100, 1), (64, 1024, 1, 3), [1, 3, 1, 1]),
        (partition.min_max_variable(100), (0,), [1]),
        (partition.fixed_shards(2), (10, 3), [2, 1]),
        (partition.fixed_shards(2), (), []),
        (partition.min_size(4, 2), (6, 1), [2, 1]),
        (partition.min_size(4, 10), (6, 1), [6, 1]),
        (partition.min_size(), (10_000_000,), [1]),
        (partition.max_size(4), (6, 1), [6, 1]),
        (partition.max_size(4, 2), (6, 1), [2, 1]),
        (partition.max_size(1024), (6, 1), [1, 1]),
    ],
)
def test_partitioners(partitioner, shape, expected):
    found = partitioner(shape, F32)
    assert found == expected
    assert partition.checked(found, shape) == expected


def test_the_first_parts_are_one_longer():
    assert partition.offsets((10, 4), [3, 1]) == (0, 4, 7, 10)
    assert partition.offsets((10,), [4]) == (0, 3, 6, 8, 10)
    assert partition.offsets((4, 7), [1, 2]) == (0, 4, 7)
    assert partition.offsets((), []) == (0, 1)
    assert partition.offsets((0, 3), [1, 1]) == (0, 0)


@pytest.mark.parametrize("length", range(9))
def test_parts_cover_all_rows_and_differ_by_one_at_most(length):
    for parts in range(1, max(length, 1) + 1):
        ends = partition.offsets((length,), [parts])
        sizes = np.diff(ends)
        assert (len(sizes), sum(sizes)) == (parts, length)
        assert max(sizes) - min(sizes) <= 1
        assert sorted(sizes, reverse=True) == sizes.tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: partition.fixed_size(0), "num_parts >= 1, got 0"),
        (lambda: partition.variable_axis_size(0), "max_part_bytes >= 1"),
        (lambda: partition.variable_axis_size(1, max_parts=0), "max_parts >= 1"),
        (lambda: partition.min_max_variable(0), "max_parts >= 1"),
        (lambda: partition.min_size(0), "min_part_bytes >= 1"),
        (lambda: partition.max_size(-1), "max_part_bytes >= 1"),
        (lambda: partition.fixed_size(2, axis=1)((3,), F32), r"no such axis, expected 0 .. 0"),
        (lambda: partition.checked([2], (3, 4)), "one number >= 1 for each of 2 axes"),
        (lambda: partition.checked([2, 2], (3, 4)), "at most one of them above 1"),
        (lambda: partition.checked([0, 1], (3, 4)), ">= 1"),
        (lambda: partition.checked(2, (3,)), "got 2"),
        (lambda: partition.checked([4], (3,)), "more parts than rows"),
    ],
)
def test_wrong_use(make, message):
    with pytest.raises(ValueError, match=message):
        make()
