"""How many arrays are grouped and cut: pure integers; and when memory of results is used again."""

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.fusion import bucket_layout
from collectives.fusion.layouts import FusionCache

DTYPES = [np.dtype(t) for t in ("float32", "float64", "int8")]

sizes_and_dtypes = st.lists(
    st.tuples(st.integers(0, 300), st.sampled_from(DTYPES)), max_size=30
)  # elements, dtype
limits = st.tuples(st.integers(1, 600), st.integers(1, 3000))


@given(sizes_and_dtypes, limits, st.randoms())
def test_buckets_hold_each_array_once_by_dtype_in_the_order_of_readiness(arrays, limits, random):
    sizes = [count * dtype.itemsize for count, dtype in arrays]
    dtypes = [dtype for _, dtype in arrays]
    order = list(range(len(arrays)))
    random.shuffle(order)
    when = {i: at for at, i in enumerate(order)}
    buckets = bucket_layout.lay_out(sizes, dtypes, order, limits)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(arrays)))
    for bucket in buckets:
        assert len({dtypes[i] for i in bucket}) == 1
        assert list(bucket) == sorted(bucket, key=when.get)
        # Without its last array no bucket is full.
        assert sum(sizes[i] for i in bucket[:-1]) < max(limits)
    last = [when[bucket[-1]] for bucket in buckets]
    assert last == sorted(last)
    for dtype in DTYPES:  # only the last bucket of a dtype is not full
        own = [bucket for bucket in buckets if dtypes[bucket[0]] == dtype]
        for bucket in own[:-1]:
            assert sum(sizes[i] for i in bucket) >= min(limits)


def test_the_first_bucket_is_small_and_later_ones_are_not():
    assert bucket_layout.lay_out([10] * 6, ["a"] * 6, range(6), (1, 20)) == [
        (0,),
        (1, 2),
        (3, 4),
        (5,),
    ]


def test_dtypes_that_alternate_fill_buckets_side_by_side():
    buckets = bucket_layout.lay_out([10] * 6, list("ababab"), range(6), (30, 30))
    assert buckets == [(0, 2, 4), (1, 3, 5)]


@given(st.lists(st.integers(0, 200), max_size=20), st.randoms())
def test_places_do_not_overlap_and_neighbours_join(sizes, random):
    order = list(range(len(sizes)))
    random.shuffle(order)
    starts, total = bucket_layout.offsets(sizes, order)
    assert all(start % 64 == 0 for start in starts)
    taken = sorted((starts[i], starts[i] + sizes[i]) for i in order if sizes[i])
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken))
    assert all(stop <= total for _, stop in taken)
    some = [i for i in order if random.random() < 0.6]
    spans = bucket_layout.merge_adjacent([(starts[i], sizes[i]) for i in some])
    for i in some:
        if sizes[i]:
            assert sum(a <= starts[i] and starts[i] + sizes[i] <= b for a, b in spans) == 1
    for i in set(order) - set(some):
        assert not any(a < starts[i] + sizes[i] and starts[i] < b for a, b in spans if sizes[i])
    assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))
    if some == order:
        assert spans == ([(0, total)] if total else [])


@given(
    sizes_and_dtypes,
    st.sampled_from([64, 128, 4096, sys.maxsize]),
    st.sampled_from([0, 1, 100, 4000, sys.maxsize]),
)
def test_stages_hold_each_element_once_in_order(arrays, limit, whole):
    counts = [count for count, _ in arrays]
    dtypes = [dtype for _, dtype in arrays]
    portions, starts, total = bucket_layout.split_by_bytes(counts, dtypes, limit, whole)
    seen = {i: [] for i, count in enumerate(counts) if count}
    spans = sorted((portion.first, portion.first + portion.nbytes) for portion in portions)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    for portion in portions:
        at = portion.first
        long = [n for n, _, _ in portion.pieces if counts[n] * dtypes[n].itemsize >= whole]
        assert portion.whole == bool(long)
        assert len(portion.pieces) == 1 or not long
        assert portion.nbytes > 0
        assert portion.whole or portion.nbytes <= limit
        for number, start, stop in portion.pieces:
            itemsize = dtypes[number].itemsize
            assert dtypes[number] == portion.dtype
            assert at == starts[number] + start * itemsize
            seen[number] += range(start, stop)
            at += (stop - start) * itemsize
        assert at == portion.first + portion.nbytes <= total
    assert seen == {i: list(range(counts[i])) for i in seen}
    assert all(start % dtype.itemsize == 0 for start, dtype in zip(starts, dtypes, strict=True))


def test_a_short_description_tells_arrays_apart_also_when_it_is_cut():
    many = [("float32", (3, 3))] * 1000
    a, b = bucket_layout.summary(many), bucket_layout.summary([*many[:-1], ("float32", (9,))])
    assert a[:20] != b[:20]


@pytest.mark.parametrize("part", [lambda x: x[:8], lambda x: x.view("f4").reshape(2, -1)[:, ::2]])
def test_memory_of_results_is_used_again_when_all_of_them_are_gone(part):
    groupings = FusionCache(None)

    def address():
        return groupings.results(64).__array_interface__["data"][0]

    first = address()
    assert address() == first
    held = part(groupings.results(64))
    second = address()
    assert second != first
    assert not np.shares_memory(held, groupings.results(64))
    del held
    assert address() == second
    assert groupings.results(128).size == 128


def test_the_layouts_that_were_used_last_are_kept():
    groupings = FusionCache(None)
    for number in range(100):
        groupings.store((number,), number)
        groupings.known.get((1,))  # which is no call yet
        groupings.store((0,), groupings.known.get((0,)))  # is made all the time
    known = [number for number in range(100) if groupings.known.get((number,)) is not None]
    assert known == [0, *range(85, 100)]
