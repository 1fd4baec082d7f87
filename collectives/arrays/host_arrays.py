"""Arguments as host memory, and results in the kind and shape of the argument.

Algorithms accept only one-dimensional, contiguous, writable NumPy arrays. This module converts all
other arguments: device arrays, other libraries, strides, read-only memory, numbers and `out=`.
`collectives.arrays.adapters` has the knowledge about other libraries.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.arrays import adapters
from collectives.arrays.adapter import ArrayAdapter, overlap_reason
from collectives.arrays.dtypes import NUMBERS, can_move

__all__ = [
    "ALLOCATE",
    "Array",
    "HostArgument",
    "RowsOut",
    "address",
    "host_view",
    "check_out",
    "check_out_rows",
    "flat",
    "flat_copy",
    "flat_target",
    "in_order_of",
    "raw_bytes",
    "output",
    "copy_to",
    "identity",
]

Array = npt.NDArray[Any]

# Errors of libraries that cannot export an array: sparse, deleted, traced, on two devices.
_REFUSALS = (AttributeError, BufferError, LookupError, RuntimeError, TypeError, ValueError)


class HostArgument(NamedTuple):
    """A caller's array during one call.

    Attributes:
        host: elements in host memory, any strides; read-only, because they may be the caller's own
            memory.
        target: host memory for a result of the same shape and dtype, may be `host`; None for new
            memory.
        restore: converts a host result of any shape into the return value: an array of the kind and
            on the device of the argument, or the caller's `out`.
    """

    host: Array
    target: Array | None
    restore: Callable[[Array], Any]


class RowsOut(NamedTuple):
    """A caller's `out=` for a number of rows that is known only after an exchange.

    Attributes:
        number: rows of `out`; -1 without `out`, for new memory.
        target: as in `HostArgument`.
        restore: as in `HostArgument`.
    """

    number: int
    target: Array | None
    restore: Callable[[Array], Any]


def host_view(x: Any, out: Any = None, *, operation: str) -> HostArgument:
    """Return an array of any kind as host memory, with the conversion of the result.

    Args:
        x: an array of NumPy, PyTorch, JAX, CuPy or another library (see
            `collectives.arrays.adapters`), a number, or a nested sequence of numbers. Any strides,
            on the host or on a device.
        out: the caller's array for the result, of the shape and dtype of `x`; may be `x` itself.
        operation: name of the operation, for errors.

    Returns:
        The host memory, see `HostArgument`. The result for a number or a sequence is a NumPy array.

    Raises:
        TypeError: the elements cannot be read or moved (`collectives.arrays.dtypes`), or `out`
            cannot be written or has another dtype.
        ValueError: `out` has another shape, or is read-only.

    Cost: memory is shared if the kind allows it; device arrays are copied once, to pinned memory.
    """
    if type(x) is np.ndarray and x.dtype in NUMBERS:  # 0.3 us; other kinds take several us
        borrowed = HostArgument(x, None, identity)
    else:
        borrowed = _lend(x, operation)
    if out is None:
        return borrowed
    target, write = check_out(out, borrowed.host.shape, borrowed.host.dtype, operation=operation)
    # `out` and `x` are the same NumPy array or tensor.
    if out is x and target is not None:
        target = borrowed.host  # the same object, so that later code skips the copy
    elif out is x:
        # The adapter of `x` decides whether its memory may hold the result.
        target = borrowed.target
    return HostArgument(borrowed.host, target, write)


def check_out(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], *, operation: str
) -> tuple[Array | None, Callable[[Array], Any]]:
    """Check that a caller's `out=` can hold a result, and return how to write it.

    Returns:
        The memory of `out` if it is writable host memory, else None; and a function that takes the
        finished result, in that memory or elsewhere, and returns `out`.

    Raises:
        TypeError: `out` is not an array, is immutable, or has another dtype.
        ValueError: `out` has another shape, or is read-only.
    """
    _, target, give_back = _borrow_out(out, shape, dtype, operation)
    return target, give_back


def check_out_rows(
    out: Any, row: tuple[int, ...], dtype: np.dtype[Any], lent: HostArgument, *, operation: str
) -> RowsOut:
    """Check `out=` as `check_out` does, for a result with any number of rows.

    Args:
        out: the caller's argument; None returns the result as the result of `lent`.
        row: shape of a row.
        dtype: dtype of the result.
        lent: the array argument of the same call.
        operation: name of the operation, for errors.
    """
    if out is None:
        # The kind of the result is that of the array argument.
        return ALLOCATE._replace(restore=lent.restore)
    shape, target, give_back = _borrow_out(out, (None, *row), dtype, operation)
    return RowsOut(shape[0], target, give_back)


def _borrow_out(
    out: Any, shape: tuple[int | None, ...], dtype: np.dtype[Any], operation: str
) -> tuple[tuple[int, ...], Array | None, Callable[[Array], Any]]:
    """Check as `check_out`, and return also the shape of `out`; None in `shape` fits any number."""
    # NumPy arrays need no adapter, which takes several us.
    memory = None if type(out) is np.ndarray else _recognise(out, operation)
    if memory is None:
        if not isinstance(out, np.ndarray):
            raise TypeError(
                f"{operation}: out must be a tensor, a device array or a NumPy array, "
                f"got {_kind(out)}"
            )
        _check_fit(out, shape, dtype, operation)
        if not out.flags.writeable:
            raise ValueError(f"{operation}: out is read-only")
        # Contiguous arrays need no check, which takes 2 us.
        if not out.flags.c_contiguous:
            _check_writable(out, overlap_reason(out.shape, out.strides, out.itemsize), operation)
        # `np.asarray` drops subclasses, whose assignment may have side effects.
        return out.shape, np.asarray(out), lambda _: out
    _check_writable(out, memory.why_constant(), operation)
    _check_fit(memory, shape, dtype, operation)

    def give_back(result: Array) -> Any:
        memory.write(result)
        return out

    # Shared memory is written directly; otherwise `write` copies the result.
    return memory.shape, memory.elements() if memory.shared else None, give_back


def _check_writable(out: Any, why: str | None, operation: str) -> None:
    if why is not None:
        raise TypeError(
            f"{operation}: out cannot be written, since {why}; leave `out` away and take the "
            f"result (out: {_kind(out)})"
        )


def flat_copy(array: Array, out: Array | None, dtype: np.dtype[Any]) -> Array:
    """Return a copy of `array` in the working buffer of an algorithm.

    The memory of `out` is the buffer if it is contiguous, aligned (mpi4py requires that) and of the
    right dtype, so an in-place call copies nothing.

    Args:
        array: shape (...), any strides.
        out: array for the result, of the shape of `array`, or None.
        dtype: dtype of the algorithm.

    Returns:
        shape (array.size,), contiguous, writable.
    """
    # `carray`: C-contiguous, aligned and writable.
    if out is not None and out.flags.carray and out.dtype == dtype:
        if out is not array:
            np.copyto(out, array)
        return out.reshape(-1)
    flat = np.empty(array.size, dtype)
    # In the shape of the array, so that any strides are copied in one pass.
    flat.reshape(array.shape)[...] = array
    return flat


def flat(array: Array) -> Array:
    """Return a flat view of an array, or a flat copy if its strides allow no view."""
    return np.ascontiguousarray(array).reshape(-1)


def flat_target(result: Array, source: Array | None = None) -> Array:
    """Return flat memory for a result: the memory of `result` if it is contiguous.

    The algorithm reads `source` while it writes the result, so the two must be equal or disjoint.
    """
    if result.flags.c_contiguous:
        # `source` is read while the result is written: equal arrays are fine, shifted ones are not.
        if source is None or result is source or not np.may_share_memory(result, source):
            return result.reshape(-1)
        if source.flags.c_contiguous and address(result) == address(source):
            return result.reshape(-1)
    return np.empty(result.size, result.dtype)


def output(
    target: Array | None,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    source: Array | None,
    before: int | None = None,
) -> tuple[Array, Array]:
    """Return memory for a result, and flat memory to compute it in, the same if possible.

    Args:
        target: memory of the caller's `out`; None for new memory.
        shape: shape of the result and the target.
        dtype: dtype of the result and the target.
        source: flat array that is read during the computation; None if none is.
        before: offset in bytes at which `source` may be a part of the result: these bytes are
            overwritten with equal values, or after they were read. None if overlap is not allowed.
    """
    if target is None:
        result = np.empty(shape, dtype)
        return result, result.reshape(-1)
    if source is None or not np.may_share_memory(target, source):
        return target, flat_target(target)
    # Allowed overlap: the source is a known part of the result.
    if before is not None and address(target) + before == address(source):
        return target, flat_target(target)
    return target, np.empty(target.size, dtype)


def copy_to(flat: Array, out: Array) -> Array:
    """Copy an algorithm's flat result into `out`, in its shape and dtype; return `out`."""
    # Shared memory alone is not enough: the offset or the order of the elements may differ.
    is_there = (
        flat.flags.c_contiguous
        and out.flags.c_contiguous
        and flat.dtype == out.dtype
        and address(flat) == address(out)
    )
    if not is_there:
        with np.errstate(all="ignore"):  # as in `reduction.ignore_float_errors`
            out[...] = flat.reshape(out.shape)
    return out


