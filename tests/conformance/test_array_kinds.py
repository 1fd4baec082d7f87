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
import inprocess
import moving
import oracle
from collectives.arrays import host_arrays
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

ROWS = [(np.dtype(np.float32), (5, 3)), (np.dtype(np.float32), (0, 3)), (oracle.BFLOAT16, (201, 2))]


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    """These tests need no device: a stand-in takes CuPy's place."""
    monkeypatch.setitem(sys.modules, "cupy", fakecupy.FakeCupy())


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_result_is_of_the_caller_s_kind_with_numpy_s_bits(comm, name, operation):
    kind = kind_of(name)
    run = OPERATIONS[operation]
    for dtype, shape in ROWS:
        if name == "cuda" and dtype == oracle.BFLOAT16:
            continue  # the CUDA array interface has no word for it
        for step in range(3):  # the first call, and two like it
            values = oracle.data(comm.rank + step, shape, dtype)
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


@pytest.mark.parametrize("name", NAMES)
def test_a_zero_dimensional_array_stays_one(comm, name):
    kind = kind_of(name)
    for value in (2, 3, 4):
        result = comm.allreduce(kind.make(np.array(value, np.float32)), op=cc.SUM)
        assert kind.mine(result)
        assert kind.read(result).shape == ()
        assert kind.read(result) == value * comm.size


@pytest.mark.parametrize("name", moving.DTYPES)
def test_arrays_of_other_dtypes_can_be_moved(comm, name):
    dtype = moving.DTYPES[name]
    for shape in [(5, 3), (0, 2), (1500, 2)]:
        moving.assert_moved(comm, shape, dtype)
    one = moving.data(comm.rank, (), dtype)
    assert comm.broadcast(one) == moving.data(0, (), dtype)
    assert comm.allgather(one).shape == (comm.size,)


@pytest.mark.parametrize("name", moving.DTYPES)
def test_arrays_of_other_dtypes_cannot_be_reduced(comm, name):
    x = moving.data(comm.rank, (4,), moving.DTYPES[name])
    words = "expected bool, an integer, float16, .* complex128, got .* can only be moved"
    for reduce in (
        lambda: comm.allreduce(x, op=cc.MAX),
        lambda: comm.allreduce(x, op=cc.LOGICAL_OR),
        lambda: comm.allreduce((x, np.arange(4)), op=cc.MINLOC),
        lambda: comm.reduce(x, op=cc.SUM),
        lambda: comm.reduce_scatter(x, op=cc.SUM),
        lambda: comm.scan(x, op=cc.MIN),
        lambda: comm.grouped_allreduce([x], op=cc.BITWISE_OR),
        lambda: comm.grouped_reduce_scatter([x]),
        lambda: comm.sparse_allreduce(np.arange(4), x),
        lambda: comm.plan_allreduce(x),
        lambda: comm.plan_buckets([x]),
    ):
        with pytest.raises(TypeError, match=words):
            reduce()
    assert comm.allreduce(1, op=cc.SUM) == comm.size


OTHERS = {  # of the same size, but with other fields
    "offsets": np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [4, 0]}),
    "names": np.dtype([("a", "i4"), ("c", "i4")]),
    "formats": np.dtype([("a", "i4"), ("b", "f4")]),
    "void": np.dtype("V8"),
}


