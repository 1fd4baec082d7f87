"""Operations made of others: many arrays at once, sparse rows, objects, groups."""

import functools
import pickle

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import oracle
from collectives.communicator import group_of
from collectives.fusion.layouts import FusionCache
from requirements import installed

SHAPES = [(3, 4), (0,), (), (1,), (70_001,), (5, 0), (17,)]


@pytest.mark.parametrize("op", [cc.SUM, cc.MEAN, cc.MAX], ids=lambda op: op.value)
def test_grouped_allreduce_equals_one_allreduce_for_each(comm, op):
    dtypes = [d for d in oracle.DTYPES if oracle.is_defined(op, d)]
    for shapes in (SHAPES, SHAPES[:2], []):
        kinds = [(s, dtypes[i % len(dtypes)]) for i, s in enumerate(shapes)]
        everyones = [[oracle.data(r, s, d) for s, d in kinds] for r in range(comm.size)]
        own = everyones[comm.rank]
        results = comm.grouped_allreduce(own, op=op)
        again = comm.grouped_allreduce(own, op=op)
        assert len(results) == len(kinds)
        for i, result in enumerate(results):
            oracle.assert_close(result, [arrays[i] for arrays in everyones], op)
            np.testing.assert_array_equal(result, again[i])


@pytest.mark.several
def test_groups_that_differ_are_one_error_on_all(comm):
    shapes = [(2,), (4,)] if comm.rank == 1 else [(2,), (3,)]
    with pytest.raises(cc.MismatchError, match="arrays is"):
        comm.grouped_allreduce([np.zeros(s) for s in shapes])
    with pytest.raises((TypeError, cc.MismatchError)):
        comm.grouped_allreduce([np.zeros(2), np.zeros(2, int if comm.rank == 1 else float)])
    assert comm.allreduce(1, op=cc.SUM) == comm.size


@pytest.mark.parametrize("whole", [1, 4000, 1 << 18])
def test_groups_of_many_portions_and_any_strides(world, monkeypatch, whole):
    monkeypatch.setattr("collectives.fusion.layouts.WHOLE_BYTES", whole)
    monkeypatch.setattr("collectives.fusion.layouts.PORTION_BYTES", 4096)
    monkeypatch.setattr("collectives.fusion.layouts.PORTION_BYTES_CROWDED", 4096)

    def check(comm):
        kinds = [((300, 7), "float32"), ((40,), "int16"), ((), "float64"), ((5000,), "float32")]
        kinds += [((3, 5), "float64"), ((1025,), "int16"), ((64, 16), "float32")]
        everyones = [
            [oracle.data(r, shape, np.dtype(dtype)) for shape, dtype in kinds]
            for r in range(comm.size)
        ]
        own = list(everyones[comm.rank])
        own[0] = np.asfortranarray(own[0])
        own[3] = np.repeat(own[3], 3)[::3]
        own[4] = own[4].astype(">f8")
        own[5] = own[5][:, None][:, 0]
        for x in own:
            x.flags.writeable = False
        for _ in range(3):
            results = comm.grouped_allreduce(own, op=cc.SUM)
            for i, (result, (shape, dtype)) in enumerate(zip(results, kinds, strict=True)):
                assert (result.shape, result.dtype) == (shape, np.dtype(dtype))
                oracle.assert_close(result, [arrays[i] for arrays in everyones], cc.SUM)

    world.run(check)


@pytest.mark.parametrize("op", [cc.SUM, cc.MEAN], ids=lambda op: op.value)
def test_long_arrays_of_a_group_have_the_bits_of_calls_of_their_own(comm, world, op):
    shapes = [(70_000,), (3,), (300, 400), (70_000,), (2_100_000,), (0, 9), (70_001,)]
    for step in range(10):  # the ways of storing results change meanwhile
        xs = [oracle.data(comm.rank + step, s, np.dtype(np.float32)) for s in shapes]
        expected = [comm.allreduce(x, op=op) for x in xs]
        outs = [np.zeros_like(x) for x in xs]
        kept = comm.grouped_allreduce(xs, op=op)
        for results in (kept, comm.grouped_allreduce(xs, op=op, out=outs)):
            for i, result in enumerate(results):
                if comm.num_nodes == 1 and world.shared:
                    np.testing.assert_array_equal(result, expected[i])
                else:  # by messages they are reduced as one, in another order
                    np.testing.assert_allclose(result, expected[i], rtol=1e-5, atol=1e-6)
        assert all(result is out for result, out in zip(results, outs, strict=True))
        same = comm.grouped_allreduce(xs, op=op, out=xs)
        for i, result in enumerate(same):
            assert result is xs[i]
            np.testing.assert_array_equal(result, kept[i])