def address(array: Array) -> int:
    """Return the address of a contiguous array."""
    try:
        # By a ctypes object at the address, which is faster than NumPy's attributes.
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]  # 0.2 us
    except (TypeError, ValueError):  # read-only, empty, or bfloat16: 0.9 us
        return int(array.__array_interface__["data"][0])


def in_order_of(array: Array, result: Array) -> Array:
    """Return `result` with the memory order of `array`, as with NumPy's `order="K"`."""
    if array.ndim < 2 or array.flags.c_contiguous:
        return result
    # `empty_like` keeps the order of axes ("K").
    made = np.empty_like(array, result.dtype)
    made[...] = result
    return made


def raw_bytes(array: Array) -> Array:
    """View a contiguous array as bytes: shape (array.nbytes,), uint8, the same memory."""
    return array.reshape(-1).view(np.uint8)


def identity(result: Array) -> Array:
    """Return the result unchanged."""
    return result


# Without `out`: the result is new memory.
ALLOCATE = RowsOut(-1, None, identity)


def _lend(x: Any, operation: str) -> HostArgument:
    """Return the host view of an argument that is not a native NumPy array, without `out`."""
    memory = _recognise(x, operation)
    if memory is not None:  # check before a copy from a device
        _check_dtype(memory.dtype, x, operation)
    try:
        # Numbers and lists become arrays here.
        host = np.asarray(x) if memory is None else memory.elements()
    except _REFUSALS as error:
        raise _unreadable(x, operation, error) from error
    _check_dtype(host.dtype, x, operation)
    # Algorithms compute in native byte order.
    if not host.dtype.isnative:
        # One conversion here, instead of one in each rank's loops.
        host = host.astype(host.dtype.newbyteorder("="))
    if memory is None:
        return HostArgument(host, None, identity)
    # Private memory may hold the result; other memory must stay unchanged.
    return HostArgument(host, host if memory.private else None, memory.wrap)


