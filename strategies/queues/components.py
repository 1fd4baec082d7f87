"""Components of a queue element: dtypes, shapes, names, and their validation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from strategies.core.sparse import fits
from strategies.errors import InvalidArgumentError
from strategies.queues.dtypes import (
    DType,
    as_array,
    as_dtype,
    boxed_rows,
    padded_rows,
    scalar_types,
)
from strategies.queues.store import Array, Columns

__all__ = ["Components", "Shape"]

Shape: TypeAlias = tuple[int | None, ...]
"""Sizes of an element's dimensions; None where elements of a queue may differ."""


class Components:
    """The description of a queue's elements; converts values from and to users.

    Args:
        dtypes: one dtype per component, or a single one; `str` and `bytes` for text.
        shapes: one shape per component; None if elements may differ in shape.
        names: one name per component if elements are dicts, otherwise None.
        padded: whether a dimension may be None: elements may differ there, and batches are padded.
        prioritised: whether to prepend a component of int64 scalars to `dtypes`.

    Raises:
        ValueError: no dtype, different lengths, or a shape that is not fully known.
        TypeError: a dtype is neither numeric nor `str` or `bytes`.

    Attributes:
        dtypes: one per component.
        shapes: one per component, or None.
        names: one per component, or None.
        copies: whether values of variable shape, which the store keeps as objects, are copied on
            entry. Not needed if they leave this process before the call returns.
    """

    copies = True

    def __init__(
        self,
        dtypes: Any,
        shapes: Sequence[Sequence[int | None]] | None,
        names: Sequence[str] | None,
        *,
        padded: bool = False,
        prioritised: bool = False,
    ) -> None:
        listed = dtypes if isinstance(dtypes, (list, tuple)) else [dtypes]
        self.dtypes: tuple[DType, ...] = tuple(as_dtype(dtype) for dtype in listed)
        self.shapes = (
            None if shapes is None else tuple(_as_shape(shape, padded) for shape in shapes)
        )
        if prioritised:
            # An empty list of dtypes is a queue of priorities alone, whose shape is known.
            if not self.dtypes:
                self.shapes = ()
            self.dtypes = (np.dtype(np.int64), *self.dtypes)
            self.shapes = None if self.shapes is None else ((), *self.shapes)
        if not self.dtypes:
            raise ValueError("queue: no components, expected at least one dtype, got ()")
        self.names = None if names is None else tuple(names)
        for what, given in (("shapes", self.shapes), ("names", self.names)):
            if given is not None and len(given) != len(self.dtypes):
                raise ValueError(
                    f"queue: number of {what} differs from that of dtypes, "
                    f"expected {len(self.dtypes)}, got {len(given)}"
                )
        if self.names is not None and len(set(self.names)) != len(self.names):
            raise ValueError(f"queue: names must differ, got {self.names}")
        self._prioritised = prioritised
        # Required shape of each component; None accepts any.
        self._wanted: list[Shape | None] = list(self.shapes or [None] * len(self.dtypes))
        if prioritised:
            # A priority is a scalar even if the shapes are unknown.
            self._wanted[0] = ()
        # Components of variable shape are stored as objects.
        self._boxed = [shape is None or None in shape for shape in self._wanted]
        self._scalars = [scalar_types(dtype) for dtype in self.dtypes]
        # The most common elements, a bare scalar or array of the right dtype, need no conversion.
        alone = len(self.dtypes) == 1 and not self.names and not self._boxed[0]
        self._bare_types = self._scalars[0] if alone and self._wanted == [()] else ()
        self._bare_shape = self._wanted[0] if alone else None

    def __len__(self) -> int:
        return len(self.dtypes)

    def storage(self) -> tuple[list[np.dtype[Any]], list[tuple[int, ...]]]:
        """Return dtypes and shapes of the arrays that hold rows; objects for unknown shapes."""
        objects = np.dtype(object)
        dtypes = [
            # Text has no fixed size, so it is stored as objects.
            dtype if isinstance(dtype, np.dtype) and not boxed else objects
            for dtype, boxed in zip(self.dtypes, self._boxed, strict=True)
        ]
        shapes = [tuple(size for size in shape or () if size is not None) for shape in self._wanted]
        pairs = zip(shapes, self._boxed, strict=True)
        return dtypes, [() if boxed else shape for shape, boxed in pairs]

    def row(self, values: Any) -> tuple[Any, ...]:
        """Check one element and return one value per component.

        Values of unknown shape are copied here; the store copies all others.
        """
        if type(values) is np.ndarray:
            # The exact type: a subclass, such as a masked array, takes the slow path.
            if values.shape == self._bare_shape and values.dtype == self.dtypes[0]:
                return (values,)
        elif type(values) in self._bare_types:
            return (values,)
        parts = self._split_parts("enqueue", values)
        if self._prioritised:
            _check_priority("enqueue", parts[0])
        row = []
        for index, part in enumerate(parts):
            # A value that is ready needs no conversion: the store assigns it to its array.
            dtype, wanted = self.dtypes[index], self._wanted[index]
            if type(part) is np.ndarray:
                ready = part.dtype == dtype and part.shape == wanted
            elif wanted == ():
                ready = type(part) in self._scalars[index]
            else:
                # Stored as an object, so it must have the exact type that `dequeue` returns.
                ready = wanted is None and type(part) is self._scalars[index][0]
            if ready:
                row.append(part)
            else:
                array = as_array(
                    "enqueue", index, part, dtype, copy=self.copies and self._boxed[index]
                )
                self._check_shape("enqueue", index, array.shape)
                # [()] turns an array without axes into a scalar, as `dequeue` returns it.
                row.append(array[()])
        return tuple(row)

    def columns(self, values: Any) -> tuple[Columns, int]:
        """Check several elements; return their columns in the store's form, and their number."""
        parts = self._split_parts("enqueue_many", values)
        if self._prioritised:
            _check_priority("enqueue_many", parts[0])
        columns: list[Array] = []
        for index, (part, dtype) in enumerate(zip(parts, self.dtypes, strict=True)):
            # Columns of fixed shape are not copied here, because the store copies them.
            column = as_array(
                "enqueue_many", index, part, dtype, copy=self.copies and self._boxed[index]
            )
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
            wanted = self._wanted[index]
            if column.shape == (0,) and wanted is not None:
                # An empty list does not contain the shape of its rows.
                column = column.reshape((0, *(size or 0 for size in wanted)))
            self._check_shape("enqueue_many", index, column.shape[1:])
            columns.append(column)
        count = len(columns[0])
        pairs = zip(columns, self._boxed, strict=True)
        return tuple([boxed_rows(column) if boxed else column for column, boxed in pairs]), count

    def as_columns(self, row: Sequence[Any]) -> Columns:
        """Return one row in the form of several."""
        # In the store's form: objects and rows of variable shape stay objects.
        columns = self.empty(1)
        for column, component in zip(columns, row, strict=True):
            column[0] = component
        return columns

    def empty(self, count: int) -> Columns:
        """Return uninitialized columns for `count` rows, in the store's form."""
        dtypes, shapes = self.storage()
        pairs = zip(dtypes, shapes, strict=True)
        return tuple([np.empty((count, *shape), dtype) for dtype, shape in pairs])

    def join(self, pieces: Sequence[Columns]) -> Columns:
        """Concatenate batches, padded where elements differ; no batches give an empty one."""
        if len(pieces) == 1:
            # The piece belongs to the caller already, because the store has copied it.
            joined = pieces[0]
        elif not pieces:
            joined = self.empty(0)
        else:
            joined = tuple([np.concatenate(parts) for parts in zip(*pieces, strict=True)])
        if True not in self._boxed:
            return joined
        return tuple(
            padded_rows(column, wanted, dtype) if wanted is not None and None in wanted else column
            for column, wanted, dtype in zip(joined, self._wanted, self.dtypes, strict=True)
        )

    def result(self, parts: Sequence[Any]) -> Any:
        """Return components in the user's form: bare if there is one, a tuple, or a dict."""
        if self.names is not None:
            return dict(zip(self.names, parts, strict=True))
        return parts[0] if len(parts) == 1 else tuple(parts)

    def _split_parts(self, operation: str, values: Any) -> Sequence[Any]:
        """Split a value of the user into one part per component."""
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
            # Otherwise a dict would be taken as the value of the only component.
            raise ValueError(f"{operation}: got a dict, but the queue must have names to take one")
        parts = values if isinstance(values, (list, tuple)) else (values,)
        if len(parts) != len(self.dtypes):
            raise ValueError(
                f"{operation}: number of components, expected {len(self.dtypes)}, "
                f"got {len(parts)}; a list or tuple holds components, "
                "so wrap a value that is a list itself: ([1, 2],)"
            )
        return parts

    def _check_shape(self, operation: str, index: int, shape: tuple[int, ...]) -> None:
        """Raise unless an element of a component may have this shape."""
        wanted = self._wanted[index]
        if wanted is not None and wanted != shape and not fits(shape, wanted):
            raise InvalidArgumentError(
                f"{operation}: shape mismatch in component {index}, "
                f"expected {_form(wanted)}, got {_form(shape)}"
            )


def _as_shape(shape: Sequence[int | None], padded: bool) -> Shape:
    if isinstance(shape, (str, bytes)) or not isinstance(shape, Iterable):
        raise ValueError(f"queue: a shape must be a sequence of sizes, got {shape!r}")
    sizes = tuple(shape)
    if any(size < 0 if size is not None else not padded for size in sizes):
        raise ValueError(f"queue: shapes must be fully known, got {list(sizes)}")
    return tuple(None if size is None else int(size) for size in sizes)


def _check_priority(operation: str, value: Any) -> None:
    dtype = np.asarray(value).dtype
    # Arrays must be int64, as in TensorFlow; Python's integers have no size.
    exact = isinstance(value, (np.ndarray, np.generic))
    if dtype != np.int64 and (exact or dtype.kind != "i") and np.size(value):
        raise TypeError(f"{operation}: a priority must be an int64 scalar, got {dtype}")


def _form(shape: Shape) -> str:
    return "[" + ",".join("?" if size is None else str(size) for size in shape) + "]"
