"""Input producers: file names, ranges or arrays, epoch after epoch.

`preload` is a function that returns the next elements of data in memory. A producer is a queue and
a thread that fills it from such a function, for several readers to share.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

import numpy as np

import collectives as cc
from strategies.core.process_group import ProcessGroup
from strategies.core.validation import integer
from strategies.errors import OutOfRangeError
from strategies.input.node_arrays import once_per_node
from strategies.input.runners import QueueRunner
from strategies.queues.dtypes import dtype_of
from strategies.queues.queue_types import FIFOQueue
from strategies.queues.shared_files import shared_range
from strategies.queues.store import Array
from strategies.rpc.service import Service

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "ProducerOptions",
    "Producer",
    "input_producer",
    "limit_epochs",
    "preload",
    "range_input_producer",
    "slice_input_producer",
    "string_input_producer",
]

Result = TypeVar("Result")

_SHARED_ROWS = 16  # of other tasks, too, at a time: few, so that none takes all that is left
_ROWS = 256  # rows that a producer enqueues at a time: enough that the work per call is little


class Producer(NamedTuple):
    """A queue and the runner whose thread fills it; start the runner to get anything."""

    queue: FIFOQueue
    runner: QueueRunner


class ProducerOptions(TypedDict, total=False):
    """The options of all producers; see `input_producer`."""

    num_epochs: int | None
    shuffle: bool
    seed: int | None
    capacity: int
    name: str
    service: Service | None
    shared_name: str | None
    task: int | str | None


def limit_epochs(function: Callable[[], Result], num_epochs: int | None) -> Callable[[], Result]:
    """Return the function, which after so many calls raises `OutOfRangeError` instead.

    Args:
        function: to be called, by any thread.
        num_epochs: number of calls; None for no limit.

    Raises:
        ValueError: `num_epochs` below 1.
    """
    if num_epochs is None:
        return function
    integer("limit_epochs", "num_epochs", num_epochs)
    lock = threading.Lock()
    left = num_epochs

    def limited() -> Result:
        nonlocal left
        with lock:
            if not left:
                raise OutOfRangeError(f"limit_epochs: {num_epochs} epochs are over")
            left -= 1
        return function()

    return limited


def preload(
    values: Any,
    *,
    rows: int | None = None,
    num_epochs: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    comm: cc.Communicator | None = None,
) -> Callable[[], Any]:
    """Copy data that fits in memory, and return a function that returns the next of its rows.

    The function is what `batch` and its relatives read from. Any thread may call it; each row comes
    once per epoch.

    Args:
        values: an array of shape (n, ...), or a tuple or dict of such arrays with the same n.
        rows: how many rows to return at a time, fewer at the end of an epoch: a number for
            `enqueue_many=True`; None for a single one without a dimension that counts rows.
        num_epochs: after so many the function raises `OutOfRangeError`; None to go on for ever.
        shuffle: whether to shuffle the rows anew in each epoch; epochs are never mixed.
        seed: of the shuffling; None for a different order each time.
        comm: ranks that hold the data once on each node. `values` is then a function that returns
            it, which is called on rank 0 only; see `once_per_node`. *Collective*. Each rank has all
            rows, in an order of its own.

    Raises:
        ValueError: no rows, different numbers of rows, `rows` or `num_epochs` below 1, or `seed`
            below 0; with `comm` on all ranks.

    Example:
        >>> read = preload({"x": [1, 2, 3], "y": [10, 20, 30]}, num_epochs=1, shuffle=False)
        >>> read()
        {'x': np.int64(1), 'y': np.int64(10)}
        >>> preload(["a", "b", "c"], rows=2, shuffle=False)().tolist()
        ['a', 'b']
    """

    def check() -> None:
        if rows is not None:
            integer("preload", "rows", rows)
        if num_epochs is not None:
            integer("preload", "num_epochs", num_epochs)
        if seed is not None:
            integer("preload", "seed", seed, least=0)

    if comm is None:
        check()
    else:
        ProcessGroup(comm).run_then_agree(
            "preload", check
        )  # else the others would go on without this rank
    parts, form = _unpack(values if comm is None else once_per_node(values, comm))
    if comm is None:
        # The caller may go on to change its arrays while another thread reads.
        parts = [part.copy() for part in parts]
    for part in parts:
        part.setflags(write=False)  # a single row is a view
    count = len(parts[0])
    generator = np.random.default_rng(seed)
    lock = threading.Lock()

    def order() -> Array:
        return generator.permutation(count) if shuffle else np.arange(count)

    next_epoch = limit_epochs(order, num_epochs)
    places, at = np.empty(0, np.int64), 0

    def read() -> Any:
        nonlocal places, at
        with lock:
            if at >= len(places):
                places, at = next_epoch(), 0
            chosen: Any = places[at] if rows is None else places[at : at + rows]
            at += rows or 1
        return form([part[chosen] for part in parts])

    return read


def input_producer(
    values: Any,
    *,
    num_epochs: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    capacity: int = 32,
    name: str = "input_producer",
    service: Service | None = None,
    shared_name: str | None = None,
    task: int | str | None = None,
) -> Producer:
    """Offer the rows of an array in a queue, all of them in each epoch.

    Args:
        values: as for `preload`; several arrays become the components of the queue.
        num_epochs: after so many epochs the queue is closed; None to go on for ever.
        shuffle: whether to shuffle the rows anew in each epoch; epochs are never mixed.
        seed: of the shuffling; None for a different order each time.
        capacity: of the queue.
        name: of the queue.
        service: of tasks that share the rows: each row of an epoch comes on one of them. All give
            the same values and options. Only numbers of rows travel; each task takes a few at a
            time into a queue of its own, and those that are in there are lost if it dies.
        shared_name: by which they share them; with `service`.
        task: where the line of numbers is, as for `shared_queue`.

    Returns:
        The queue and its runner.

    Raises:
        ValueError: as for `preload`; `service` without `shared_name` or the other way round.
        InvalidArgumentError: another task meant another number of rows, rows of other names, dtypes
            or shapes, or other options.
        UnavailableError: the task cannot be reached.
    """
    parts, form = _unpack(values)
    if service is None and shared_name is None:
        read = preload(values, rows=_ROWS, num_epochs=num_epochs, shuffle=shuffle, seed=seed)
    elif service is None or shared_name is None:
        raise ValueError(
            f"{name}: rows are shared by a service and a name, got {service} and {shared_name!r}"
        )
    else:
        line = shared_range(
            len(parts[0]), service=service, shared_name=shared_name, task=task,
            num_epochs=num_epochs, shuffle=shuffle, seed=seed, rows=_words(values, parts),
        )  # fmt: skip
        read = _of_line(line, parts, form, min(_SHARED_ROWS, capacity))
    queue = FIFOQueue(
        capacity,
        [dtype_of(part) for part in parts],
        [part.shape[1:] for part in parts],
        names=list(values) if isinstance(values, Mapping) else None,
        name=name,
    )
    return Producer(queue, QueueRunner(queue, [lambda: queue.enqueue_many(read())]))


def _words(values: Any, parts: list[Array]) -> list[str]:
    """Return name, dtype and shape of each array's rows."""
    names = list(values) if isinstance(values, Mapping) else [""] * len(parts)
    described = zip(names, parts, strict=True)
    return [f"{name} {part.dtype} {part.shape[1:]}".lstrip() for name, part in described]


