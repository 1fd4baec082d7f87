"""`scan` and `exscan` against reductions of the first ranks; objects gathered and scattered."""

import numpy as np
import pytest

import collectives as cc
import oracle
from oracle import assert_close
from requirements import installed

OPS = (cc.SUM, cc.MEAN, cc.MIN, cc.MAX, cc.PRODUCT)

# None, one, many, and more than a slice of every dtype.
SHAPES = [(0,), (), (3, 2), (300_007,)]


def test_every_op_and_dtype(comm):
    for dtype in oracle.DTYPES:
        for op in OPS:
            if not oracle.is_defined(op, dtype):
                with pytest.raises(TypeError, match=f"scan: {op.value} of .* is not defined"):
                    comm.scan(np.ones(2, dtype), op=op)
                continue
            for shape in SHAPES if (dtype, op) == (np.float32, cc.SUM) else SHAPES[1:3]:
                arrays = [oracle.data(rank, shape, dtype) for rank in range(comm.size)]
                own = arrays[comm.rank]
                got = comm.scan(own, op=op)
                assert got.shape == shape
                assert_close(got, arrays[: comm.rank + 1], op)
                before = comm.exscan(own, op=op)
                if comm.rank == 0:
                    assert before is None
                else:
                    assert_close(before, arrays[: comm.rank], op)


def test_every_algorithm_by_its_name(comm, world):
    names = ["auto", "prefix"]
    names += ["node"] if world.kind == "shared" and world.size > 1 else []
    names += ["native"] if world.name.startswith("mpi") else []
    arrays = [oracle.data(rank, (1001,), np.dtype(np.float32)) for rank in range(comm.size)]
    small = np.array([100 + comm.rank, 3], np.int8)
    for name in names:
        for op in (cc.SUM, cc.MEAN, cc.MAX):
            got = comm.scan(arrays[comm.rank], op=op, algorithm=name)
            assert_close(got, arrays[: comm.rank + 1], op)
            before = comm.exscan(arrays[comm.rank], op=op, algorithm=name)
            if comm.rank == 0:
                assert before is None
            else:
                assert_close(before, arrays[: comm.rank], op)
        assert comm.scan(small, op=cc.MAX, algorithm=name).tolist() == [100 + comm.rank, 3]
    with pytest.raises(ValueError, match="expected one of auto node prefix native, got 'ring'"):
        comm.scan(1, algorithm="ring")
    if comm.size > 1:
        with pytest.raises(cc.MismatchError, match="prefix"):
            comm.scan(1, algorithm="auto" if comm.rank else "prefix")
        assert comm.scan(1).item() == comm.rank + 1


def test_halves_add_up_wide_and_are_rounded_once(comm):
    # Each 1 is lost beside 2048 where 16 bits are added to 16 bits.
    x = np.array([2048 if comm.rank == 0 else 1], np.float16)
    expected = np.float16(2048 + comm.rank)
    assert comm.scan(x)[0] == expected


def test_the_same_bits_again_and_in_place(comm):
    x = oracle.data(comm.rank, (50_001,), np.dtype(np.float32))
    first = comm.scan(x)
    y = x.copy()
    assert comm.scan(y, out=y) is y
    assert y.tobytes() == first.tobytes()
    z = np.zeros((50_001, 2), np.float32)
    comm.scan_async(x, out=z[:, 1]).wait(20)
    assert z[:, 1].tobytes() == first.tobytes()
    before = comm.exscan_async(x, op=cc.MAX).wait(20)
    assert (before is None) == (comm.rank == 0)


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_results_are_of_the_kind_that_was_given(comm, kind):
    library = installed(kind)
    make = library.tensor if kind == "torch" else library.numpy.array
    x = make([1.0 + comm.rank, 2.0])
    got = comm.scan(x)
    assert type(got) is type(x)
    n = comm.rank + 1
    assert got.tolist() == [n * (n + 1) / 2, 2 * n]
    before = comm.exscan(x)
    assert before is None if comm.rank == 0 else type(before) is type(x)


@pytest.mark.several
def test_what_differs_is_an_error_everywhere(comm):
    last = comm.rank == comm.size - 1
    with pytest.raises(cc.MismatchError, match="op"):
        comm.scan([1.0], op=cc.MAX if last else cc.SUM)
    with pytest.raises(cc.MismatchError, match="shape"):
        comm.scan(np.ones(2 + last))
    with pytest.raises(cc.MismatchError, match="scan"):
        comm.exscan(1) if last else comm.scan(1)
    with pytest.raises(TypeError if last else cc.MismatchError, match="cannot be sent"):
        comm.scan(["text"] if last else [1.0])
    assert comm.scan(1) == comm.rank + 1


def test_objects_are_gathered_and_scattered(comm):
    last = comm.size - 1
    for root in {0, last}:
        for length in (1, 5000):
            obj = {"rank": comm.rank, "rows": list(range(length * (comm.rank + 1)))}
            got = comm.gather_object(obj, root)
            if comm.rank == root:
                assert [one["rank"] for one in got] == list(range(comm.size))
                assert [len(one["rows"]) for one in got] == [
                    length * (rank + 1) for rank in range(comm.size)
                ]
                objs = [(rank, "x" * length * rank) for rank in range(comm.size)]
            else:
                assert got is None
                objs = None
            assert comm.scatter_object(objs, root) == (comm.rank, "x" * length * comm.rank)
            if comm.rank == root:
                assert comm.scatter_object(objs, root) is objs[root]
            else:
                comm.scatter_object(None, root)
    wrong = ValueError if comm.rank == 0 else cc.MismatchError
    with pytest.raises(wrong, match=f"scatter_object: expected an object for each of {comm.size}"):
        comm.scatter_object([1] * (comm.size + 1) if comm.rank == 0 else None)
    with pytest.raises(ValueError, match="gather_object: no such root"):
        comm.gather_object(1, comm.size)
    assert comm.allreduce(1.0) == 1
