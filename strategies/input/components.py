"""What a queue element consists of: dtypes, shapes, names, and the check of values on entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from strategies.errors import InvalidArgumentError
from strategies.input.rows import Array, Columns

__all__ = ["Components", "DType", "dtype_of"]

DType = np.dtype[Any] | type[str] | type[bytes]
"""A NumPy dtype of fixed size, or `str` / `bytes` for components that are Python objects."""

_KINDS = "biufcV"  # V: the 16-bit floats of ml_dtypes call themselves void


class Components:
    """The fixed description of a queue's elements, and conversion of values from and to users.

    Args:
        dtypes: one dtype per component, or a single one; `str` and `bytes` for text.
        shapes: one fully known shape per component, or None when elements may differ in shape.
        names: one name per component if elements are dicts, else None.

    Raises:
        ValueError: no dtype, lengths that differ, or a shape that is not fully known.
        TypeError: a dtype that is neither numeric nor `str` or `bytes`.
    """

    def __init__(
        self, dtypes: Any, shapes: Sequence[Sequence[int]] | None, names: Sequence[str] | None
    ) -> None:
        listed = dtypes if isinstance(dtypes, (list, tuple)) else [dtypes]
        self.dtypes: tuple[DType, ...] = tuple(_as_dtype(dtype) for dtype in listed)
        if not self.dtypes:
            raise ValueError("queue: no components, expected at least one dtype, got ()")
        self.shapes = None if shapes is None else tuple(_as_shape(shape) for shape in shapes)
        self.names = None if names is None else tuple(names)
        for what, given in (("shapes", self.shapes), ("names", self.names)):
            if given is not None and len(given) != len(self.dtypes):
                raise ValueError(
                    f"queue: number of {what} differs from that of dtypes, "
                    f"expected {len(self.dtypes)}, got {len(given)}"
                )
        if self.names is not None and len(set(self.names)) != len(self.names):
            raise ValueError(f"queue: names must differ, got {self.names}")
        self._scalars = [_scalar_types(dtype) for dtype in self.dtypes]

    def __len__(self) -> int:
        return len(self.dtypes)

    def storage(self) -> tuple[list[np.dtype[Any]], list[tuple[int, ...]]]:
        """Dtypes and shapes of the arrays that hold rows; unknown shapes are held as objects."""
        objects = np.dtype(object)
        if self.shapes is None:
            return [objects] * len(self), [()] * len(self)
        dtypes = [dtype if isinstance(dtype, np.dtype) else objects for dtype in self.dtypes]
        return dtypes, list(self.shapes)

    def row(self, values: Any) -> tuple[Any, ...]:
        """Check one element and return it as one value per component.

        Values of unknown shape are copied here; others are copied by the store.
        """
        parts = self._split("enqueue", values)
        row = []
        for index, part in enumerate(parts):
            dtype = self.dtypes[index]
            shape = self.shapes[index] if self.shapes is not None else None
            if type(part) is np.ndarray:
                ready = part.dtype == dtype and part.shape == shape
            else:
                ready = not shape and type(part) in self._scalars[index]
            if ready:
                row.append(part)
            else:
                array = _as_array("enqueue", index, part, dtype, copy=shape is None)
                if shape is not None and array.shape != shape:
                    raise _mismatch("enqueue", index, shape, array.shape)
                row.append(array[()])
        return tuple(row)

    def columns(self, values: Any) -> tuple[Columns, int]:
        """Check several elements; return columns as the store holds them, and their number."""
        parts = self._split("enqueue_many", values)
        columns: list[Array] = []
        for index, (part, dtype) in enumerate(zip(parts, self.dtypes, strict=True)):
            column = _as_array("enqueue_many", index, part, dtype, copy=self.shapes is None)
            if column.ndim == 0:
                raise InvalidArgumentError(
                    f"enqueue_many: component {index} is a scalar, "
                    "expected at least one dimension that counts the rows"
                )
            if columns and len(column) != len(columns[0]):
                raise InvalidArgumentError(
                    f"enqueue_many: components must have the same size in dimension 0, "
                    f"expected {len(columns[0])} as in component 0, got {len(column)} "
                    f"(component: {index})"
                )
            # An empty list says nothing about the shape of its rows.
            if self.shapes is not None and column.shape[1:] != self.shapes[index]:
                if column.shape != (0,):
                    raise _mismatch("enqueue_many", index, self.shapes[index], column.shape[1:])
                column = column.reshape((0, *self.shapes[index]))
            columns.append(column)
        count = len(columns[0])
        if self.shapes is None:
            columns = [_boxed_rows(column) for column in columns]
        return tuple(columns), count

    def as_columns(self, row: Sequence[Any]) -> Columns:
        """One row, in the form of several."""
        columns = self.empty(1)
        for column, component in zip(columns, row, strict=True):
            column[0] = component
        return columns

    def empty(self, count: int) -> Columns:
        """Columns for `count` rows, as the store holds them, not filled."""
        dtypes, shapes = self.storage()
        pairs = zip(dtypes, shapes, strict=True)
        return tuple([np.empty((count, *shape), dtype) for dtype, shape in pairs])

    def join(self, pieces: Sequence[Columns]) -> Columns:
        """Several batches as one; an empty one if there are none."""
        if len(pieces) == 1:
            return pieces[0]
        if not pieces:
            return self.empty(0)
        return tuple([np.concatenate(parts) for parts in zip(*pieces, strict=True)])

    def result(self, parts: Sequence[Any]) -> Any:
        """Return components in the form users see: bare if there is one, a tuple, or a dict."""
        if self.names is not None:
            return dict(zip(self.names, parts, strict=True))
        return parts[0] if len(parts) == 1 else tuple(parts)

    def _split(self, operation: str, values: Any) -> Sequence[Any]:
        """The parts of what the user gave, one per component."""
        if self.names is not None:
            if not isinstance(values, Mapping):
                raise ValueError(
                    f"{operation}: the queue has names, so enqueue a dictionary with the keys "
                    f"{sorted(self.names)}, got {type(values).__name__}"
                )
            if set(values) != set(self.names):
                raise ValueError(
                    f"{operation}: keys must match names, expected {sorted(self.names)}, "
                    f"got {sorted(map(str, values))}"
                )
            return [values[name] for name in self.names]
        if isinstance(values, dict):
            raise ValueError(f"{operation}: got a dict, but the queue must have names to take one")
        parts = values if isinstance(values, (list, tuple)) else (values,)
        if len(parts) != len(self.dtypes):
            raise ValueError(
                f"{operation}: number of components, expected {len(self.dtypes)}, "
                f"got {len(parts)}; a list or tuple holds components, "
                "so wrap a value that is a list itself: ([1, 2],)"
            )
        return parts


def dtype_of(values: Any) -> DType:
    """Return the component dtype that holds `values`, an array or something that becomes one."""
    array = np.asarray(values)
    if array.dtype == object and array.size:
        return _as_dtype(type(array.flat[0]))
    return _as_dtype(array.dtype)


def _as_dtype(dtype: Any) -> DType:
    if dtype in (str, bytes):
        return str if dtype is str else bytes
    known = np.dtype(dtype)
    if known.kind in "US":
        return str if known.kind == "U" else bytes
    if known.kind not in _KINDS or known.hasobject or known.names is not None:
        raise TypeError(f"queue: dtype must be numeric, str or bytes, got {dtype!r}")
    native: DType = known.newbyteorder("=")
    return native


def _scalar_types(dtype: DType) -> tuple[type, ...]:
    """The types of scalars that need no conversion before they are stored."""
    if not isinstance(dtype, np.dtype):
        return (dtype,)
    return (dtype.type, float) if dtype.kind == "f" else (dtype.type,)


def _as_shape(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(shape)
    if any(size is None or size < 0 for size in sizes):
        raise ValueError(f"queue: shapes must be fully known, got {list(sizes)}")
    return tuple(int(size) for size in sizes)


def _as_array(operation: str, index: int, value: Any, dtype: DType, *, copy: bool = False) -> Array:
    """`value` as an array of the component's dtype, not converted from one kind to another."""
    if not isinstance(dtype, np.dtype):
        return _as_objects(operation, index, value, dtype, copy=copy)
    try:
        array: Array = np.asarray(value)
    except ValueError as error:
        raise InvalidArgumentError(f"{operation}: component {index} is no array: {error}") from None
    if array.dtype != dtype:
        # Arrays say what they are; Python's numbers and lists of them take the queue's dtype.
        exact = isinstance(value, (np.ndarray, np.generic))
        fits = array.size == 0 or (not exact and np.can_cast(array.dtype, dtype, "same_kind"))
        if not fits:
            raise InvalidArgumentError(
                f"{operation}: dtype of component {index}, expected {dtype}, got {array.dtype}"
            )
        converted = array.astype(dtype)
        if dtype.kind in "iu" and not np.array_equal(converted, array):
            raise InvalidArgumentError(
                f"{operation}: component {index} does not fit {dtype}, got {value!r:.80}"
            )
        return converted
    return array.copy() if copy else array


