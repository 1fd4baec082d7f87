"""What an operation should give, computed slowly from the inputs of all ranks.

The sums, and how far off a result may be, are those that `python -m collectives check` goes by on
every cluster: an error in them would be one of the product. Which op has a meaning for which dtype
is said here once more, apart from the product's own table.
"""

import functools

import numpy as np

import collectives as cc
from collectives.arrays.device import BFLOAT16
from collectives.tools import oracle
from collectives.tools.oracle import reduced

__all__ = [
    "BFLOAT16", "BOOL", "DTYPES", "FLOATS", "assert_close", "data", "is_defined", "joined",
    "reduced",
]  # fmt: skip

DTYPES = list(oracle.DTYPES.values())
FLOATS = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
BOOL = np.dtype(bool)


def is_defined(op, dtype):
    """Whether the op has a meaning for the dtype: the table of `collectives.arrays.reduction`."""
    if op.value.startswith("LOGICAL"):
        return True
    if op.value.startswith("BITWISE"):
        return dtype.kind in "biu"
    if op is cc.INTEGER_MEAN:
        return dtype.kind in "iu"
    if dtype.kind in "iu":
        return op is not cc.MEAN
    if dtype == BOOL:
        return op in (cc.MIN, cc.MAX)
    if dtype.kind == "c":
        return op in (cc.SUM, cc.MEAN, cc.PRODUCT)
    return True


def data(rank, shape, dtype):
    """The array that a rank brings; every rank and every element has its own value."""
    return _data(rank, tuple(shape), dtype).copy()


# Every rank makes the arrays of all ranks, most of them again for each root and each call.
@functools.lru_cache(maxsize=256)
def _data(rank, shape, dtype):
    random = np.random.default_rng([rank, *shape])
    if dtype == BOOL:
        return np.asarray(random.integers(0, 2, shape)).astype(bool)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return np.asarray(random.integers(info.min, info.max, shape, dtype, endpoint=True))
    values = random.uniform(0.5, 2.0, shape) * random.choice([-1, 1], shape)
    if dtype.kind == "c":
        values = values * np.exp(1j * random.uniform(0, 6, shape))
    return np.asarray(values).astype(dtype)


def assert_close(result, arrays, op):
    """Compare a result with the exact one."""
    exact = reduced(arrays, op)
    assert result.dtype == arrays[0].dtype
    problem = oracle.mismatch(result, exact)
    assert problem is None, problem


def joined(ranks, join=np.concatenate):
    """Steps of one process that has the rows of all ranks."""
    return [tuple(map(join, zip(*step, strict=True))) for step in zip(*ranks, strict=True)]