def _of_line(
    line: FIFOQueue, parts: list[Array], form: Callable[[list[Any]], Any], most: int
) -> Callable[[], Any]:
    """Return a function that returns rows whose numbers it takes from a line."""
    parts = [part.copy() for part in parts]

    def read() -> Any:
        numbers = line.dequeue_up_to(most)
        return form([part[numbers] for part in parts])

    return read


def string_input_producer(strings: Sequence[str], **options: Unpack[ProducerOptions]) -> Producer:
    """Offer the strings, usually file names, in a queue, all of them in each epoch.

    Args:
        strings: what an epoch consists of.
        **options: as for `input_producer`.

    Returns:
        The queue of single strings and its runner.

    Raises:
        ValueError: no strings, or `num_epochs` below 1.
    """
    if isinstance(strings, str) or not len(strings):
        raise ValueError(
            f"string_input_producer: expected a sequence of at least one string, got {strings!r}"
        )
    work = np.empty(len(strings), object)
    work[:] = strings
    return input_producer(work, **options)


def range_input_producer(limit: int, **options: Unpack[ProducerOptions]) -> Producer:
    """Offer the int64 numbers from 0 to `limit` - 1 in a queue; see `input_producer`."""
    integer("range_input_producer", "limit", limit)
    options.setdefault("name", "range_input_producer")
    return input_producer(np.arange(limit), **options)


def slice_input_producer(arrays: Sequence[Any], **options: Unpack[ProducerOptions]) -> Producer:
    """Offer rows that belong together, one of each array, in a queue; see `input_producer`.

    Args:
        arrays: with the same number of rows.
        **options: as for `input_producer`.

    Raises:
        ValueError: no arrays, no rows, or different numbers of rows.
    """
    options.setdefault("name", "slice_input_producer")
    return input_producer(tuple(arrays), **options)


def _unpack(values: Any) -> tuple[list[Array], Callable[[list[Any]], Any]]:
    """The arrays, and the function that puts a row of each into the form of `values`."""
    form: Callable[[list[Any]], Any]
    if isinstance(values, Mapping):
        names, listed = list(values), list(values.values())
        form = lambda row: dict(zip(names, row, strict=True))  # noqa: E731
    elif isinstance(values, tuple):
        listed, form = list(values), tuple
    else:
        listed, form = [values], operator.itemgetter(0)
    parts = [np.asarray(part) for part in listed]
    counts = {part.shape[:1] for part in parts}
    if len(counts) != 1 or counts & {(), (0,)}:
        raise ValueError(
            "preload: expected arrays with the same number of rows, at least one, "
            f"got shapes {[part.shape for part in parts]}"
        )
    return [part.astype(object) if part.dtype.kind in "US" else part for part in parts], form