def _recognise(x: Any, operation: str) -> ArrayAdapter | None:
    """Return the adapter of an array of another library; None if NumPy reads the array itself."""
    # Before the general test: a masked array is a NumPy array.
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{operation}: a masked array would lose its mask, expected x.filled(...) or x.data"
        )
    if isinstance(x, (np.ndarray, np.generic)):  # these also support the protocols
        return None
    # Any library error becomes a TypeError with the operation's name.
    try:
        return adapters.adapter_for(x)
    except _REFUSALS as error:
        raise _unreadable(x, operation, error) from error


def _unreadable(x: Any, operation: str, error: Exception) -> TypeError:
    return TypeError(
        f"{operation}: the elements of this {_kind(x)} cannot be read{_remedy(x)}: {error}"
    )


def _remedy(x: Any) -> str:
    """Return a hint for an unreadable array: operations or functions that accept it."""
    # SciPy and torch: sparse arrays have no dense memory.
    if "sparse" in str(getattr(x, "layout", "")) or hasattr(x, "tocsr"):
        return "; sparse_allreduce adds up rows of sparse arrays"
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.core.Tracer):
        return (
            " while JAX traces; inside of jax.jit use the operations of strategies.jax, such as "
            "strategies.jax.allreduce"
        )
    return ""


def _kind(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__name__}".removeprefix("builtins.")


def _check_dtype(dtype: np.dtype[Any], x: Any, operation: str) -> None:
    is_array = hasattr(x, "dtype")
    # A list of strings has a dtype that moves, but was most likely a mistake.
    if can_move(dtype) and (is_array or dtype in NUMBERS):
        return
    expected = "elements without references" if is_array else "an array, or numbers"
    remedy = _remedy(x) or (
        "; broadcast_object, gather_object, allgather_object and send_object take any object"
    )
    raise TypeError(
        f"{operation}: this dtype cannot be sent, expected {expected}, got {dtype} "
        f"(x: {_kind(x)}){remedy}"
    )


def _check_fit(
    out: Array | ArrayAdapter,
    shape: tuple[int | None, ...],
    dtype: np.dtype[Any],
    operation: str,
) -> None:
    if out.dtype != dtype:
        raise TypeError(f"{operation}: out has the wrong dtype, expected {dtype}, got {out.dtype}")
    if out.shape == shape:
        return
    # None fits any number of rows.
    if None in shape and len(out.shape) == len(shape) and out.shape[1:] == shape[1:]:
        return
    wanted = str(shape).replace("None", "rows")
    raise ValueError(f"{operation}: out has the wrong shape, expected {wanted}, got {out.shape}")
