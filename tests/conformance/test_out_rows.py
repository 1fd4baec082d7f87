"""Where results of rows go, and who gets how many: `out=`, `counts=`, `return_counts=`."""

import itertools

import numpy as np
import pytest
from calls import raised

import collectives as cc
import oracle
from collectives.communicator import group_of

# With (rank, dtype): what it brings to an operation that joins or shares rows.
F32 = np.dtype(np.float32)


def rows_of(rank, dtype=F32):
    return oracle.data(rank, (2 + rank % 2, 3), dtype)


def expected(operation, comm, root, dtype=F32):
    """What this rank gets, of the rows of all ranks."""
    everyones = [rows_of(rank, dtype) for rank in range(comm.size)]
    if operation in ("gather", "allgather"):
        return np.concatenate(everyones)
    if operation == "scatter":
        return np.array_split(everyones[root], comm.size)[comm.rank]
    return np.concatenate([np.array_split(x, comm.size)[comm.rank] for x in everyones])


def called(comm, operation, x, out, root, algorithm="auto"):
    options = {} if operation in ("allgather", "alltoall") else {"root": root}
    return getattr(comm, operation)(x, out=out, algorithm=algorithm, **options)


JOINS = ["gather", "allgather", "scatter", "alltoall"]


@pytest.mark.parametrize("operation", JOINS)
def test_an_out_of_any_layout_takes_the_rows(comm, world, operation):
    for algorithm in world.algorithms(operation):
        for root, dtype in itertools.product({0, comm.size - 1}, (F32, oracle.BFLOAT16)):
            wanted = expected(operation, comm, root, dtype)
            strided = np.zeros((2 * len(wanted), 3), dtype)[::2]
            for out in (np.zeros_like(wanted), strided, np.zeros_like(wanted, order="F")):
                x = rows_of(comm.rank, dtype)
                result = called(comm, operation, x, out, root, algorithm)
                if operation == "gather" and comm.rank != root:
                    assert result is None
                    assert not out.astype(F32).any()
                else:
                    assert result is out
                    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("operation", JOINS)
def test_only_some_ranks_may_give_an_out(comm, operation):
    for turn in range(3):
        wanted = expected(operation, comm, 0)
        out = np.zeros_like(wanted) if (comm.rank + turn) % 2 else None
        result = called(comm, operation, rows_of(comm.rank), out, 0)
        if operation != "gather" or comm.rank == 0:
            assert out is None or result is out
            np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize("shift", [0, 1, -1])
def test_a_part_of_the_result_may_be_the_array(comm, shift):
    """At its own place, where nothing needs a copy, or anywhere else."""
    for count in (3, 40_000):
        own = [oracle.data(rank, (count,), F32) for rank in range(comm.size)]
        joined = np.concatenate(own)
        start = max(0, min(count * comm.rank + shift, joined.size - count))
        part = slice(start, start + count)

        for join in (comm.allgather, comm.allgather, comm.gather):
            memory = np.zeros(joined.size, F32)
            memory[part] = own[comm.rank]
            if join(memory[part], out=memory) is memory:
                np.testing.assert_array_equal(memory, joined)
        for _ in range(2):
            whole = joined * (comm.rank + 1)
            comm.reduce_scatter(whole, op=cc.MAX, out=whole[part])
            right = np.maximum(joined, joined * comm.size)[count * comm.rank :][:count]
            np.testing.assert_array_equal(whole[part], right)
        whole = joined.copy()
        comm.scatter(whole, out=whole[part])
        np.testing.assert_array_equal(whole[part], own[comm.rank])
        whole = joined.copy()
        comm.alltoall(whole, out=whole)
        np.testing.assert_array_equal(whole, np.tile(own[comm.rank], comm.size))


def test_reduce_scatter_puts_its_rows_into_out_every_time(comm, world):
    for algorithm in world.algorithms("reduce_scatter"):
        for dtype in (F32, oracle.BFLOAT16):
            arrays = [oracle.data(r, (2 * comm.size + 1, 3), dtype) for r in range(comm.size)]
            own = [np.array_split(x, comm.size)[comm.rank] for x in arrays]
            for _ in range(3):
                for out in (np.zeros_like(own[0]), np.zeros_like(own[0], order="F")):
                    x = arrays[comm.rank].copy()
                    result = comm.reduce_scatter(x, op=cc.SUM, out=out, algorithm=algorithm)
                    assert result is out
                    oracle.assert_close(out, own, cc.SUM)
                    np.testing.assert_array_equal(x, arrays[comm.rank])


