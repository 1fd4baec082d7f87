"""Blocks of model parallelism: the way back is the transpose of the way there.

Seen over all ranks, a block is a matrix A, and its way back must be A*: for any x and y, <A x, y> =
<x, A* y>, each product summed over the ranks. That says nothing about whether A is the right
operation, which the second property does.
"""

import numpy as np
import pytest

import collectives as cc
from strategies import model_parallel


def array(comm, number, shape):
    return np.random.default_rng([comm.rank, number]).standard_normal(shape)


def inner(x, y):
    """The product of two arrays; None is an array that is not there."""
    return 0.0 if x is None or y is None else float(np.vdot(x, y))


def assert_transposed(comm, x, transform):
    """Check <A x, y> = <x, A* y> for a random y."""
    result, backward = transform
    y = None if result is None else array(comm, 100, result.shape)
    back = backward(y)
    if x is not None and back is not None:
        assert back.shape == x.shape
        assert back.dtype == x.dtype
    left, right, count = comm.allreduce(
        np.array([inner(result, y), inner(x, back), np.size(result)]), op=cc.SUM
    )
    # Each number of x and y is below 6, each product and sum is rounded to 2^-53.
    assert abs(left - right) <= 36 * 2**-53 * (1 + count) ** 2 * comm.size


def rows(comm, kind):
    """How many rows a rank brings."""
    return {"even": 4, "ragged": 1 + 2 * comm.rank, "some none": 3 * (comm.rank % 2), "none": 0}[
        kind
    ]


KINDS = ["even", "ragged", "some none", "none"]
EMPTY = (2, 0)
TAILS = [(), (3,), EMPTY, (2, 3)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_way_back_is_the_transpose(comm, kind):
    last = comm.size - 1
    for number, tail in enumerate(TAILS):
        x = array(comm, number, (rows(comm, kind), *tail))
        # As many rows on all ranks; 2, 3 or 4 ranks cannot share 5 evenly.
        same = array(comm, number, ({"even": 2 * comm.size, "none": 0}.get(kind, 5), *tail))

        def holds(x, transform):
            assert_transposed(comm, x, transform)

        holds(x, model_parallel.allgather(x, comm=comm))
        holds(same, model_parallel.reduce_scatter(same, comm=comm))
        holds(same, model_parallel.allreduce(same, comm=comm))
        if tail != EMPTY:  # all-to-all does not count rows without an element
            holds(x, model_parallel.alltoall(x, comm=comm))
            splits = np.roll([len(x)] + [0] * last, comm.rank + 1).tolist()
            holds(x, model_parallel.alltoall(x, counts=splits, comm=comm))
        for root in {0, last}:
            own = same if comm.rank == root else None
            everyones = comm.allgather(np.array([len(x)])).tolist()
            whole = array(comm, number, (sum(everyones), *tail))
            holds(own, model_parallel.broadcast(same, root, comm=comm))
            holds(own, model_parallel.scatter(own, root, comm=comm))
            wanted = whole if comm.rank == root else None
            holds(wanted, model_parallel.scatter(wanted, root, counts=everyones, comm=comm))
            holds(x, model_parallel.gather(x, root, comm=comm))


def test_scalars_can_be_gathered_and_reduced(comm):
    x = array(comm, 1, ())
    for transform in (
        model_parallel.allgather(x, comm=comm),
        model_parallel.allreduce(x, comm=comm),
        model_parallel.gather(x, comm=comm),
    ):
        assert_transposed(comm, x, transform)


@pytest.mark.several
def test_an_array_that_is_sent_gets_the_gradient_of_who_received_it(comm):
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for count in (0, 3, 30_000):
        x = array(comm, 1, (count + comm.rank, 2))
        nothing, sent_back = model_parallel.send(x, right, comm=comm)
        y, received_back = model_parallel.recv(left, comm=comm)
        assert nothing is None
        z = array(comm, 2, y.shape)
        assert received_back(z) is None
        back = sent_back()
        left_side, right_side = comm.allreduce(np.array([inner(y, z), inner(x, back)]), op=cc.SUM)
        np.testing.assert_allclose(left_side, right_side, rtol=0, atol=1e-9 * comm.size)
        assert back.shape == x.shape


def test_the_results_are_those_of_the_operations(comm):
    last, size = comm.size - 1, comm.size
    everyones = [np.full((2 + r, 3), r + 1.0) for r in range(size)]
    x, same = everyones[comm.rank], np.arange(7.0) + comm.rank
    total = size * np.arange(7.0) + sum(range(size))
    shares = np.array_split(total, size)
    joined = np.concatenate(everyones)
    blocks = model_parallel
    np.testing.assert_array_equal(blocks.allgather(x, comm=comm)[0], joined)
    np.testing.assert_array_equal(blocks.allreduce(same, comm=comm)[0], total)
    np.testing.assert_array_equal(blocks.reduce_scatter(same, comm=comm)[0], shares[comm.rank])
    np.testing.assert_array_equal(blocks.broadcast(same, last, comm=comm)[0], np.arange(7.0) + last)
    gathered = blocks.gather(x, last, comm=comm)[0]
    if comm.rank == last:
        np.testing.assert_array_equal(gathered, joined)
    else:
        assert gathered is None
    part = blocks.scatter(np.arange(7.0) if comm.rank == last else None, last, comm=comm)[0]
    np.testing.assert_array_equal(part, np.array_split(np.arange(7.0), size)[comm.rank])
    exchanged = blocks.alltoall(np.full(size, comm.rank), comm=comm)[0]
    np.testing.assert_array_equal(exchanged, np.arange(size))


@pytest.mark.several
def test_a_gradient_of_the_wrong_shape_on_one_rank_is_an_error_on_all(comm):
    x = np.ones((2 + comm.rank, 3))
    odd = comm.rank == comm.size - 1
    for block in (model_parallel.allgather, model_parallel.gather):
        y, backward = block(x, comm=comm)
        wrong = y if y is None or not (odd or comm.rank == 0) else y[1:]
        with pytest.raises((ValueError, cc.MismatchError)):
            backward(wrong)
        y, backward = block(x, comm=comm)
        assert backward(y).shape == x.shape


def test_two_layers_split_over_the_ranks_learn_like_one_rank(comm):
    """Units divided in the first layer, inputs divided in the second: as one network, exactly."""
    random = np.random.default_rng(3)
    x, target = random.standard_normal((5, 11)), random.standard_normal((11, 2))
    w1, w2 = random.standard_normal((7, 5)), random.standard_normal((2, 7))
    mine = np.array_split(np.arange(7), comm.size)[comm.rank]
    examples = np.array_split(np.arange(11), comm.size)[comm.rank]

    h = np.tanh(w1[mine] @ x)
    y, back = model_parallel.reduce_scatter((w2[:, mine] @ h).T, comm=comm)
    dy = back(2 * (y - target[examples]))
    dw2 = dy.T @ h.T
    dw1 = (w2[:, mine].T @ dy.T * (1 - h**2)) @ x.T

    whole = np.tanh(w1 @ x)
    error = 2 * ((w2 @ whole).T - target)
    np.testing.assert_allclose(dw2, (error.T @ whole.T)[:, mine], rtol=1e-12)
    all_dw1 = (w2.T @ error.T * (1 - whole**2)) @ x.T
    np.testing.assert_allclose(dw1, all_dw1[mine], rtol=1e-12)
