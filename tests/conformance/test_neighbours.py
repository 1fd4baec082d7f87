"""Averages over neighbours, against the product with a mixing matrix."""

import numpy as np
import pytest

import collectives as cc
import oracle
from requirements import installed


def line(size):
    return {r: [n for n in (r - 1, r + 1) if 0 <= n < size] for r in range(size)}


def star(size):
    return {0: range(1, size), **{r: [0] for r in range(1, size)}}


def one_way(size):
    """Three quarters of the own array, and a quarter of the right neighbour's."""
    return 0.75 * np.eye(size) + 0.25 * np.roll(np.eye(size), 1, axis=1)


def metropolis(neighbours):
    size = len(neighbours)
    matrix = np.zeros((size, size))
    for r, others in enumerate(neighbours):
        for n in set(others) - {r}:
            matrix[r, n] = 1 / (1 + max(len(set(others)), len(set(neighbours[n]))))
        matrix[r, r] = 1 - matrix[r].sum()
    return matrix


def around(size):
    return [{(r + 1) % size, (r - 1) % size} - {r} for r in range(size)]


def hops(size):
    far = [2**t for t in range(10) if 2**t < size]
    return [(np.eye(size) + np.roll(np.eye(size), d, axis=0)) / 2 for d in far] or [np.eye(1)]


# Name -> the graph of some ranks, and its mixing matrices.
GRAPHS = {
    "ring": (lambda size: "ring", lambda size: [metropolis(around(size))]),
    "exponential": (lambda size: "exponential", hops),
    "line": (line, lambda size: [metropolis([line(size)[r] for r in range(size)])]),
    "star": (star, lambda size: [metropolis([star(size)[r] for r in range(size)])]),
    "matrix": (one_way, lambda size: [one_way(size)]),
}
FLOATS = [*oracle.FLOATS, np.dtype(np.complex64)]


def mixed(matrix, arrays):
    """All ranks' results, in float64 or complex128."""
    wide = np.complex128 if arrays[0].dtype.kind == "c" else np.float64
    return np.tensordot(matrix, np.stack([x.astype(wide) for x in arrays]), 1)


def allowed(x, size):
    work = np.float32 if x.dtype.itemsize == 2 else x.dtype
    eps = np.finfo(work).eps * (size + 2)
    half = 2.0**-8 if x.dtype == oracle.BFLOAT16 else 2.0**-11
    return eps + (half if x.dtype.itemsize == 2 else 0)


@pytest.mark.parametrize("name", GRAPHS)
def test_an_average_is_a_row_of_the_matrix_times_the_arrays(comm, name):
    graph, matrices = (make(comm.size) for make in GRAPHS[name])
    neighbours = comm.neighbours(graph)
    for dtype in FLOATS:
        for shape in [(), (0,), (7, 3), (300_007,)] if dtype == np.float32 else [(7, 3)]:
            arrays = [oracle.data(r, shape, dtype) for r in range(comm.size)]
            x = arrays[comm.rank].copy()
            matrix = matrices[neighbours.step % len(matrices)]
            assert sum(neighbours.weights.values()) == pytest.approx(1)
            got = neighbours.average(x)
            exact = mixed(matrix, arrays)[comm.rank]
            assert got.dtype == dtype
            assert got.shape == shape
            size = np.abs(np.stack([a.astype(exact.dtype) for a in arrays])).sum(axis=0)
            assert (np.abs(got.astype(exact.dtype) - exact) <= allowed(x, comm.size) * size).all()
            assert x.tobytes() == arrays[comm.rank].tobytes()
            neighbours.step -= 1
            y = np.asarray(x)
            assert neighbours.average(y, out=y) is y
            assert y.tobytes() == got.tobytes()


@pytest.mark.parametrize("name", GRAPHS)
def test_repeated_averages_converge_to_the_mean_of_all_ranks(comm, name):
    neighbours = comm.neighbours(GRAPHS[name][0](comm.size))
    x = np.array([float(comm.rank), 1.0])
    for _ in range(200):
        x = neighbours.average(x)
    assert x == pytest.approx([(comm.size - 1) / 2, 1.0])


def test_the_exponential_graph_reaches_the_mean_of_a_power_of_two_at_once(comm):
    if comm.size & (comm.size - 1):
        return
    neighbours, x = comm.neighbours("exponential"), float(comm.rank)
    for _ in range((comm.size - 1).bit_length()):
        x = neighbours.average(x).item()
    assert x == (comm.size - 1) / 2


def test_tensors(comm):
    torch = installed("torch")
    x = torch.full((3,), float(comm.rank))
    assert comm.neighbours("ring").average(x, out=x) is x
    exact = mixed(GRAPHS["ring"][1](comm.size)[0], [np.array([r]) for r in range(comm.size)])
    assert x.tolist() == pytest.approx([exact[comm.rank].item()] * 3)


# Graph of some ranks, and the text of the error.
REFUSED = {
    "name": (lambda size: "torus", "unknown graph, expected one of ring exponential, got 'torus'"),
    "rank": (lambda size: {0: [size]}, "no such rank, expected 0 .. "),
    "one way": (lambda size: {0: [1]} if size > 1 else {0: [1]}, "symmetric|no such rank"),
    "apart": (lambda size: {} if size > 1 else {1: []}, "not connected|no such rank"),
    "shape": (lambda size: np.ones((size, size + 1)), r"expected \d rows of \d weights"),
    "rows": (lambda size: np.full((size, size), 2.0), "not doubly stochastic, .* in row 0"),
    "columns": (
        lambda size: np.eye(size)[:, [0] * size].T if size > 1 else [[2.0]],
        "not doubly stochastic",
    ),
    "negative": (lambda size: -np.eye(size), "weights >= 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_graphs_are_refused_on_all_ranks(comm, name):
    graph, text = REFUSED[name]
    with pytest.raises(ValueError, match=f"neighbours: .*({text})"):
        comm.neighbours(graph(comm.size))
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_integers_are_refused(comm):
    with pytest.raises(TypeError, match="neighbours.average: MEAN of int64"):
        comm.neighbours("ring").average(1)


@pytest.mark.several
def test_ranks_that_differ_are_told_apart(comm):
    last = comm.rank == comm.size - 1
    with pytest.raises(cc.MismatchError, match="graph"):
        comm.neighbours("ring" if last else "exponential")
    neighbours = comm.neighbours("ring")
    with pytest.raises(cc.MismatchError, match="shape"):
        neighbours.average(np.ones(2 + last))
    neighbours.step += last
    with pytest.raises(cc.MismatchError, match="step"):
        neighbours.average(1.0)
    neighbours.step -= last
    with pytest.raises(cc.MismatchError, match="neighbours.average"):
        comm.allreduce(1.0) if last else neighbours.average(1.0)
    with pytest.raises(TypeError if last else cc.MismatchError, match="cannot be sent|not defined"):
        neighbours.average(["text"] if last else 1.0)
    assert neighbours.average(1.0).item() == pytest.approx(1)