def test_results_of_a_group_stay_as_they_are(comm):
    held = []
    for step in range(6):
        results = comm.grouped_allreduce([np.full(n, step, np.float32) for n in (3, 5)])
        held.append(results[step % 2])  # one is held, one is dropped
        results[1 - step % 2][...] = 77
    assert [x.tolist() for x in held] == [[step] * (3 + 2 * (step % 2)) for step in range(6)]


def test_many_lists_of_shapes_on_ranks_that_start_anew(comm):
    for turn in range(3):
        for n in range(20):  # more than are remembered
            x, y = comm.grouped_allreduce([np.full(n, turn), np.ones((n, 2))], op=cc.SUM)
            assert x.tolist() == [turn * comm.size] * n
            assert (y == comm.size).all()


def test_a_refused_list_of_shapes_does_not_count_as_used(comm):
    def reduce(n):
        (x,) = comm.grouped_allreduce([np.ones(n)], op=cc.SUM)
        assert x.tolist() == [comm.size] * n

    for n in range(1, 17):  # as many as are remembered
        reduce(n)
    if comm.size > 1:
        with pytest.raises(cc.MismatchError, match="arrays is"):
            reduce(1 if comm.rank == 0 else 99)
    reduce(17)  # in the place of another one, the same on all ranks
    for n in (1, 2):
        reduce(n)


def test_a_list_of_shapes_that_one_rank_has_forgotten_is_no_deadlock(comm):
    reduce = functools.partial(comm.grouped_allreduce, [np.ones(3)], op=cc.SUM)
    reduce()
    if comm.rank == 0:
        group_of(comm).state_of(FusionCache).known.clear()
    if comm.size > 1 and not group_of(comm).uses_messages:
        with pytest.raises(cc.MismatchError, match="planned is"):
            reduce()
    else:
        assert reduce()[0].tolist() == [comm.size] * 3
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_groups_of_other_libraries_come_back_as_what_they_were(comm):
    torch = installed("torch")
    own = [torch.ones(3, 2).t(), np.ones(4), 2.0, torch.ones((), dtype=torch.bfloat16)]
    for _ in range(2):
        a, b, c, d = comm.grouped_allreduce(own, op=cc.SUM)
        assert isinstance(a, torch.Tensor)
        assert a.shape == (2, 3)
        assert d.dtype == torch.bfloat16
        assert isinstance(b, np.ndarray)
        for x, one in ((a, 1), (b, 1), (c, 2), (d, 1)):
            assert (x == one * comm.size).all()