@pytest.mark.algorithms("reduce_scatter")
def test_reduce_scatter_shares_rows_by_counts(comm, algorithm):
    for counts in (
        [2 * rank for rank in range(comm.size)],
        [0] * (comm.size - 1) + [5],
        [70_001] + [1] * (comm.size - 1),
        [0] * comm.size,
    ):
        arrays = [oracle.data(r, (sum(counts), 2), F32) for r in range(comm.size)]
        first = sum(counts[: comm.rank])
        own = [x[first : first + counts[comm.rank]] for x in arrays]
        for given in (counts, tuple(counts), np.array(counts)):
            for out in (None, np.empty(own[0].shape, F32)):
                result = comm.reduce_scatter(
                    arrays[comm.rank], op=cc.SUM, counts=given, out=out, algorithm=algorithm
                )
                assert out is None or result is out
                oracle.assert_close(result, own, cc.SUM)


@pytest.mark.algorithms("alltoall")
def test_alltoall_tells_how_many_rows_came_from_each_rank(comm, algorithm):
    table = np.array([[(a + 2 * b) % 4 for b in range(comm.size)] for a in range(comm.size)])
    splits, came = table[comm.rank], table[:, comm.rank]
    x = np.repeat(np.arange(comm.size), splits) + 100.0 * comm.rank
    out = np.empty(came.sum())
    result, received = comm.alltoall(
        x, counts=splits, out=out, return_counts=True, algorithm=algorithm
    )
    assert result is out
    assert isinstance(received, np.ndarray)
    assert (received.dtype, received.tolist()) == (np.int64, came.tolist())
    np.testing.assert_array_equal(result, np.repeat(100.0 * np.arange(comm.size), came) + comm.rank)
    back = comm.alltoall(result, counts=received, algorithm=algorithm)
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("operation", [*JOINS, "reduce_scatter"])
@pytest.mark.parametrize("wrong", ["rows", "row", "dtype", "read-only", "no array"])
def test_an_out_that_does_not_fit_on_one_rank_is_an_error_on_all(comm, operation, wrong):
    bad = 0 if operation == "gather" else comm.size - 1  # the root's alone counts there
    for _ in range(2):  # the second call may take a shorter way
        x = rows_of(0) if operation == "reduce_scatter" else rows_of(comm.rank)
        if operation == "reduce_scatter":
            right = np.array_split(x, comm.size)[comm.rank]
        else:
            right = expected(operation, comm, 0)
        out = np.empty_like(right)
        if comm.rank == bad:
            out = {
                "rows": np.empty((len(right) + 1, 3), F32),
                "row": np.empty((len(right), 4), F32),
                "dtype": np.empty(right.shape),
                "read-only": np.broadcast_to(np.float32(0), right.shape),
                "no array": [0.0],
            }[wrong]
        if operation == "reduce_scatter":
            error = raised(lambda x=x, out=out: comm.reduce_scatter(x, out=out))
        else:
            error = raised(lambda x=x, out=out: called(comm, operation, x, out, 0))
        if comm.rank == bad:
            kind = TypeError if wrong in ("dtype", "no array") else ValueError
            assert type(error) is kind
            assert str(error).startswith(f"{operation}: out ")
        else:
            assert isinstance(error, cc.MismatchError)
            assert f"rank {bad}: " in str(error)
            assert f"{operation}: out " in str(error) or "out has the wrong" in str(error)
        assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_an_out_that_does_not_fit_is_an_error_for_ranks_that_have_a_plan(comm):
    x = np.ones((2, 3), F32)
    comm.allgather(x)
    out = np.empty((2 * comm.size + 1, 3), F32) if comm.rank == 0 else None
    error = raised(lambda: comm.allgather(x, out=out))
    assert isinstance(error, ValueError if comm.rank == 0 else cc.MismatchError)
    text = f"expected {(2 * comm.size, 3)}, got {(2 * comm.size + 1, 3)}"
    assert text in str(error)
    assert comm.allgather(x).shape == (2 * comm.size, 3)


@pytest.mark.parametrize("base", [3, 5_000, 200_000])
def test_a_repeated_gather_while_ranks_bring_other_rows(comm, base):
    """At once, in parts, and in several slots; who brings the same all the time has a plan."""
    for step in range(7):
        root = step // 4 % comm.size
        rows = [base + rank * (step % 3 == 1) for rank in range(comm.size)]
        x = np.full(rows[comm.rank], comm.rank + step, F32)
        out = np.zeros(sum(rows), F32) if comm.rank == root and step % 2 else None
        found = comm.gather(x, root, out=out)
        if comm.rank != root:
            assert found is None
            continue
        assert out is None or found is out
        np.testing.assert_array_equal(found, np.repeat(np.arange(comm.size) + step, rows))
    x, whole = np.ones(base, F32), comm.size * base
    comm.gather(x)
    out = np.zeros(whole + 1, F32) if comm.rank == 0 else None
    error = raised(lambda: comm.gather(x, out=out))
    assert isinstance(error, ValueError if comm.rank == 0 else cc.MismatchError)
    assert f"expected ({whole},), got ({whole + 1},)" in str(error)
    found = comm.gather(x)
    assert (found is None) == (comm.rank != 0)
    assert comm.rank != 0 or found.sum() == whole