@pytest.mark.several
@pytest.mark.parametrize("name", OTHERS)
def test_structured_dtypes_are_compared_whole(comm, name):
    odd = comm.rank == comm.size - 1
    x = np.zeros(3, OTHERS[name] if odd else [("a", "i4"), ("b", "i4")])
    for move in (
        lambda: comm.broadcast(x),
        lambda: comm.allgather(x),
        lambda: comm.gather(x),
        lambda: comm.alltoall(x),
        lambda: comm.grouped_broadcast([x]),
        lambda: comm.grouped_allgather([x]),
    ):
        with pytest.raises(cc.MismatchError, match=r"(dtype|arrays) is .*'b'"):
            move()
    assert comm.allreduce(1, op=cc.SUM) == comm.size


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_tensors_of_8_bit_floats_and_4_bit_integers_can_be_moved(comm, library):
    there = installed(library)
    names = ["float8_e4m3fn", "float8_e5m2"] + ["int4"] * (library == "jax")

    def make(array):
        if library == "jax":
            return there.numpy.asarray(array)
        bits = there.from_numpy(array.view(np.uint8).copy())
        return bits.view(getattr(there, array.dtype.name))

    def read(x, dtype):
        array = np.asarray(x) if library == "jax" else x.view(there.uint8).numpy().view(dtype)
        return array.astype(np.float32)

    for dtype in [np.dtype(getattr(ml_dtypes, name)) for name in names]:
        xs = [moving.data(rank, (6, 2), dtype) for rank in range(comm.size)]
        for _ in range(2):
            x = make(xs[comm.rank])
            for result, expected in (
                (comm.broadcast(x, comm.size - 1), xs[-1]),
                (comm.allgather(x), np.concatenate(xs)),
                (comm.grouped_broadcast([x])[0], xs[0]),
            ):
                assert type(result) is type(x)
                assert result.dtype == x.dtype
                np.testing.assert_array_equal(read(result, dtype), expected.astype(np.float32))
            if library == "torch":
                assert comm.broadcast(x, comm.size - 1, out=x) is x
                np.testing.assert_array_equal(read(x, dtype), xs[-1].astype(np.float32))
        with pytest.raises(TypeError, match=f"got {dtype}; arrays of other dtypes"):
            comm.allreduce(x)