@pytest.mark.parametrize(
    ("num_rows", "algorithm"),
    [(None, "auto"), (6, "auto"), (1000, "auto"), (1000, "dense"), (6, "rows")],
)
@pytest.mark.parametrize("op", [cc.SUM, cc.MEAN], ids=lambda op: op.value)
def test_sparse_allreduce_adds_rows_of_equal_index(comm, op, num_rows, algorithm):
    def rows_of(rank):
        random = np.random.default_rng(rank)
        count = 0 if rank == 1 else 4 + rank
        return random.integers(0, 6, count), random.standard_normal((count, 3))

    large = np.zeros((6, 3))
    named = set()
    for rank in range(comm.size):
        indices, values = rows_of(rank)
        np.add.at(large, indices, values / (comm.size if op is cc.MEAN else 1))
        named |= set(indices.tolist())
    own_indices, own_values = rows_of(comm.rank)
    how = {"num_rows": num_rows, "op": op, "algorithm": algorithm}
    indices, values = comm.sparse_allreduce(own_indices, own_values, **how)
    assert indices.tolist() == sorted(named)
    np.testing.assert_allclose(values, large[sorted(named)], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_rows", [None, 10])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_rows_of_16_bits_are_added_in_32(comm, dtype, num_rows):
    values = np.ones((3000, 1), dtype)
    where = np.zeros(3000, int)
    _, rows = comm.sparse_allreduce(where, values, num_rows=num_rows, op=cc.SUM)
    assert rows.dtype == dtype
    assert rows[0, 0] == dtype(3000 * comm.size)


def test_a_nan_of_rows_that_every_rank_adds_is_numpys(comm):
    bits = np.full((2, 3), 0xFFC00001 + comm.rank, np.uint32)  # of another sign and payload
    _, rows = comm.sparse_allreduce([4, 4], bits.view(np.float32), algorithm="rows")
    np.testing.assert_array_equal(rows.view(np.uint32), 0x7FC00000)


def test_sparse_rows_go_the_way_that_is_asked_for(comm):
    # By rows all are added one by one; densely each rank's own ones first. 2^24 + 1 is no
    # float32, and loses each of the ones; 2^24 + 2 is one.
    values = np.array([[2.0**24], [1.0, 1.0], []][min(comm.rank, 2)], np.float32)
    for algorithm, more in (("rows", 0), ("dense", 2 * (comm.size > 1))):
        _, rows = comm.sparse_allreduce(
            [0] * len(values), values, num_rows=2, op=cc.SUM, algorithm=algorithm
        )
        assert rows.tolist() == [2.0**24 + more]
    if comm.size > 1:
        mine = "rows" if comm.rank == 0 else "dense"
        with pytest.raises(cc.MismatchError, match="algorithm is"):
            comm.sparse_allreduce([0], np.ones(1), num_rows=2, algorithm=mine)


def test_a_rank_without_rows_takes_the_same_way_as_the_others(comm):
    # Dense and sparse cost about the same here, and a rank without rows knows no less of them.
    count = 0 if comm.rank == 1 else 100
    values = np.full((count, 64), comm.rank + 1.0, np.float32)
    indices, rows = comm.sparse_allreduce(range(count), values, num_rows=100, op=cc.SUM)
    assert indices.tolist() == list(range(100))
    total = sum(rank + 1 for rank in range(comm.size) if rank != 1)
    np.testing.assert_array_equal(rows, np.full((100, 64), total, np.float32))


def test_an_object_that_no_pickle_takes_is_an_error_on_all_ranks(comm):
    for call in (comm.allgather_object, comm.broadcast_object):
        own = (lambda: None) if comm.rank == 0 else 0
        refused = AttributeError if comm.rank == 0 else cc.MismatchError
        with pytest.raises((refused, pickle.PicklingError), match="lambda"):
            call(own)
        assert call(comm.rank) == (0 if call == comm.broadcast_object else [*range(comm.size)])


@pytest.mark.parametrize("size", [10, 3000])
def test_objects_reach_all_ranks(comm, size):
    own = {"rank": comm.rank, "text": "x" * (size + comm.rank)}
    found = comm.allgather_object(own)
    assert [len(part["text"]) - size for part in found] == list(range(comm.size))
    last = comm.broadcast_object(own, root=comm.size - 1)
    assert last == found[-1]


def test_a_group_numbers_its_ranks_in_the_order_given(comm):
    wanted = [comm.size - 1, *range(comm.size - 1)]
    whole = comm.group(wanted)
    assert wanted[whole.rank] == comm.rank
    even = comm.group(range(0, comm.size, 2))
    assert (even is None) == bool(comm.rank % 2)
    if even is not None:
        assert even.allgather(comm.rank).tolist() == list(range(0, comm.size, 2))


def test_a_group_with_a_tag_is_made_by_its_ranks_alone(comm):
    for tag in (7, 8):
        halves = [list(range(comm.size))[::-2], list(range(comm.size))[::-1][1::2]]
        mine = next(half for half in halves if comm.rank in half)
        for _ in range(2 if mine is halves[0] else 1):  # of which the others know nothing
            group = comm.group(mine, tag=tag)
            assert group.allgather(comm.rank).tolist() == mine
            group.close()
    with pytest.raises(ValueError, match="no such tag"):
        comm.group([comm.rank], tag=1 << 14)
    if comm.size > 1:
        with pytest.raises(ValueError, match="only the ranks that are listed"):
            comm.group([(comm.rank + 1) % comm.size], tag=0)
    if comm.size > 2:
        with pytest.raises(cc.MismatchError, match="list other ranks"):
            comm.group(range(comm.size) if comm.rank else [0, *range(comm.size)[:0:-1]], tag=1)
    assert comm.allreduce(1, op=cc.SUM) == comm.size
