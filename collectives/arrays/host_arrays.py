"""Arguments as host memory, and results in the kind and shape of the argument.

Algorithms work on one kind of thing only: a one-dimensional, contiguous, writable NumPy array.
This module is the border: devices, other libraries, strides, read-only memory, numbers and `out=`
end here. What is known of other libraries is in `collectives.arrays.adapters`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.arrays import adapters
from collectives.arrays.adapter import ArrayAdapter
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

# What a library raises when it cannot show its elements: sparse, deleted, traced, on two devices.
_REFUSALS = (AttributeError, BufferError, LookupError, RuntimeError, TypeError, ValueError)


class HostArgument(NamedTuple):
    """A caller's array for the time of one call.

    Attributes:
        host: the elements in host memory, any strides, perhaps read-only, perhaps the caller's own
            memory: to be read only.
        target: host memory for a result of the same shape and dtype, which may be `host` itself;
            None: the result goes to new memory.
        restore: makes of a host result, of any shape, what the caller gets: an array of the kind
            and on the device of the one that was borrowed, or the caller's `out`.
    """

    host: Array
    target: Array | None
    restore: Callable[[Array], Any]


class RowsOut(NamedTuple):
    """A caller's `out=` for rows of which ranks find out as they meet how many there are.

    Attributes:
        number: how many it takes; any number if -1, for new memory.
        target: as of `HostArgument`.
        restore: as of `HostArgument`.
    """

    number: int
    target: Array | None
    restore: Callable[[Array], Any]


def host_view(x: Any, out: Any = None, *, operation: str) -> HostArgument:
    """Bring an array of any kind to the host, and remember how a result goes back.

    Args:
        x: an array of NumPy, PyTorch, JAX, CuPy or another library (see
            `collectives.arrays.adapters`), a number, or a nested sequence of numbers. Any strides,
            on the host or on a device.
        out: where the caller wants the result, of the shape and dtype of `x`, perhaps `x` itself.
        operation: the caller's name, for the error message.

    Returns:
        What algorithms can read, see `HostArgument`. A result for a number or a sequence is a NumPy
        array.

    Raises:
        TypeError: the elements cannot be read or moved (`collectives.arrays.dtypes`), or `out`
            cannot be written or has another dtype.
        ValueError: `out` has another shape, or is read-only.

    Cost: memory is shared where the kind allows; arrays on a device are copied once, to pinned
        memory.
    """
    if type(x) is np.ndarray and x.dtype in NUMBERS:  # 0.3 us; every other kind takes some us
        borrowed = HostArgument(x, None, identity)
    else:
        borrowed = _lend(x, operation)
    if out is None:
        return borrowed
    target, write = check_out(out, borrowed.host.shape, borrowed.host.dtype, operation=operation)
    if out is x and target is not None:
        target = borrowed.host  # the same memory, and known to be: nothing has to be copied
    elif out is x:
        target = borrowed.target
    return HostArgument(borrowed.host, target, write)


def check_out(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], *, operation: str
) -> tuple[Array | None, Callable[[Array], Any]]:
    """Check that a caller's `out=` can take a result, and tell how it gets there.

    Returns:
        The memory of `out` where it is host memory that can be written, else None; and a function
        that takes the finished result, in that memory or elsewhere, and returns `out`.

    Raises:
        TypeError: `out` is not an array, is immutable, or has another dtype.
        ValueError: `out` has another shape, or is read-only.
    """
    _, target, give_back = _borrow_out(out, shape, dtype, operation)
    return target, give_back


def check_out_rows(
    out: Any, row: tuple[int, ...], dtype: np.dtype[Any], lent: HostArgument, *, operation: str
) -> RowsOut:
    """As `check_out`, for a result of any number of rows.

    Args:
        out: the caller's; None if there is none, so that the result goes back as that of `lent`.
        row: the shape of a row.
        dtype: of the result.
        lent: the array of the same call.
        operation: the caller's name.
    """
    if out is None:
        return ALLOCATE._replace(restore=lent.restore)
    shape, target, give_back = _borrow_out(out, (None, *row), dtype, operation)
    return RowsOut(shape[0], target, give_back)


def _borrow_out(
    out: Any, shape: tuple[int | None, ...], dtype: np.dtype[Any], operation: str
) -> tuple[tuple[int, ...], Array | None, Callable[[Array], Any]]:
    """As `check_out`, and return the shape of `out`, of which None is any number."""
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
        return out.shape, np.asarray(out), lambda _: out
    why = memory.why_constant()
    if why is not None:
        raise TypeError(
            f"{operation}: out cannot be written, since {why}; leave `out` away and take the "
            f"result (out: {_kind(out)})"
        )
    _check_fit(memory, shape, dtype, operation)

    def give_back(result: Array) -> Any:
        memory.write(result)
        return out

    return memory.shape, memory.elements() if memory.shared else None, give_back


def flat_copy(array: Array, out: Array | None, dtype: np.dtype[Any]) -> Array:
    """Copy `array` into the buffer that an algorithm will work in.

    The memory of `out` serves where it is contiguous, aligned (mpi4py knows no other floats) and of
    the right dtype, so that an in-place call copies nothing.

    Args:
        array: shape (...), any strides.
        out: where the result is wanted, of the shape of `array`, or None.
        dtype: the dtype that the algorithm computes in.

    Returns:
        shape (array.size,), contiguous, writable.
    """
    if out is not None and out.flags.carray and out.dtype == dtype:
        if out is not array:
            np.copyto(out, array)
        return out.reshape(-1)
    flat = np.empty(array.size, dtype)
    flat.reshape(array.shape)[...] = array
    return flat


def flat(array: Array) -> Array:
    """View an array as a flat one, or copy it into one where its strides do not allow that."""
    return np.ascontiguousarray(array).reshape(-1)


def flat_target(result: Array, source: Array | None = None) -> Array:
    """Return flat memory for a result: its own if that is contiguous.

    A source, which is read while the result is written, has to be the same memory or other memory.
    """
    if result.flags.c_contiguous:
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
    """Return memory for a result, and flat memory to make it in, the same where that is possible.

    Args:
        target: the memory of the caller's `out`; None for new memory.
        shape: of the result, and of the target.
        dtype: likewise.
        source: what is read meanwhile, flat; None if nothing.
        before: the bytes after which the source lies in the result where it may, since there it is
            written as it is, or after it was read; None if it may not.
    """
    if target is None:
        result = np.empty(shape, dtype)
        return result, result.reshape(-1)
    if source is None or not np.may_share_memory(target, source):
        return target, flat_target(target)
    if before is not None and address(target) + before == address(source):
        return target, flat_target(target)
    return target, np.empty(target.size, dtype)


def copy_to(flat: Array, out: Array) -> Array:
    """Put an algorithm's flat result into `out`, in its shape and dtype; returns `out`."""
    # To share memory is not enough: elements may lie elsewhere in it, or in another order.
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
    """Return where a contiguous array begins in memory."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]  # 0.2 us
    except (TypeError, ValueError):  # read-only, empty, or bfloat16: 0.9 us
        return int(array.__array_interface__["data"][0])


def in_order_of(array: Array, result: Array) -> Array:
    """Return `result` with the memory order of `array`, as with NumPy's `order="K"`."""
    if array.ndim < 2 or array.flags.c_contiguous:
        return result
    made = np.empty_like(array, result.dtype)
    made[...] = result
    return made


