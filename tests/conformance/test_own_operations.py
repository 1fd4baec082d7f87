"""Operations of the program: results, order and bits on all ranks, and what is refused."""

import copy
import functools
import math
import pickle

import ml_dtypes
import numpy as np
import pytest

import collectives as cc
import oracle
from requirements import installed


def logarithm_of_sum(a, b):
    return max(a, b) + math.log1p(math.exp(-abs(a - b)))


def saturated(a, b):
    return min(a + b, 100)


def composed(a, b):
    """x -> a.real x + a.imag, then the same of b."""
    return complex(a.real * b.real, b.real * a.imag + b.imag)


def latest(a, b):
    return b if b else a


# Name -> function of two numbers, options of `operation`, and dtypes.
OWN = {
    "logarithm": (logarithm_of_sum, {}, ["float32", "float64", "float16", "bfloat16"]),
    "saturated": (saturated, {"identity": 0, "samples": [0, 1, 7, 60, 100]}, ["int8", "uint64"]),
    "composed": (composed, {"identity": 1, "commutative": False}, ["complex64", "complex128"]),
    "latest": (latest, {"identity": 0, "commutative": False}, ["int32", "float32"]),
}
SHAPES = [(), (0,), (7, 3), (40_001,)]


def data(name, rank, shape, dtype):
    if name == "saturated":
        return ((np.arange(math.prod(shape)) + rank) % 40).reshape(shape).astype(dtype)
    x = oracle.data(rank, shape, np.dtype(getattr(ml_dtypes, dtype, dtype)))
    return np.asarray(x * oracle.data(rank + 5, shape, oracle.BOOL)) if name == "latest" else x


def made(name):
    function, options, _ = OWN[name]
    return cc.operation(function, **options)


def expected(name, arrays):
    """The arrays combined in rank order, in a wide dtype."""
    wide = {"f": np.float64, "V": np.float64, "c": np.complex128}.get(arrays[0].dtype.kind, object)
    function = np.frompyfunc(OWN[name][0], 2, 1)
    whole = functools.reduce(function, [np.asarray(np.asarray(x, wide), object) for x in arrays])
    return np.asarray(whole).astype(wide)


def assert_close(got, name, arrays):
    exact = expected(name, arrays)
    assert got.dtype == arrays[0].dtype
    assert got.shape == exact.shape
    if exact.dtype == object:
        assert (got.astype(object) == exact).all()
        return
    kind = got.dtype
    eps = float(ml_dtypes.finfo(kind).eps)
    # Terms of both parts of a composition; at most 8 roundings for each rank.
    size = 1 + np.sum([np.abs(x.astype(exact.dtype)) for x in arrays], axis=0) ** len(arrays)
    assert (np.abs(got.astype(exact.dtype) - exact) <= 8 * len(arrays) * eps * size).all()


def assert_same_bits(comm, got):
    assert len(set(comm.allgather_object(np.asarray(got).tobytes()))) == 1


@pytest.mark.algorithms("allreduce")
@pytest.mark.parametrize("name", OWN)
def test_allreduce(comm, algorithm, name):
    op, (_, options, dtypes) = made(name), OWN[name]
    in_order = not options.get("commutative", True)
    for dtype in dtypes:
        for shape in SHAPES if dtype == dtypes[0] else SHAPES[2:3]:
            arrays = [data(name, r, shape, dtype) for r in range(comm.size)]
            x = arrays[comm.rank].copy()
            if algorithm == "native" or (in_order and algorithm not in ("auto", "node")):
                with pytest.raises(ValueError, match=f"expected a.*, got '{algorithm}'"):
                    comm.allreduce(x, op=op, algorithm=algorithm)
                continue
            for _ in range(2):
                got = comm.allreduce(x, op=op, algorithm=algorithm)
                assert_close(got, name, arrays)
                assert_same_bits(comm, got)
            assert x.tobytes() == arrays[comm.rank].tobytes()
            assert comm.allreduce(x, op=op, out=x, algorithm=algorithm) is x
            assert x.tobytes() == got.tobytes()


@pytest.mark.parametrize("name", OWN)
def test_other_forms(comm, name):
    op, dtype, root = made(name), OWN[name][2][0], comm.size - 1
    arrays = [data(name, r, (7, 3), dtype) for r in range(comm.size)]
    x, rows = arrays[comm.rank], [np.array_split(a, comm.size)[comm.rank] for a in arrays]
    assert_close(comm.allreduce_async(x, op=op).wait(), name, arrays)
    for result in (comm.reduce(x, root, op=op), comm.reduce_async(x, root, op=op).wait()):
        assert (result is None) == (comm.rank != root)
        if result is not None:
            assert_close(result, name, arrays)
    assert_close(comm.reduce_scatter(x, op=op), name, rows)
    assert_close(comm.grouped_reduce_scatter([x], op=op)[0], name, rows)
    assert_close(comm.plan_reduce_scatter(x, op=op)(), name, rows)
    for got in comm.grouped_allreduce([x, x], op=op):
        assert_close(got, name, arrays)
    assert_close(comm.plan_allreduce(x.copy(), op=op)(), name, arrays)
    shared = comm.shared_empty(x.shape, x.dtype)
    shared[...] = x
    assert_close(comm.allreduce(shared, op=op, out=shared), name, arrays)
    with comm.plan_buckets([x], op=op) as buckets:
        assert_close(buckets.allreduce([x])[0], name, arrays)


