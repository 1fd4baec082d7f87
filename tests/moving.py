"""Arrays that can be moved but not reduced, and the operations that move them."""

import ml_dtypes
import numpy as np

import strategies

__all__ = ["DTYPES", "assert_moved", "data"]

_STRUCTURED = [("id", "<i4"), ("name", "<U3"), ("at", "<M8[s]"), ("box", "<f4", (2,))]
DTYPES = {  # can be moved, but not reduced
    "float8": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8 with a long name": np.dtype(ml_dtypes.float8_e4m3b11fnuz),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int4": np.dtype(ml_dtypes.int4),
    "longdouble": np.dtype(np.longdouble),
    "datetime64": np.dtype("M8[ms]"),
    "timedelta64": np.dtype("m8[D]"),
    "text": np.dtype("U3"),
    "bytes": np.dtype("S5"),
    "void": np.dtype("V7"),
    "structured": np.dtype(_STRUCTURED),
    "with gaps": np.dtype([("a", "i1"), ("b", ml_dtypes.bfloat16), ("c", "f8")], align=True),
}


def data(rank, shape, dtype):
    """The input of a rank."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape) % 5 + rank
    if dtype.names:
        array = np.zeros(shape, dtype)
        for name in dtype.names:
            field = array[name]
            field[...] = data(rank, field.shape, field.dtype)
        return array
    if dtype.kind == "V" and dtype.num < 256:
        return np.ascontiguousarray(numbers.astype("U1")).astype("S7").view(dtype)
    return numbers.astype(dtype)


def _calls(comm, xs):
    """Each operation that moves rows, with its result and the expected result."""
    rank, last, x = comm.rank, comm.size - 1, xs[comm.rank]
    joined = np.concatenate(xs)
    shares = [
        np.concatenate([np.array_split(a, comm.size)[r] for a in xs]) for r in range(last + 1)
    ]
    yield "broadcast", comm.broadcast(x, last), xs[last]
    yield "allgather", comm.allgather(x), joined
    yield "gather", comm.gather(x, last), joined if rank == last else None
    yield "alltoall", comm.alltoall(x), shares[rank]
    own = np.array_split(xs[last], comm.size)[rank]
    yield "scatter", comm.scatter(x if rank == last else None, last), own
    yield "broadcast_async", comm.broadcast_async(x, last).wait(), xs[last]
    yield "allgather_async", comm.allgather_async(x).wait(), joined
    yield "grouped_broadcast", comm.grouped_broadcast([rank, x], last)[1], xs[last]
    yield "grouped_allgather", comm.grouped_allgather([x, rank])[0], joined
    tree = {"w": x.copy(), "x": rank}
    yield "parameters", strategies.broadcast_parameters(tree, last, comm=comm)["w"], xs[last]
    yield "plan_broadcast", comm.plan_broadcast(x.copy(), last)(), xs[last]
    yield "plan_allgather", comm.plan_allgather(x.copy())(), joined
    for algorithm in ("tree", "ring"):
        yield algorithm, comm.broadcast(x, algorithm=algorithm), xs[0]
    if comm.size > 1:
        right, left = (rank + 1) % comm.size, (rank - 1) % comm.size
        yield "sendrecv", comm.sendrecv(x, right, left), xs[left]
        request = comm.isend(x, right)
        yield "recv", comm.recv(left, out=np.empty_like(x)), xs[left]
        request.wait()
    place = x.copy()
    assert comm.broadcast(place, last, out=place) is place
    yield "in place", place, xs[last]
    yield "out of broadcast", comm.broadcast(x, out=np.empty_like(x)), xs[0]
    yield "out of allgather", comm.allgather(x, out=np.empty_like(joined)), joined
    yield "out of alltoall", comm.alltoall(x, out=np.empty_like(shares[rank])), shares[rank]
    out = np.empty_like(own)
    yield "out of scatter", comm.scatter(x if rank == last else None, last, out=out), own


def assert_moved(comm, shape, dtype):
    """Move arrays of all ranks by every operation: first calls, then repeated calls."""
    for step in range(2):
        xs = [data(rank + step, shape, dtype) for rank in range(comm.size)]
        for operation, result, expected in _calls(comm, xs):
            if expected is None:
                assert result is None
                continue
            assert result.dtype == dtype, operation
            np.testing.assert_array_equal(result, expected, operation)