ORDERED = {
    "allreduce": lambda comm, x: comm.allreduce(x),
    "scaled": lambda comm, x: comm.allreduce(x, postscale=2.0),
    "logical": lambda comm, x: comm.allreduce(x, op=cc.LOGICAL_OR),
    "grouped_allreduce": lambda comm, x: comm.grouped_allreduce([x, x])[1],
    "grouped_broadcast": lambda comm, x: comm.grouped_broadcast([x])[0],
    "broadcast": lambda comm, x: comm.broadcast(x, comm.size - 1),
    "reduce": lambda comm, x: [x, comm.reduce(x, 0)][comm.rank == 0],
    "scan": lambda comm, x: comm.scan(x),
    "allreduce_async": lambda comm, x: comm.allreduce_async(x).wait(),
    "in place": lambda comm, x: comm.allreduce(x, out=x),
}
LAYOUTS = {  # axes of an array of shape (4, 3, 2, 1), from the slowest to the fastest in memory
    "C": (0, 1, 2, 3),
    "Fortran": (3, 2, 1, 0),
    "channels last": (0, 2, 3, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operation", ORDERED)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_result_has_the_order_of_elements_of_its_array(comm, library, operation, layout):
    torch = installed("torch") if library == "torch" else None
    axes = LAYOUTS[layout]
    plain = np.arange(24.0).reshape(4, 3, 2, 1) + comm.rank
    x = np.empty([plain.shape[i] for i in axes]).transpose(np.argsort(axes))
    x[...] = plain
    wanted = ORDERED[operation](comm, plain.copy())
    for _ in range(2):  # the second call runs the kept plan
        given = x.copy("K") if torch is None else torch.from_numpy(x.copy("K"))
        made = ORDERED[operation](comm, given)
        like = np.empty_like(given) if torch is None else torch.empty_like(given)
        strides = [a.strides if torch is None else a.stride() for a in (made, like)]
        assert strides[0] == strides[1]
        np.testing.assert_array_equal(np.asarray(made), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_joined_arrays_may_have_different_lengths(comm, name):
    kind = kind_of(name)
    parts = [oracle.data(rank, (rank, 2), np.dtype(np.float32)) for rank in range(comm.size)]
    result = comm.allgather(kind.make(parts[comm.rank]))
    np.testing.assert_array_equal(kind.read(result), np.concatenate(parts))


@pytest.mark.parametrize("name", NAMES)
def test_an_out_is_written_in_place_or_refused(comm, name):
    kind = kind_of(name)
    for step in range(3):  # the first call, and two like it
        first = oracle.data(step, (4, 3), np.dtype(np.float32))
        values = oracle.data(comm.rank + step, (4, 3), np.dtype(np.float32))
        expected = comm.allreduce(values)
        for x in (values, kind.make(values)):
            out = kind.make(np.zeros((4, 3), np.float32))
            if kind.mutable:
                assert comm.allreduce(x, out=out) is out
                np.testing.assert_array_equal(kind.read(out), expected)
                assert comm.broadcast(x, out=out) is out
                np.testing.assert_array_equal(kind.read(out), first)
                np.testing.assert_array_equal(kind.read(x) if x is not values else x, values)
                assert comm.reduce(x, out=out) is (None if comm.rank else out)
                np.testing.assert_array_equal(kind.read(out), first if comm.rank else expected)
            else:
                words = "^allreduce: out .*(imm|read-)"
                with pytest.raises((TypeError, ValueError), match=words):
                    comm.allreduce(x, out=out)
        x = kind.make(values)
        if kind.mutable:
            assert comm.allreduce(x, out=x) is x
            np.testing.assert_array_equal(kind.read(x), expected)
            x = kind.make(values)
            assert comm.broadcast(x, out=x) is x
            np.testing.assert_array_equal(kind.read(x), first)
        assert comm.allreduce(1, op=cc.SUM) == comm.size


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cuda"])
def test_an_out_may_be_of_another_kind_than_the_array(comm, name):
    kind = kind_of(name)
    for step in range(3):
        values = oracle.data(comm.rank + step, (7,), oracle.BFLOAT16)
        expected = comm.allreduce(values)
        out = np.zeros_like(values)
        assert comm.allreduce(kind.make(values), out=out) is out
        np.testing.assert_array_equal(out, expected)
        device = sys.modules["cupy"].array(np.zeros_like(values))
        assert comm.allreduce(kind.make(values), out=device) is device
        np.testing.assert_array_equal(device.memory, expected)


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
def test_an_out_of_rows_is_written_in_place_or_refused(comm, name, operation):
    kind, run = kind_of(name), OUT_OPERATIONS[operation]
    if operation == "gather" and comm.size > 1:
        return  # the root's alone counts
    values = oracle.data(comm.rank, (4, 3), np.dtype(np.float32))
    expected = run(comm, values, None)
    if operation == "grouped_allreduce":
        (expected,) = expected
    for x in (values, kind.make(values), kind.make(values)):
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


def test_every_rank_may_bring_its_own_kind(comm):
    kinds = [kind_of(name) for name in ("numpy", "cupy")]
    kind = kinds[comm.rank % 2]
    for step in range(3):
        result = comm.allreduce(kind.make(np.full(3, comm.rank + step, np.float32)), op=cc.MAX)
        assert kind.mine(result)
        assert kind.read(result).tolist() == [comm.size - 1 + step] * 3


@pytest.mark.parametrize("name", [*NAMES, "number", "list"])
def test_a_call_like_an_earlier_one_does_not_look_at_everything_again(name, monkeypatch):
    values = np.array(3.0) if name == "number" else np.array([1.0, 2.0], np.float32)
    make = values.tolist if name in ("number", "list") else lambda: kind_of(name).make(values)

    def check(comm):
        for operation in ("allreduce", "mean", "reduce"):
            run = OPERATIONS[operation]
            run(comm, make())
            if name == "torch strided":
                continue
            with monkeypatch.context() as here:
                here.setattr(host_arrays, "host_view", None)
                run(comm, make())

    inprocess.run_ranks(1, check)


def test_tensors_know_of_what_is_written_into_them(comm):
    torch = installed("torch")
    for _ in range(3):
        x, other = torch.ones(3), torch.ones(3)
        weight = torch.ones(3, requires_grad=True)
        product = weight * x  # whose backward pass needs x as it was
        comm.reduce(x, 0, out=other)
        comm.broadcast(x, 0)
        product.sum().backward()
        assert weight.grad.tolist() == [1, 1, 1]
        product = weight * x
        assert comm.allreduce(x, op=cc.SUM, out=x) is x
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
        conjugate = torch.ones(3, dtype=torch.complex64).mul(1j).conj()
        total = comm.allreduce(conjugate, op=cc.SUM)
        assert total.tolist() == [-1j * comm.size] * 3
        assert comm.allreduce(conjugate, op=cc.SUM, out=conjugate) is conjugate
        assert conjugate.tolist() == [-1j * comm.size] * 3


def test_an_array_that_one_rank_cannot_read_is_refused_on_all(comm):
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    x = masked if comm.rank == comm.size - 1 else np.ones(2)
    error = TypeError if comm.rank == comm.size - 1 else cc.MismatchError
    with pytest.raises(error, match="a masked array would lose its mask"):
        comm.allreduce(x)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_a_result_does_not_share_memory_with_the_array(comm):
    for run in OPERATIONS.values():
        x = np.ones((3, 2), np.float32)
        result = run(comm, x)
        assert result is None or not np.shares_memory(result, x)
