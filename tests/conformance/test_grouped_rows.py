"""Many arrays at once: joined, shared out, and from one rank."""

import numpy as np
import pytest
from calls import raised

import collectives as cc
import oracle
from requirements import installed

F32 = np.dtype(np.float32)
SHAPES = [(3, 4), (0,), (2,), (0, 3), (70_001,), (5, 0), (17, 2)]


def lists(comm, shapes=SHAPES, op=None):
    """The arrays of all ranks, of all dtypes for which the op is defined in turn."""
    dtypes = [d for d in oracle.DTYPES if op is None or oracle.is_defined(op, d)]
    kinds = [(shape, dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)]
    kinds += [((4,), dtype) for dtype in dtypes]
    return [[oracle.data(r, shape, dtype) for shape, dtype in kinds] for r in range(comm.size)]


def test_grouped_broadcast_gives_the_roots_arrays(comm):
    for root in {0, comm.size - 1}:
        for shapes in (SHAPES, [*SHAPES, ()]):
            everyones = lists(comm, shapes)
            xs = [x.copy() for x in everyones[comm.rank]]
            strided = [np.zeros((2, *x.shape), x.dtype).T[..., 0].T for x in xs]
            for out in (None, strided, xs):
                results = comm.grouped_broadcast(xs, root, out=out)
                for i, result in enumerate(results):
                    assert out is None or result is out[i]
                    assert result.dtype == xs[i].dtype
                    np.testing.assert_array_equal(result, everyones[root][i])
                if out is not xs:
                    for x, own in zip(xs, everyones[comm.rank], strict=True):
                        assert x.tobytes() == own.tobytes()
    assert comm.grouped_broadcast([]) == []


def test_grouped_allgather_joins_each(comm):
    everyones = []
    for rank, arrays in enumerate(lists(comm)):
        # Of every third array each rank has its own number of rows, perhaps none.
        cut = [x[: (rank + i) % (len(x) + 1)] if i % 3 else x for i, x in enumerate(arrays)]
        everyones.append([*cut, np.float32(rank), np.asfortranarray(arrays[0])])
    xs = everyones[comm.rank]
    wanted = [np.concatenate([np.atleast_1d(a[i]) for a in everyones]) for i in range(len(xs))]
    strided = [np.zeros((2, *x.shape), x.dtype).T[..., 0].T for x in wanted]
    for out in (None, [np.empty_like(x) for x in wanted], strided):
        given = out if comm.rank % 2 == 0 else None  # the ranks need not agree on that
        results = comm.grouped_allgather(xs, out=given)
        for i, result in enumerate(results):
            assert given is None or result is given[i]
            assert result.dtype == wanted[i].dtype
            np.testing.assert_array_equal(result, wanted[i])
    memory = np.zeros((comm.size, 3))
    memory[comm.rank] = comm.rank
    comm.grouped_allgather([memory[comm.rank : comm.rank + 1]], out=[memory])
    np.testing.assert_array_equal(memory[:, 0], range(comm.size))
    assert comm.grouped_allgather([]) == []


@pytest.mark.parametrize("op", [cc.SUM, cc.MEAN, cc.LOGICAL_XOR, cc.MAX], ids=lambda op: op.value)
def test_grouped_reduce_scatter_shares_each(comm, op):
    everyones = lists(comm, op=op)
    xs = everyones[comm.rank]
    own = [[np.array_split(x, comm.size)[comm.rank] for x in arrays] for arrays in everyones]
    strided = [np.zeros((2, *x.shape), x.dtype).T[..., 0].T for x in own[comm.rank]]
    for out in (None, [np.empty_like(x) for x in own[comm.rank]], strided):
        results = comm.grouped_reduce_scatter(xs, op=op, out=out)
        for i, result in enumerate(results):
            assert out is None or result is out[i]
            oracle.assert_close(result, [arrays[i] for arrays in own], op)
    assert comm.grouped_reduce_scatter([]) == []


def test_grouped_reduce_scatter_scales_each(comm):
    xs = [np.ones((2 * comm.size, 2)), np.full(comm.size, 2, np.float16)]
    out = [np.zeros((2, 2)), np.zeros(1, np.float16)]
    for to in (None, out):
        a, b = comm.grouped_reduce_scatter(xs, op=cc.SUM, prescale=4, postscale=0.5, out=to)
        assert a.tolist() == [[2 * comm.size] * 2] * 2
        assert (b.dtype, b.tolist()) == (np.float16, [4 * comm.size])
    assert comm.grouped_reduce_scatter_async(xs).wait()[1].tolist() == [2]