def raw_bytes(array: Array) -> Array:
    """View a contiguous array as bytes: shape (array.nbytes,), uint8, the same memory."""
    return array.reshape(-1).view(np.uint8)


def identity(result: Array) -> Array:
    """Give a result back as it is."""
    return result


# No `out`: the result goes to new memory.
ALLOCATE = RowsOut(-1, None, identity)


def _lend(x: Any, operation: str) -> HostArgument:
    """Borrow what is not a native NumPy array, for a call without `out`."""
    memory = _recognise(x, operation)
    if memory is not None:  # before anything is copied from a device
        _check_dtype(memory.dtype, x, operation)
    try:
        host = np.asarray(x) if memory is None else memory.elements()
    except _REFUSALS as error:
        raise _unreadable(x, operation, error) from error
    _check_dtype(host.dtype, x, operation)
    if not host.dtype.isnative:
        host = host.astype(host.dtype.newbyteorder("="))
    if memory is None:
        return HostArgument(host, None, identity)
    return HostArgument(host, host if memory.private else None, memory.wrap)


def _recognise(x: Any, operation: str) -> ArrayAdapter | None:
    """Recognise an array of another library; None for what NumPy reads itself."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{operation}: a masked array would lose its mask, expected x.filled(...) or x.data"
        )
    if isinstance(x, (np.ndarray, np.generic)):  # speak all protocols, too
        return None
    try:
        return adapters.adapter_for(x)
    except _REFUSALS as error:
        raise _unreadable(x, operation, error) from error


def _unreadable(x: Any, operation: str, error: Exception) -> TypeError:
    return TypeError(
        f"{operation}: the elements of this {_kind(x)} cannot be read{_remedy(x)}: {error}"
    )


def _remedy(x: Any) -> str:
    """Name the operations that accept an array whose elements cannot be read."""
    if "sparse" in str(getattr(x, "layout", "")) or hasattr(x, "tocsr"):
        return "; sparse_allreduce adds up rows of sparse arrays"
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.core.Tracer):
        return (
            " while JAX traces; inside of jax.jit use strategies.DistributedOptimizer for "
            "gradients, else jax.experimental.io_callback with ordered=True"
        )
    return ""


def _kind(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__name__}".removeprefix("builtins.")


def _check_dtype(dtype: np.dtype[Any], x: Any, operation: str) -> None:
    is_array = hasattr(x, "dtype")
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
    if None in shape and len(out.shape) == len(shape) and out.shape[1:] == shape[1:]:
        return
    wanted = str(shape).replace("None", "rows")
    raise ValueError(f"{operation}: out has the wrong shape, expected {wanted}, got {out.shape}")
