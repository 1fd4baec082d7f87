"""Client operations on whole or partitioned variables.

An operation is divided into one `VariableRequest` per affected part, and the results are joined.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

import collectives as cc
from strategies.core.sparse import Rows
from strategies.errors import InvalidArgumentError
from strategies.rpc.registry import Address
from strategies.rpc.service import Service
from strategies.rpc.wire import Array
from strategies.variables import partition, requests
from strategies.variables.array_input import to_host
from strategies.variables.request_handler import KIND
from strategies.variables.requests import ReadResult, UpdateResult, VariableRequest, packing
from strategies.variables.server_ops import Result, compressed

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ChangeOptions", "VariableOps", "is_missing"]


class ChangeOptions(TypedDict, total=False):
    """Options of operations that change a variable.

    Attributes:
        compression: send arguments as 16-bit floats.
        timeout: seconds.
    """

    compression: cc.Compression | None
    timeout: float | None


V = TypeVar("V", int, tuple[int | None, ...])
"""Version of a variable: a number, or a tuple with one number per part."""


class VariableOps(abc.ABC, Generic[V]):
    """Operations on a variable in one or several parts.

    Attributes:
        service: service that reaches the tasks.
        name: name of the whole.
        shape: shape of the whole.
        addresses: addresses of the parts.
        axis: partitioned axis.
        offsets: first index of each part along the axis, and the end of the last part; None for a
            whole variable, whose shape only its task knows.
    """

    service: Service
    name: str
    shape: tuple[int, ...]
    addresses: tuple[Address, ...]
    axis = 0
    offsets: tuple[int, ...] | None = None

    @abc.abstractmethod
    def _join(self, versions: Sequence[int | None]) -> V:
        """Combine the versions of the parts into the version of the whole."""

    @abc.abstractmethod
    def _split(self, seen: V | None) -> Sequence[int | None]:
        """Reverse `_join`."""

    def is_initialized(self) -> bool:
        """Return whether all parts have a value, without waiting."""
        return not any(is_missing(self.service, address) for address in self.addresses)

    def read(
        self, *, compression: cc.Compression | None = cc.NONE, timeout: float | None = None
    ) -> ReadResult:
        """Return value and version.

        Args:
            compression: send the value as 16-bit floats; also applied on the variable's own task.
            timeout: seconds.
        """
        options = packing(compression, "read")
        return self.joined(self._ask("read", [options] * len(self.addresses), timeout), options)

    def read_rows(
        self,
        start: int,
        stop: int,
        *,
        compression: cc.Compression | None = cc.NONE,
        timeout: float | None = None,
    ) -> ReadResult:
        """Return rows `start` .. `stop` - 1; only these rows are sent."""
        if not 0 <= start <= stop:
            raise InvalidArgumentError(
                f"read_rows: expected 0 <= start <= stop, got {start} and {stop} "
                f"(variable: {self.name})"
            )
        options = packing(compression, "read_rows")
        ends: Sequence[tuple[int, int]] = [(0, stop)] * len(self.addresses)  # all have these rows
        if self.offsets is not None and self.axis == 0:
            ends = list(itertools.pairwise(self.offsets))
        chosen = [
            # Parts outside of the range return no rows, which `joined` can still concatenate.
            {"start": max(start - low, 0), "stop": max(min(stop, high) - low, 0), **options}
            for low, high in ends
        ]
        return self.joined(self._ask("read", chosen, timeout), options)

    def gather(
        self,
        indices: npt.ArrayLike,
        *,
        compression: cc.Compression | None = cc.NONE,
        timeout: float | None = None,
    ) -> ReadResult:
        """Return the rows at `indices` of any shape: an embedding lookup.

        Each distinct row is sent once, and only by the parts that hold rows; the version of other
        parts is None.

        Returns:
            Array of shape `(*indices.shape, *row.shape)`, and the version.
        """
        wanted = requests.wanted_rows("gather", indices, self.name)
        # Sorted, so the rows of the parts, joined in order, are those of `unique`.
        unique, positions = np.unique(wanted, return_inverse=True)
        options = packing(compression, "gather")
        chosen = [unique]
        if self.offsets is not None:
            self._check_rows("gather", unique)
            own = zip(partition.positions(unique, self.offsets), self.offsets, strict=False)
            # Parts number their rows from 0.
            chosen = [unique[places] - first for places, first in own]
        asked: list[VariableRequest | None] = [
            VariableRequest(address, [rows], options) if rows.size else None
            for address, rows in zip(self.addresses, chosen, strict=True)
        ]
        if not unique.size:  # the first part knows shape and dtype of a row
            asked[0] = VariableRequest(self.addresses[0], [unique], options)
        readings = [
            None if outcome is None else requests.reading_of(outcome, options)
            for outcome in self._perform("gather", asked, timeout)
        ]
        rows = [reading.value for reading in readings if reading is not None]
        found = rows[0] if len(rows) == 1 else np.concatenate(rows)
        # Parts without requested rows were not asked, so their version is unknown.
        versions = [None if reading is None else reading.version for reading in readings]
        return ReadResult(requests.spread(found, positions, wanted.shape), self._join(versions))

    def assign(self, value: npt.ArrayLike, **options: Unpack[ChangeOptions]) -> V:
        """Set the value and return the new version."""
        return self._change("assign", self.pieces("assign", value), **options)

    def assign_add(self, delta: npt.ArrayLike, **options: Unpack[ChangeOptions]) -> V:
        """Add to the value and return the new version."""
        return self._change("assign_add", self.pieces("assign_add", delta), **options)

    def assign_sub(self, delta: npt.ArrayLike, **options: Unpack[ChangeOptions]) -> V:
        """Subtract from the value and return the new version."""
        return self._change("assign_sub", self.pieces("assign_sub", delta), **options)

    def scatter_add(
        self, indices: npt.ArrayLike, rows: npt.ArrayLike, **options: Unpack[ChangeOptions]
    ) -> V:
        """Add rows at indices of shape (k,), duplicates summed; return the new version.

        Requests go only to the parts that hold the rows; the version of other parts is None.
        """
        return self._change("scatter_add", self._rows("scatter_add", indices, rows), **options)

    def scatter_sub(
        self, indices: npt.ArrayLike, rows: npt.ArrayLike, **options: Unpack[ChangeOptions]
    ) -> V:
        """Subtract rows at indices; see `scatter_add`."""
        return self._change("scatter_sub", self._rows("scatter_sub", indices, rows), **options)

    def scatter_update(
        self, indices: npt.ArrayLike, rows: npt.ArrayLike, **options: Unpack[ChangeOptions]
    ) -> V:
        """Set rows at indices; the last row of a duplicate index wins. Return the new version."""
        return self._change(
            "scatter_update", self._rows("scatter_update", indices, rows), **options
        )

    def apply_gradients(
        self,
        gradient: npt.ArrayLike | Rows,
        *,
        seen: V | None = None,
        most_stale: int | None = None,
        scale_stale: bool = False,
        learning_rate: float | None = None,
        compression: cc.Compression | None = cc.NONE,
        timeout: float | None = None,
    ) -> UpdateResult:
        """Apply a gradient with the optimizer of the variable, or of each part.

        An optimizer that uses the norm of its variable, such as `LARS`, uses the norm of the part.

        Args:
            gradient: shape of the variable; or `Rows`, which sends and changes only these rows and
                their slots, on the parts that hold them.
            seen: version from which the gradient was computed, to determine its staleness.
            most_stale: largest staleness; a staler gradient is dropped.
            scale_stale: divide the learning rate by 1 + staleness.
            learning_rate: learning rate for this step; None uses the optimizer's own.
            compression: send the gradient as 16-bit floats.
            timeout: seconds.

        Returns:
            The version, None for parts without a request; the largest staleness of the parts; and
            whether all parts applied the gradient.

        Raises:
            FailedPreconditionError: the variable has no optimizer.
        """
        options = requests.stepping(most_stale, scale_stale, learning_rate, compression)
        asked = self.steps(gradient, seen, options, compression)
        return self.updated(self._perform("apply_gradients", asked, timeout))

    # Used by `batched` for operations on several variables.

    def joined(self, outcomes: Sequence[Result], options: Mapping[str, Any]) -> ReadResult:
        """Join the read results of all parts."""
        readings = [requests.reading_of(outcome, options) for outcome in outcomes]
        value = readings[0].value
        if len(readings) > 1:
            value = np.concatenate([reading.value for reading in readings], self.axis)
            value.flags.writeable = False
        return ReadResult(value, self._join([reading.version for reading in readings]))

    def pieces(self, operation: str, value: npt.ArrayLike) -> list[list[Array] | None]:
        """Return the piece of an array for each part."""
        array = to_host(value, operation, self.name)
        if self.offsets is None:
            # Only the task of a whole variable knows its shape, so the task checks it.
            return [[array]]
        partition.check_shape(operation, array, self.shape, self.name)
        return [[piece] for piece in partition.pieces(array, self.offsets, self.axis)]

    def steps(
        self,
        gradient: npt.ArrayLike | Rows,
        seen: V | None,
        options: Mapping[str, Any],
        compression: cc.Compression | None,
    ) -> list[VariableRequest | None]:
        """Return the gradient request of each part; None for parts without rows."""
        if isinstance(gradient, Rows):
            given = self._rows("apply_gradients", gradient.indices, gradient.values)
        else:
            given = self.pieces("apply_gradients", gradient)
        # As Python's integers: msgpack cannot encode those of NumPy.
        versions = [None if at is None else int(at) for at in self._split(seen)]
        chosen = [options if at is None else {**options, "seen": at} for at in versions]
        return self._items(given, chosen, compression)

    def updated(self, outcomes: Sequence[Result | None]) -> UpdateResult:
        """Join the update results of all parts."""
        facts = [None if outcome is None else outcome.facts for outcome in outcomes]
        known = [fact[1] for fact in facts if fact is not None and fact[1] is not None]
        return UpdateResult(
            self._join([None if fact is None else fact[0] for fact in facts]),
            # The largest, because a caller that limits the staleness needs the worst part.
            max(known, default=None),
            all(fact is None or fact[2] for fact in facts),
        )

    def _ask(
        self, operation: str, options: Sequence[Mapping[str, Any]], timeout: float | None
    ) -> list[Result]:
        """Send a request to all parts."""
        asked = [
            VariableRequest(address, (), o)
            for address, o in zip(self.addresses, options, strict=True)
        ]
        return requests.perform(self.service, operation, asked, timeout)

    def _perform(
        self, operation: str, asked: Sequence[VariableRequest | None], timeout: float | None
    ) -> list[Result | None]:
        """Send requests to some parts; the results of the other parts are None."""
        # Parts without rows get no message.
        some = [item for item in asked if item is not None]
        outcomes = iter(requests.perform(self.service, operation, some, timeout))
        return [None if item is None else next(outcomes) for item in asked]

    def _change(
        self,
        operation: str,
        given: Sequence[Sequence[Array] | None],
        compression: cc.Compression | None = cc.NONE,
        timeout: float | None = None,
    ) -> V:
        options = packing(compression, operation)
        asked = self._items(given, [options] * len(given), compression)
        outcomes = self._perform(operation, asked, timeout)
        return self._join([None if o is None else o.facts[0] for o in outcomes])

    def _items(
        self,
        given: Sequence[Sequence[Array] | None],
        options: Sequence[Mapping[str, Any]],
        compression: cc.Compression | None,
    ) -> list[VariableRequest | None]:
        """Return the request of each part for an array, or for indices and rows."""
        # By the name of its address, each part has error feedback of its own.
        return [
            None
            if own is None
            else VariableRequest(address, compressed(own, compression, address.name), told)
            for address, own, told in zip(self.addresses, given, options, strict=True)
        ]

    def _rows(
        self, operation: str, indices: npt.ArrayLike, rows: npt.ArrayLike
    ) -> list[list[Array] | None]:
        """Return indices and rows of each part; None for parts without rows."""
        where = to_host(indices, operation, self.name)
        values = to_host(rows, operation, self.name)
        if self.offsets is None:
            return [[where, values]]
        if where.ndim != 1 or values.shape[:1] != where.shape:
            raise InvalidArgumentError(
                f"{operation}: expected an index for every row, got shapes {where.shape} and "
                f"{values.shape} (variable: {self.name})"
            )
        # Checked before the rows are divided, which would drop indices out of range.
        wanted = requests.wanted_rows(operation, where, self.name)
        self._check_rows(operation, wanted)
        found = partition.row_pieces(Rows(wanted, values), self.offsets)
        return [[rows.indices, rows.values] if rows.indices.size else None for rows in found]

    def _check_rows(self, operation: str, indices: Array) -> None:
        """Check that indices are in range and that the partition is along axis 0."""
        if self.axis != 0 or not self.shape:
            raise InvalidArgumentError(
                f"{operation}: rows span several parts, expected a variable partitioned along "
                f"axis 0, got axis {self.axis} (variable: {self.name})"
            )
        if indices.size and not 0 <= indices.min() <= indices.max() < self.shape[0]:
            raise InvalidArgumentError(
                f"{operation}: an index is out of range, expected 0 .. {self.shape[0] - 1}, got "
                f"{indices.min()} .. {indices.max()} (variable: {self.name})"
            )


def is_missing(service: Service, address: Address) -> bool:
    """Return whether a variable has no value yet."""
    if address.task == service.task:
        return service.here(KIND, address).value is None
    return bool(service.request(address, "missing").metadata["missing"])