@pytest.mark.parametrize("inside", [False, True])
def test_a_repeated_out_while_other_ranks_bring_other_rows(comm, inside):
    base = 40_000
    out = np.zeros((base * comm.size, 2), F32)
    for step in range(6):
        # The last two ranks change; all rows are as many, but for one step.
        rows = [base] * comm.size
        if comm.size > 1 and step % 2:
            rows[-1], rows[-2] = base + step, base - step
        if step == 4:
            rows[-1] += 1
        own = slice(sum(rows[: comm.rank]), sum(rows[: comm.rank + 1]))
        x = out[own] if inside else np.empty((rows[comm.rank], 2), F32)
        if len(x) < rows[comm.rank]:
            x = np.empty((rows[comm.rank], 2), F32)
        x[...] = comm.rank + step
        if step == 4:
            error = raised(lambda x=x: comm.allgather(x, out=out))
            assert isinstance(error, ValueError), error
            assert "out has the wrong shape" in str(error)
            state = group_of(comm).recorder.records[-1].state
            assert state == f"{type(error).__name__}: {error}"
            continue
        assert comm.allgather(x, out=out) is out
        wanted = np.repeat(np.arange(comm.size) + step, rows)
        np.testing.assert_array_equal(out, np.stack([wanted, wanted], 1))
    assert comm.allreduce(1, op=cc.SUM) == comm.size


@pytest.mark.parametrize(
    ("words", "counts"),
    [("counts do not fit", [1]), ("add up to 7 rows", [7, 7, 7, 7, 7, 7]), ("integer", [0.5])],
)
def test_wrong_counts_are_refused(comm, words, counts):
    given = (counts * 6)[: comm.size] if len(counts) == 6 else counts
    x = np.ones((7, 2))
    if comm.size == 1 and len(given) == 1 and given[0] == 7:
        return
    with pytest.raises((ValueError, TypeError), match=words):
        comm.reduce_scatter(x, counts=given)
    if comm.size > 1:
        first = [7] + [0] * (comm.size - 1)
        with pytest.raises(cc.MismatchError, match="counts is"):
            comm.reduce_scatter(x, counts=first if comm.rank else first[::-1])
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def grouped_arrays(comm):
    kinds = [((300, 7), "float32"), ((40,), "int16"), ((), "float64"), ((5000,), "float32")]
    kinds += [((0, 3), "float32"), ((3, 5), "float64")]
    return [
        [oracle.data(rank, shape, np.dtype(dtype)) for shape, dtype in kinds]
        for rank in range(comm.size)
    ]


@pytest.mark.parametrize("whole", [1, 4000, 1 << 18])
def test_grouped_allreduce_puts_results_into_out(world, monkeypatch, whole):
    monkeypatch.setattr("collectives.fusion.layouts.WHOLE_BYTES", whole)
    monkeypatch.setattr("collectives.fusion.layouts.PORTION_BYTES", 4096)
    monkeypatch.setattr("collectives.fusion.layouts.PORTION_BYTES_CROWDED", 4096)

    def check(comm):
        everyones = grouped_arrays(comm)
        xs = everyones[comm.rank]
        strided = [np.zeros((2, *x.shape), x.dtype).T[..., 0].T for x in xs]
        for outs in (None, [np.zeros_like(x) for x in xs], strided, [x.copy() for x in xs]):
            in_place = outs is not None and outs[0].any()
            own = outs if in_place else xs
            results = comm.grouped_allreduce(own, op=cc.SUM, out=outs)
            for i, result in enumerate(results):
                assert outs is None or result is outs[i]
                oracle.assert_close(result, [arrays[i] for arrays in everyones], cc.SUM)
        for i, x in enumerate(xs):
            np.testing.assert_array_equal(x, everyones[comm.rank][i])

    world.run(check)


@pytest.mark.parametrize("count", [3000, 300_000])
def test_a_grouped_out_may_be_another_ones_array(comm, count):
    xs = [np.full(count, comm.rank + step, F32) for step in range(3)]
    outs = [xs[1], xs[2], xs[0]]  # all are read before any of them is written
    results = comm.grouped_allreduce(xs, op=cc.SUM, out=outs)
    for step in range(3):
        assert results[step] is outs[step]
        total = sum(rank + step for rank in range(comm.size))
        np.testing.assert_array_equal(outs[step], total)


def test_grouped_outs_that_do_not_fit_are_refused(comm):
    xs = [np.ones(3), np.ones((2, 2))]
    last = comm.rank == comm.size - 1
    for outs, kind, words in (
        (xs[:1], ValueError, "an array for each, expected 2, got 1"),
        ([np.ones(3), np.ones(4)], ValueError, r"expected \(2, 2\), got \(4,\)"),
        ([np.ones(3), np.ones((2, 2), F32)], TypeError, "expected float64, got float32"),
    ):
        with pytest.raises(kind if last else cc.MismatchError, match=words):
            comm.grouped_allreduce(xs, op=cc.SUM, out=outs if last else xs)
    assert comm.allreduce(1, op=cc.SUM) == comm.size
