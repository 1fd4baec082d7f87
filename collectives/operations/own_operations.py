"""Reduction operations of the user: functions of two numbers, compiled into the loops of all ops.

    largest = collectives.operation(lambda a, b: a if abs(a) > abs(b) else b, commutative=False)

The digest of the function is in the name of its op. So ranks with other functions differ in the
comparison of their calls, and `kernels.machine_code` caches the loops on disk as it does for all
ops.

Checks, before the first reduction of a dtype: all triples of samples a, b, c must give f(f(a, b),
c) = f(a, f(b, c)), all pairs f(a, b) = f(b, a) if the order is said to be free, and all samples
f(identity, a) = f(a, identity) = a. Integers must be equal. Floats may differ by 32 units in the
last place of the largest operand or result; two NaNs are equal.

Cost: a loop of two functions is compiled in 0.3 to 1 s, and read from the cache later. A reduction
takes the time of the function for each element, and no longer otherwise than with a predefined op.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import threading
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import numpy as np

from collectives.arrays.host_arrays import Array, address
from collectives.arrays.reduction import (
    OWN_FUNCTIONS,
    RULES,
    Op,
    OpSpec,
    OwnSpec,
    ignore_float_errors,
    work_dtype,
)
from collectives.kernels import machine_code

__all__ = ["operation"]

_OPS: dict[str, Op] = {}
_lock = threading.Lock()

# Rounding errors of two applications of a function, in units of the last place: a sum of products
# has five roundings, and a library function may be wrong by a few units.
_ULPS = 32


def operation(
    function: Callable[[Any, Any], Any],
    *,
    commutative: bool = True,
    identity: complex | None = None,
    samples: Sequence[Any] | None = None,
) -> Op:
    """Return a reduction operation made of a function of two numbers, for `op=`.

    As if NumPy applied the function to all elements, in a fixed order of ranks. It is available to
    all reductions, and to `scan` and `exscan`, for float, complex and integer arrays on the host;
    arrays on a device are reduced on the host. 16-bit floats are computed in float32.

    Args:
        function: f(a, b), a Python function that numba can compile; it must be associative, and
            must not raise. It may call functions of `math` and of `numpy`.
        commutative: whether f(a, b) = f(b, a). False combines in rank order, by messages along a
            tree; `algorithm` must then be "auto" or "node".
        identity: number e with f(e, a) = f(a, e) = a, the result of `exscan` on rank 0.
        samples: numbers for the checks; None draws large and small ones. Pass those of your data if
            the function is associative for a part of all numbers only.

    Returns:
        the op; the same one for the same function. The ranks must call with equal functions.

    Raises:
        TypeError: `function` is not a Python function, or uses an object as a constant.
        ImportError: numba is not installed.
        TypeError, in the first reduction of a dtype: numba cannot compile the function for it.
        ValueError, in the first reduction of a dtype: the function is not associative, or not
            commutative, or the identity is none; with the numbers that show it.

    Example:
        >>> import collectives as cc
        >>> comm = cc.init()
        >>> either = cc.operation(lambda a, b: a + b - a * b, identity=0)     # of two probabilities
        >>> comm.allreduce([0.0, 1.0], op=either).tolist()
        [0.0, 1.0]
    """
    # Loads numba, and says how to install it.
    from collectives.kernels import numba_compiler  # noqa: F401
    from collectives.kernels.function_digest import digest_of_function

    function = getattr(function, "py_func", function)  # of a function that numba has compiled
    if not isinstance(function, FunctionType):
        raise TypeError(
            f"operation: expected a Python function of two numbers, such as "
            f"lambda a, b: a if a > b else b, got {function!r}"
        )
    tested = None if samples is None else np.asarray(samples).tolist()
    facts = digest_of_function(function, _constant), bool(commutative), identity, tested
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    with _lock:
        if digest not in _OPS:
            op = Op(f"{function.__name__} ({digest})")
            name = f"own_{digest}"
            OWN_FUNCTIONS[name] = function
            check = functools.cache(functools.partial(_check, op, name, tested))
            own = OwnSpec(check, functools.partial(_combine, name), bool(commutative), identity)
            RULES[op] = OpSpec(name, "", _UNDEFINED, own)
            _OPS[digest] = op
        return _OPS[digest]


_UNDEFINED = {"b": "numba computes integers; cast to uint8"}


def _constant(value: Any) -> bytes:
    """Return the bytes that identify a constant of a function, equal on all ranks."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}".encode() + value.tobytes()
    # Modules, classes and compiled functions count by name.
    name = getattr(value, "__name__", None)
    if value is not None and name is None:
        raise TypeError(
            f"operation: the function uses a constant that ranks cannot compare, expected numbers, "
            f"arrays and functions, got {value!r}"
        )
    return f"{getattr(value, '__module__', None)}.{name}".encode()


