"""`hvd.Adasum`: equal to its definition on one process, with the same bits on all ranks."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from adasum_oracle import combined

import collectives as cc
import inprocess
import strategies.horovod.numpy as hvd
from oracle import BFLOAT16, FLOATS

SHAPES = [(0,), (), (1,), (3, 5), (101,), (1 << 15,)]


@contextlib.contextmanager
def everyone(comm):
    """The process set of all ranks of a context on a communicator."""
    made = hvd.HorovodContext(comm)
    yield made.world
    made.close()


def drawn(rank, shape, dtype):
    # A common part, so that products are neither 0 nor those of parallel arrays.
    common = np.random.default_rng([1, *shape]).normal(size=shape)
    own = np.random.default_rng([2, rank, *shape]).normal(size=shape)
    return np.asarray(common + (1 + rank) * own).astype(dtype)


def assert_combined(result, values, dtype):
    """A result is that of one process, but for one rounding in each round."""
    wanted = combined(values)
    assert result.dtype == dtype
    assert result.shape == wanted.shape
    rounds = math.ceil(math.log2(len(values))) + 1
    # bfloat16 has 8 digits, and NumPy does not know it.
    epsilon = 2**-7 if dtype == BFLOAT16 else np.finfo(dtype).eps
    largest = max((np.abs(value.astype(np.float64)).max(initial=1) for value in values), default=1)
    # A rounding also changes the next products, each by no more than itself.
    limit = 2 * rounds * epsilon * largest
    np.testing.assert_allclose(result.astype(np.float64), wanted, rtol=0, atol=limit)


def check(comm, ranks):
    for dtype in FLOATS:
        own = [drawn(comm.rank, shape, dtype) for shape in SHAPES]
        group = hvd.grouped_allreduce(own, op=hvd.Adasum, process_set=ranks)
        for shape, result in zip(SHAPES, group, strict=True):
            # Every array by its own products, in a group as alone.
            assert_combined(result, [drawn(r, shape, dtype) for r in range(comm.size)], dtype)
            everyones = comm.allgather(result.reshape(1, -1).view(np.uint8))
            np.testing.assert_array_equal(everyones, everyones[:1].repeat(comm.size, 0))


def test_every_dtype_is_as_on_one_process(comm):
    with everyone(comm) as ranks:
        check(comm, ranks)
        x = drawn(comm.rank, (7,), np.float32)
        alone = hvd.allreduce(x, op=hvd.Adasum, name="alone", process_set=ranks)
        changed = x.copy()
        assert hvd.allreduce_(changed, op=hvd.Adasum, process_set=ranks) is changed
        handle = hvd.allreduce_async(x, op=hvd.Adasum, process_set=ranks)
        for result in (changed, hvd.synchronize(handle)):
            np.testing.assert_array_equal(result, alone)


@pytest.mark.parametrize("size", [5, 7, 8])
@pytest.mark.parametrize("mode", ["eager", "synchronous"])
def test_any_number_of_ranks(size, mode):
    def body(comm):
        with everyone(comm) as ranks:
            check(comm, ranks)

    inprocess.run_ranks(size, body, mode, timeout=60)


KINDS = {
    "equal arrays are averaged": (lambda rank: [3.0, 4.0], lambda size: [3.0, 4.0]),
    "orthogonal arrays are added": (
        lambda rank: [float(i == rank) for i in range(4)],
        lambda size: [float(i < size) for i in range(4)],
    ),
    "zeros change nothing": (lambda rank: [2.0 * (rank == 0), 0.0], lambda size: [2.0, 0.0]),
    "zeros alone": (lambda rank: [0.0, 0.0], lambda size: [0.0, 0.0]),
    # Squares of these underflow, also in float64.
    "tiny numbers are added": (lambda rank: [1e-170], lambda size: [1e-170 * size]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_whose_result_is_exact(comm, kind):
    own, wanted = KINDS[kind]
    with everyone(comm) as ranks:
        result = hvd.allreduce(np.array(own(comm.rank)), op=hvd.Adasum, process_set=ranks)
        np.testing.assert_allclose(result, wanted(comm.size), rtol=1e-15)


def test_an_overflow_is_not_a_number_on_all_ranks(comm):
    with everyone(comm) as ranks:
        x = np.array([np.inf if comm.rank == 0 else 1.0], np.float16)
        result = hvd.allreduce(x, op=hvd.Adasum, process_set=ranks)
        assert not np.isfinite(result).any()


def test_factors_and_compression(comm):
    with everyone(comm) as ranks:
        values = [drawn(r, (9,), np.float32) for r in range(comm.size)]
        scaled = hvd.allreduce(
            values[comm.rank], op=hvd.Adasum, prescale_factor=0.5, postscale_factor=4.0,
            process_set=ranks,
        )  # fmt: skip
        assert_combined(scaled / 2, values, np.float32)
        half = hvd.allreduce(
            values[comm.rank], op=hvd.Adasum, compression=hvd.Compression.fp16, process_set=ranks
        )
        assert half.dtype == np.float32
        assert_combined(half.astype(np.float16), values, np.float16)


def test_a_joined_rank_changes_nothing(comm):
    with everyone(comm) as ranks:
        for turn in range(2):  # the second time the call is known
            for step in range(comm.rank + 1):
                x = drawn(comm.rank, (6,), np.float64)
                result = hvd.allreduce(x, op=hvd.Adasum, name="loss", process_set=ranks)
                left = [drawn(r, (6,), np.float64) * (r >= step) for r in range(comm.size)]
                assert_combined(result, left, np.float64)
            assert hvd.join(process_set=ranks) == comm.size - 1, turn


@pytest.mark.several
def test_a_process_set(comm):
    made = hvd.HorovodContext(comm)
    some = made.add(range(1, comm.size))
    if some.included():
        x = drawn(comm.rank, (6,), np.float64)
        result = hvd.allreduce(x, op=hvd.Adasum, process_set=some)
        members = [drawn(r, (6,), np.float64) for r in range(1, comm.size)]
        assert_combined(result, members, np.float64)
    made.close()


@pytest.mark.several
def test_other_ops_on_other_ranks_are_an_error_on_all(comm):
    with everyone(comm) as ranks:
        op = hvd.Adasum if comm.rank else hvd.Sum
        with pytest.raises(cc.MismatchError, match="op: SUM on rank 0, ADASUM on rank"):
            hvd.allreduce(np.ones(2), op=op, name="x", process_set=ranks)
        result = hvd.allreduce(np.ones(2), op=hvd.Adasum, name="x", process_set=ranks)
        np.testing.assert_allclose(result, [1, 1])