@pytest.mark.parametrize("name", OWN)
def test_scans(comm, name):
    op, dtype = made(name), OWN[name][2][0]
    identity = OWN[name][1].get("identity")
    arrays = [data(name, r, (50_001,), dtype) for r in range(comm.size)]
    x = arrays[comm.rank]
    assert_close(comm.scan(x, op=op), name, arrays[: comm.rank + 1])
    for before in (comm.exscan(x, op=op), comm.exscan_async(x, op=op).wait()):
        if comm.rank:
            assert_close(before, name, arrays[: comm.rank])
        else:
            assert before is None if identity is None else (before == identity).all()


def test_tensors(comm):
    torch = installed("torch")
    op = made("logarithm")
    x = torch.full((3,), 1.0, dtype=torch.bfloat16)
    got = comm.allreduce(x, op=op, out=x)
    assert got is x
    exact = 1 + math.log(comm.size)
    assert x.dtype == torch.bfloat16
    assert all(abs(n - exact) <= 2**-7 * exact for n in x.tolist())


@pytest.mark.several
def test_a_nan_has_the_same_bits_on_all_ranks(comm):
    payload = np.array([0x7FC00001 + comm.rank, 0xFFC00001], np.uint32).view(np.float32)
    got = comm.allreduce(payload, op=made("logarithm"))
    assert got.tobytes() == np.full(2, np.nan, np.float32).tobytes()


def test_equal_functions_are_one_operation():
    op = made("logarithm")
    assert cc.operation(logarithm_of_sum) is op
    assert cc.operation(logarithm_of_sum, commutative=False) is not op
    assert cc.operation(eval("lambda a, b: a + b")) is not cc.operation(eval("lambda a, b: a * b"))
    assert copy.deepcopy(op) is op
    assert pickle.loads(pickle.dumps(cc.SUM)) is cc.SUM


def raises(a, b):
    if a > b:
        raise ValueError("a > b")
    return a


# Function, options, dtype, error, and its text.
REFUSED = {
    "not associative": (
        lambda a, b: a - b, {}, "float32", ValueError,
        r"is not associative for float32, expected f\(f\(a, b\), c\) = f\(a, f\(b, c\)\), "
        r"got -1.0 and 1.0 for a = 0.0, b = 0.0, c = 1.0",
    ),
    "not associative, rounded": (
        lambda a, b: a * 1.001 + b, {}, "float16", ValueError, "is not associative for float16",
    ),
    "not commutative": (
        lambda a, b: b, {}, "int64", ValueError,
        r"is not commutative for int64, .* = f\(b, a\), got 1 and 0 for a = 0, b = 1",
    ),
    "no identity": (
        lambda a, b: a * b, {"identity": 0}, "float64", ValueError,
        r"expected f\(0, a\) = a, got 0.0 and 1.0",
    ),
    "bool": (lambda a, b: a ^ b, {}, "bool", TypeError, "cast to uint8"),
    "no number": (
        lambda a, b: (a, b), {}, "float32", TypeError, "numba cannot compile .* for float32: ",
    ),
    "unknown name": (
        lambda a, b: unknown(a, b), {}, "float32", TypeError,  # noqa: F821
        "NameError: .*name 'unknown' is not defined",
    ),
    "raises": (raises, {}, "float32", TypeError, "needs Python, expected .* that does not raise"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_functions_are_refused_on_all_ranks(comm, name):
    function, options, dtype, error, text = REFUSED[name]
    op = cc.operation(function, **options)
    for call in (comm.allreduce, comm.scan):
        with pytest.raises(error, match=text):
            call(np.ones(3, dtype), op=op)
    assert comm.allreduce(1, op=cc.SUM) == comm.size


# Calls that cannot use operations of the program, and the text of the error.
UNAVAILABLE = {
    "compression": (
        lambda comm, op: comm.allreduce(np.ones(3), op=op, compression=cc.FP16),
        ValueError, "is an operation of the program, expected NONE, got float16",
    ),
    "MPI": (
        lambda comm, op: comm.reduce(1.0, op=op, algorithm="native"),
        ValueError, "is not an operation of MPI, expected another algorithm, got 'native'",
    ),
    "NCCL": (
        lambda comm, op: comm.allreduce(1.0, op=op, algorithm="nccl"),
        ValueError, "'nccl' needs an array on a CUDA device",
    ),
    "sparse": (
        lambda comm, op: comm.sparse_allreduce([0], np.ones((1, 2)), op=op),
        TypeError, "SUM or MEAN",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNAVAILABLE)
def test_calls_that_lack_them(comm, name):
    call, error, text = UNAVAILABLE[name]
    with pytest.raises(error, match=text):
        call(comm, made("logarithm"))
    assert comm.allreduce(1, op=cc.SUM) == comm.size


@pytest.mark.parametrize("function", [None, max, np.add], ids=str)
def test_what_is_no_function_of_python_is_refused(function):
    with pytest.raises(TypeError, match="operation: expected a Python function of two numbers"):
        cc.operation(function)


def test_an_object_as_a_constant_is_refused():
    thing = object()
    with pytest.raises(TypeError, match="a constant that ranks cannot compare"):
        cc.operation(lambda a, b: (thing, a, b)[1])


@pytest.mark.several
def test_ranks_with_other_functions_are_told_apart(comm):
    add, multiply = eval("lambda a, b: a + b"), eval("lambda a, b: a * b")
    with pytest.raises(cc.MismatchError, match="op"):
        comm.allreduce(1.0, op=cc.operation(multiply if comm.rank else add))
    with pytest.raises(ValueError if comm.rank == 0 else cc.MismatchError, match="not associative"):
        comm.allreduce(1.0, op=cc.SUM if comm.rank else cc.operation(REFUSED["not associative"][0]))
    assert comm.allreduce(1, op=cc.SUM) == comm.size


def test_scaled(comm):
    op = cc.operation(eval("lambda a, b: a + b"))
    assert comm.allreduce(1.0, op=op, prescale=2, postscale=3) == 6 * comm.size
