"""Every operation takes every kind of array, and gives back the kind that it was given."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import fakecupy
import oracle
from requirements import installed


class Kind(NamedTuple):
    """A kind of array.

    Attributes:
        make: of a NumPy array.
        read: back to NumPy.
        mine: whether a result is of the kind, and without a gradient.
        mutable: whether it can be an `out`.
    """

    make: Callable[[np.ndarray], Any]
    read: Callable[[Any], np.ndarray]
    mine: Callable[[Any], bool]
    mutable: bool = True


def tensor_of(array):
    torch = sys.modules["torch"]
    if array.dtype == oracle.BFLOAT16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def array_of(tensor):
    torch = sys.modules["torch"]
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().float().numpy().astype(ml_dtypes.bfloat16)
    return tensor.detach().numpy()


def is_plain_tensor(x):
    return type(x) is sys.modules["torch"].Tensor and not x.requires_grad


def with_gradient(array):
    return tensor_of(array).requires_grad_()


def strided(array):
    """A tensor whose elements are not next to each other."""
    wide = np.zeros((*array.shape, 2), array.dtype)
    wide[..., 0] = array
    return tensor_of(wide)[..., 0]


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def kind_of(name):
    library = name.split()[0]
    if library in ("torch", "jax"):
        installed(library)
    if library == "numpy":
        make = read_only if name == "numpy read-only" else np.array
        mutable = name != "numpy read-only"
        return Kind(make, np.asarray, lambda x: type(x) is np.ndarray, mutable)
    if library == "torch":
        make = {"torch": tensor_of, "torch gradient": with_gradient, "torch strided": strided}[name]
        return Kind(make, array_of, is_plain_tensor)
    if library == "jax":
        jax = sys.modules["jax"]
        return Kind(jax.numpy.asarray, np.asarray, lambda x: isinstance(x, jax.Array), False)
    cupy = sys.modules["cupy"]
    make = cupy.array if name == "cupy" else lambda array: fakecupy.Buffer(cupy, array)
    return Kind(make, lambda x: x.memory, lambda x: isinstance(x, fakecupy.ndarray))


NAMES = [
    "numpy", "numpy read-only", "cupy", "cuda", "torch", "torch gradient", "torch strided", "jax",
]  # fmt: skip

OPERATIONS = {
    "allreduce": lambda comm, x: comm.allreduce(x, op=cc.SUM),
    "mean": lambda comm, x: comm.allreduce(x),
    "reduce": lambda comm, x: comm.reduce(x, 0, op=cc.MAX),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x, op=cc.SUM),
    "broadcast": lambda comm, x: comm.broadcast(x, comm.size - 1),
    "gather": lambda comm, x: comm.gather(x, comm.size - 1),
    "allgather": lambda comm, x: comm.allgather(x),
}

ROWS = [
    (np.dtype(np.float32), (5, 3)),
    (np.dtype(np.float32), (0, 3)),
    (oracle.BFLOAT16, (201, 2)),
]


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    """These tests need no device: a stand-in takes CuPy's place."""
    monkeypatch.setitem(sys.modules, "cupy", fakecupy.FakeCupy())


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_result_is_of_the_caller_s_kind_with_numpy_s_bits(world, name, operation):
    kind = kind_of(name)
    run = OPERATIONS[operation]

    def check(comm):
        for dtype, shape in ROWS:
            if name == "cuda" and dtype == oracle.BFLOAT16:
                continue  # the CUDA array interface has no word for it
            values = oracle.data(comm.rank, shape, dtype)
            expected = run(comm, values)
            x = kind.make(values)
            result = run(comm, x)
            if expected is None:
                assert result is None
                continue
            assert kind.mine(result)
            read = kind.read(result)
            assert (read.dtype, read.shape) == (dtype, expected.shape)
            np.testing.assert_array_equal(read, expected)
            np.testing.assert_array_equal(kind.read(x), values)

    world.run(check)


@pytest.mark.parametrize("name", NAMES)
def test_a_zero_dimensional_array_stays_one(world, name):
    kind = kind_of(name)

    def check(comm):
        result = comm.allreduce(kind.make(np.array(2.0, np.float32)), op=cc.SUM)
        assert kind.mine(result)
        assert kind.read(result).shape == ()
        assert kind.read(result) == 2 * comm.size

    world.run(check)


@pytest.mark.parametrize("name", NAMES)
def test_joined_arrays_may_have_different_lengths(world, name):
    kind = kind_of(name)

    def check(comm):
        parts = [oracle.data(rank, (rank, 2), np.dtype(np.float32)) for rank in range(comm.size)]
        result = comm.allgather(kind.make(parts[comm.rank]))
        np.testing.assert_array_equal(kind.read(result), np.concatenate(parts))

    world.run(check)