def test_grouped_calls_go_by_the_algorithm_that_is_asked_for(comm, world):
    shapes = [(8, 3), (70_001,)]
    everyones = lists(comm, shapes, op=cc.SUM)
    xs = everyones[comm.rank]
    for algorithm in world.algorithms("broadcast"):
        found = comm.grouped_broadcast(xs, comm.size - 1, algorithm=algorithm)
        for got, x in zip(found, everyones[-1], strict=True):
            np.testing.assert_array_equal(got, x)
    for algorithm in world.algorithms("allgather"):
        found = comm.grouped_allgather(xs, algorithm=algorithm)
        for got, parts in zip(found, zip(*everyones, strict=True), strict=True):
            np.testing.assert_array_equal(got, np.concatenate(parts))
    for algorithm in world.algorithms("reduce_scatter"):
        found = comm.grouped_reduce_scatter(xs, op=cc.SUM, algorithm=algorithm)
        for got, parts in zip(found, zip(*everyones, strict=True), strict=True):
            own = [np.array_split(part, comm.size)[comm.rank] for part in parts]
            oracle.assert_close(got, own, cc.SUM)
    for algorithm in world.algorithms("allreduce"):
        for _ in range(2):
            found = comm.grouped_allreduce(xs, op=cc.SUM, algorithm=algorithm)
            for got, parts in zip(found, zip(*everyones, strict=True), strict=True):
                oracle.assert_close(got, parts, cc.SUM)
    for name in ("allgather", "allreduce", "broadcast", "reduce_scatter"):
        call = getattr(comm, f"grouped_{name}")
        error = raised(lambda call=call: call([np.ones(9)], algorithm="rings"))
        assert isinstance(error, ValueError), error
        assert f"grouped_{name}: unknown algorithm, expected one of auto node" in str(error)


def test_other_libraries_come_back_as_what_they_were(comm):
    torch = installed("torch")
    xs = [torch.ones(comm.size, 2), np.ones(comm.size), torch.ones(comm.size).bfloat16()]
    for results, rows in (
        (comm.grouped_broadcast(xs), comm.size),
        (comm.grouped_allgather(xs), comm.size**2),
        (comm.grouped_reduce_scatter(xs), 1),
        (cc.Communicator.grouped_allgather_async(comm, xs).wait(), comm.size**2),
    ):
        assert [type(x) for x in results] == [type(x) for x in xs]
        assert results[2].dtype == torch.bfloat16
        assert [len(x) for x in results] == [rows] * 3
    out = [torch.zeros(1, 2), np.zeros(1), torch.zeros(1).bfloat16()]
    assert comm.grouped_reduce_scatter(xs, out=out)[2] is out[2]
    assert out[2].item() == 1
    back = comm.grouped_broadcast(xs, out=xs)
    assert all(x is y for x, y in zip(back, xs, strict=True))


def test_what_is_wrong_on_one_rank_is_an_error_on_all(comm):
    last = comm.rank == comm.size - 1
    xs = [np.ones((comm.size, 2), F32), np.ones(comm.size)]
    joined = [np.empty((comm.size**2, 2), F32), np.empty(comm.size**2)]
    own = [np.empty((1, 2), F32), np.empty(1)]
    wide, long = np.empty(1, F32), np.empty(comm.size**2 + 1)
    for operation, right, wrong, kind, words in (
        ("grouped_allgather", joined, [joined[0], long], ValueError, "out has the wrong shape"),
        ("grouped_allgather", joined, [joined[1]] * 2, TypeError, "out has the wrong dtype"),
        ("grouped_reduce_scatter", own, [own[0], wide], TypeError, "out has the wrong dtype"),
        ("grouped_reduce_scatter", own, own[:1], ValueError, "an array for each, expected 2"),
        ("grouped_broadcast", xs, [xs[0], own[0]], (TypeError, ValueError), "out has the"),
    ):
        call = getattr(comm, operation)
        error = raised(lambda call=call, out=wrong if last else right: call(xs, out=out))
        assert isinstance(error, kind if last else cc.MismatchError), error
        assert words in str(error)
    if comm.size > 1:
        other = [xs[0], xs[1].astype(F32)] if last else xs
        for name in ("allgather", "reduce_scatter", "broadcast"):
            error = raised(lambda name=name: getattr(comm, f"grouped_{name}")(other))
            assert isinstance(error, cc.MismatchError)
            assert "arrays is" in str(error)
            error = raised(
                lambda name=name: getattr(comm, f"grouped_{name}")(xs[:1] if last else xs)
            )
            assert "count is" in str(error)
    assert isinstance(raised(lambda: comm.grouped_broadcast(xs, comm.size)), ValueError)
    assert isinstance(raised(lambda: comm.grouped_reduce_scatter([1.0])), ValueError)
    assert comm.allreduce(1, op=cc.SUM) == comm.size