def _as_objects(
    operation: str, index: int, value: Any, dtype: type[str] | type[bytes], *, copy: bool
) -> Array:
    """`value` as an object array whose elements are exactly `str`, or exactly `bytes`."""
    array = np.array(value, dtype=object, copy=True if copy else None)
    for element in array.flat:
        if type(element) is not dtype:
            if isinstance(element, dtype):  # np.str_ and np.bytes_
                return _as_objects(operation, index, np.array(value).tolist(), dtype, copy=copy)
            raise InvalidArgumentError(
                f"{operation}: dtype of component {index}, expected {dtype.__name__}, "
                f"got {type(element).__name__}"
            )
    return array


def _boxed_rows(column: Array) -> Array:
    """The rows of an array as the elements of an object array."""
    boxes = np.empty(len(column), object)
    for index, row in enumerate(column):
        boxes[index] = row
    return boxes


def _mismatch(
    operation: str, index: int, expected: tuple[int, ...], got: tuple[int, ...]
) -> InvalidArgumentError:
    def form(shape: tuple[int, ...]) -> str:
        return "[" + ",".join(map(str, shape)) + "]"

    return InvalidArgumentError(
        f"{operation}: shape mismatch in component {index}, "
        f"expected {form(expected)}, got {form(got)}"
    )