@pytest.mark.parametrize("name", NAMES)
def test_an_out_is_written_in_place_or_refused(world, name):
    kind = kind_of(name)

    def check(comm):
        values = oracle.data(comm.rank, (4, 3), np.dtype(np.float32))
        expected = comm.allreduce(values)
        for x in (values, kind.make(values)):
            out = kind.make(np.zeros((4, 3), np.float32))
            if kind.mutable:
                assert comm.allreduce(x, out=out) is out
                np.testing.assert_array_equal(kind.read(out), expected)
            else:
                with pytest.raises((TypeError, ValueError), match="^allreduce: out .*(imm|read-)"):
                    comm.allreduce(x, out=out)
        x = kind.make(values)
        if kind.mutable:
            assert comm.broadcast(x, out=x) is x
            first = oracle.data(0, (4, 3), np.dtype(np.float32))
            np.testing.assert_array_equal(kind.read(x), first)
        assert comm.allreduce(1, op=cc.SUM) == comm.size

    world.run(check)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cuda"])
def test_an_out_may_be_of_another_kind_than_the_array(world, name):
    kind = kind_of(name)

    def check(comm):
        values = oracle.data(comm.rank, (7,), oracle.BFLOAT16)
        expected = comm.allreduce(values)
        out = np.zeros_like(values)
        assert comm.allreduce(kind.make(values), out=out) is out
        np.testing.assert_array_equal(out, expected)
        device = sys.modules["cupy"].array(np.zeros_like(values))
        assert comm.allreduce(kind.make(values), out=device) is device
        np.testing.assert_array_equal(device.memory, expected)

    world.run(check)


OUT_OPERATIONS = {
    "reduce_scatter": lambda comm, x, out: comm.reduce_scatter(x, op=cc.MAX, out=out),
    "gather": lambda comm, x, out: comm.gather(x, comm.rank, out=out),
    "allgather": lambda comm, x, out: comm.allgather(x, out=out),
    "scatter": lambda comm, x, out: comm.scatter(x, out=out),
    "alltoall": lambda comm, x, out: comm.alltoall(x, out=out),
    "grouped_allreduce": lambda comm, x, out: comm.grouped_allreduce(
        [x], op=cc.MAX, out=None if out is None else [out]
    ),
}


@pytest.mark.parametrize("operation", OUT_OPERATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_an_out_of_rows_is_written_in_place_or_refused(world, name, operation):
    kind, run = kind_of(name), OUT_OPERATIONS[operation]

    def check(comm):
        if operation == "gather" and comm.size > 1:
            return  # the root's alone counts
        values = oracle.data(comm.rank, (4, 3), np.dtype(np.float32))
        expected = run(comm, values, None)
        if operation == "grouped_allreduce":
            (expected,) = expected
        for x in (values, kind.make(values)):
            out = kind.make(np.zeros_like(expected))
            if kind.mutable:
                result = run(comm, x, out)
                assert (result[0] if operation == "grouped_allreduce" else result) is out
                np.testing.assert_array_equal(kind.read(out), expected)
            else:
                words = rf"^{operation}: out .*(imm|read-)"
                with pytest.raises((TypeError, ValueError), match=words):
                    run(comm, x, out)
        assert comm.allreduce(1, op=cc.SUM) == comm.size

    world.run(check)


def test_every_rank_may_bring_its_own_kind(world):
    kinds = [kind_of(name) for name in ("numpy", "cupy")]

    def check(comm):
        kind = kinds[comm.rank % 2]
        result = comm.allreduce(kind.make(np.full(3, comm.rank, np.float32)), op=cc.MAX)
        assert kind.mine(result)
        assert kind.read(result).tolist() == [comm.size - 1] * 3

    world.run(check)


def test_an_array_that_one_rank_cannot_read_is_refused_on_all(world):
    def check(comm):
        masked = np.ma.array([1.0, 2.0], mask=[False, True])
        x = masked if comm.rank == comm.size - 1 else np.ones(2)
        error = TypeError if comm.rank == comm.size - 1 else cc.MismatchError
        with pytest.raises(error, match="a masked array would lose its mask"):
            comm.allreduce(x)
        assert comm.allreduce(1, op=cc.SUM) == comm.size

    world.run(check)


def test_a_result_does_not_share_memory_with_the_array(world):
    def check(comm):
        for run in OPERATIONS.values():
            x = np.ones((3, 2), np.float32)
            result = run(comm, x)
            assert result is None or not np.shares_memory(result, x)

    world.run(check)