def _combine(name: str, accumulator: Array, contribution: Array, before: bool) -> None:
    """Combine flat contiguous arrays in place; `before`: the contribution is the left operand."""
    loop = machine_code.procedure(
        "collectives.kernels.elementwise",
        "behind" if before else "add",
        accumulator.dtype.name,
        name,
        arguments=4,
    )
    loop(address(accumulator), address(contribution), accumulator.size, 0)


def _check(
    op: Op, name: str, samples: list[Any] | None, dtype: np.dtype[Any], operation: str
) -> None:
    """Compile an op for a dtype, and check its function; errors as documented in `operation`."""
    from numba.core.errors import NumbaError

    own = RULES[op].own
    assert own is not None
    work = work_dtype(dtype)

    def apply(first: Array, second: Array) -> Array:
        result: Array = first.copy()
        own.combine(result, second, False)
        return result

    given = _samples(work) if samples is None else np.array(samples, work)
    identity = given[:0] if own.identity is None else np.array([own.identity], work)
    given = np.concatenate([given, identity])
    triples = np.array(list(itertools.product(given, repeat=3)), work).reshape(-1, 3).T
    a, b, c = (np.ascontiguousarray(column) for column in triples)
    try:
        ab, bc = apply(a, b), apply(b, c)
    except NumbaError as error:
        raise TypeError(
            f"{operation}: numba cannot compile {op.value} for {work}: {_reason(name, work)}"
        ) from error
    except RuntimeError as error:
        raise TypeError(
            f"{operation}: {op.value} needs Python, expected a function of numbers that does not "
            f"raise, such as one of math and numpy"
        ) from error

    def require(left: Array, right: Array, law: str, word: str) -> None:
        wrong = np.flatnonzero(~_close(left, right, a, b, c, ab, bc))
        if wrong.size:
            # The shortest numbers, which are the easiest to follow.
            at = min(wrong, key=lambda i: len(f"{a[i]}{b[i]}{c[i]}"))
            numbers = f"a = {a[at]}, b = {b[at]}" + (f", c = {c[at]}" if "c" in law else "")
            raise ValueError(
                f"{operation}: {op.value} is not {word} for {dtype}, expected {law}, got "
                f"{left[at]} and {right[at]} for {numbers}"
            )

    require(apply(ab, c), apply(a, bc), "f(f(a, b), c) = f(a, f(b, c))", "associative")
    if own.commutative:
        require(ab, apply(b, a), "f(a, b) = f(b, a)", "commutative")
    if own.identity is not None:
        e = np.full_like(a, own.identity)
        require(apply(e, a), a, f"f({own.identity}, a) = a", "neutral to its identity")
        require(apply(a, e), a, f"f(a, {own.identity}) = a", "neutral to its identity")


def _reason(name: str, dtype: np.dtype[Any]) -> str:
    """Return the error of numba for a function alone, without the loop around it."""
    import numba
    from numba.core.errors import NumbaError

    try:
        numba.njit(OWN_FUNCTIONS[name]).compile((numba.from_dtype(dtype),) * 2)
    except NumbaError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        # The first line says only in which step numba has failed.
        return next((line for line in lines[1:] if line), lines[0])
    return "the result is not a number of this dtype"


def _samples(dtype: np.dtype[Any]) -> Array:
    """Return small and large numbers of a dtype, the same on all ranks."""
    random = np.random.default_rng(0)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        small = [0, 1, 2, 3] if dtype.kind == "u" else [0, 1, -1, 2, -2]
        large = random.integers(info.min, info.max, 6, dtype, endpoint=True)
        return np.concatenate([np.array([*small, info.min, info.max], dtype), large])
    numbers = np.array([0, 1, -1, 0.5, 2, -2, *random.normal(size=6), *random.normal(0, 30, 3)])
    if dtype.kind == "c":
        numbers = numbers + 1j * random.permutation(numbers)
    return np.asarray(numbers.astype(dtype))


def _close(left: Array, right: Array, *operands: Array) -> Array:
    """Whether results are equal up to rounding, relative to the largest number involved."""
    if left.dtype.kind in "iu":
        return np.asarray(left == right)
    with ignore_float_errors():
        numbers = [np.abs(x) for x in (left, right, *operands)]
        # Infinite operands say nothing about the size of errors.
        scale = np.max([np.where(np.isfinite(x), x, 0) for x in numbers], axis=0)
        near = np.abs(left - right) <= _ULPS * np.finfo(left.dtype).eps * scale
    return np.asarray(near | (left == right) | (np.isnan(left) & np.isnan(right)))
