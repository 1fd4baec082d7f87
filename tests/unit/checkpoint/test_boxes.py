"""Boxes of arrays, and who writes which of them: integers."""

import itertools

import numpy as np
import pytest

from strategies import errors
from strategies.checkpoint.boxes import Box, Slice, check_tiles, inside, overlap, split, whole
from strategies.checkpoint.write_plan import HeldPart, assign_writers

SHAPES = [(), (1,), (7,), (0, 3), (5, 4), (1, 6, 2), (40, 1 << 14)]


def indices(box):
    return set(itertools.product(*map(range, box.start, map(sum, zip(*box, strict=True)))))


def test_overlap_is_that_of_the_sets_of_indices():
    rng = np.random.default_rng(1)
    for _ in range(300):
        one, other = (
            Box(tuple(rng.integers(0, 4, 2).tolist()), tuple(rng.integers(0, 4, 2).tolist()))
            for _ in "ab"
        )
        both = overlap(one, other)
        assert (set() if both is None else indices(both)) == indices(one) & indices(other)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_tile_a_box_and_lie_in_one_run(shape):
    array = np.zeros(shape)
    for count in range(1, 9):
        parts = split(whole(shape), count)
        check_tiles(shape, parts)
        assert len(parts) <= count
        assert all(array[inside(part, whole(shape))].flags.c_contiguous for part in parts)


def test_what_does_not_tile_is_found_whatever_the_cuts():
    good = [Box((i, j), (2, 3)) for i in (0, 2, 4) for j in (0, 3)]
    check_tiles((6, 6), good)
    check_tiles((6, 6), good[::-1])
    for bad, text in [
        (good[1:], "all but 6 of 36"),
        ([*good, good[3]], "overlap"),
        ([*good[:-1], Box((3, 3), (2, 3))], "overlap"),
        ([*good[:-1], Box((4, 4), (2, 3))], "is not inside"),
        ([*good[:-1], Box((4,), (2,))], "is not inside"),
        ([], "no slice"),
    ]:
        with pytest.raises(ValueError, match=text):
            check_tiles((6, 6), bad)


@pytest.mark.parametrize("size", range(1, 34))
def test_every_element_is_written_once_by_a_rank_that_has_it(size):
    held = [
        {
            "replicated": HeldPart("float32", 4, (40, 1 << 14), whole((40, 1 << 14))),
            "small": HeldPart("float64", 8, (), whole(())),
            "cut": HeldPart("int8", 1, (size, 5), Box((rank, 0), (1, 5))),
            **({"own": HeldPart("int8", 1, (9,), whole((9,)))} if rank == size - 1 else {}),
            **({"pairs": HeldPart("int8", 1, (size // 2 * 4,), Box((rank // 2 * 4,), (4,)))}
               if rank < size // 2 * 2 else {}),
        }
        for rank in range(size)
    ]  # fmt: skip
    shares = assign_writers(held)
    for name, shape in {
        "replicated": (40, 1 << 14),
        "small": (),
        "cut": (size, 5),
        "own": (9,),
    }.items():
        check_tiles(shape, [box for share in shares for found, box in share if found == name])
    for share, mine in zip(shares, held, strict=True):
        assert all(overlap(box, mine[name].box) == box for name, box in share)
    nbytes = [
        sum(
            box.size * held[0]["replicated"].itemsize for name, box in share if name == "replicated"
        )
        for share in shares
    ]
    # 2.5 MiB: up to three ranks write a part of at least 1 MiB.
    assert sorted(n > 0 for n in nbytes)[::-1][:3] == [True] * min(3, size)
    assert max(nbytes) <= (40 << 16) // min(3, size) + (1 << 16)


def int8(first, count, extent, dtype="int8"):
    return HeldPart(dtype, 1, (extent,), Box((first,), (count,)))


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (int8(0, 2, 4), int8(1, 3, 4), "overlap"),
        (int8(0, 2, 4), int8(3, 1, 4), "all but 1"),
        (int8(0, 4, 4), int8(0, 5, 5), "rank 1"),
        (int8(0, 4, 4), int8(0, 4, 4, "bool"), "got bool"),
    ],
)
def test_ranks_that_do_not_fit_together(one, other, text):
    with pytest.raises(errors.InvalidArgumentError, match=f"{text}.*tensor: w"):
        assign_writers([{"w": one}, {"w": other}])


def test_a_slice_lies_inside():
    with pytest.raises(ValueError, match=r"got shape \(2,\) from \(3,\) on, of \(4,\)"):
        Slice(np.ones(2), (3,), (4,))
    with pytest.raises(ValueError, match="expected an array inside"):
        Slice(np.ones(2), (0, 0), (4,))
