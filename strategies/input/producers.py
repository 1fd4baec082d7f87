"""Input producers: file names, ranges or arrays, epoch after epoch.

`preload` returns a function that returns the next rows of data in memory. A producer is a queue and
a thread that fills it from such a function, so that several readers can share it.
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
from strategies.queues.queue import check_capacity
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

_SHARED_ROWS = 16  # rows taken at a time when tasks share: few, so that no task takes all the rest
_ROWS = 256  # rows that a producer enqueues at a time, so that the overhead per call is small


class Producer(NamedTuple):
    """A queue and the runner whose thread fills it. The queue stays empty until you start it."""

    queue: FIFOQueue
    runner: QueueRunner


class ProducerOptions(TypedDict, total=False):
    """Options of all producers; see `input_producer`."""

    num_epochs: int | None
    shuffle: bool
    seed: int | None
    capacity: int
    name: str
    service: Service | None
    shared_name: str | None
    task: int | str | None


def limit_epochs(function: Callable[[], Result], num_epochs: int | None) -> Callable[[], Result]:
    """Wrap `function` so that it raises `OutOfRangeError` after `num_epochs` calls.

    Args:
        function: function to call, from any thread.
        num_epochs: number of calls; None for no limit.

    Raises:
        ValueError: `num_epochs` below 1.
    """
    if num_epochs is None:
        return function
    integer("limit_epochs", "num_epochs", num_epochs)
    # Threads may share the function.
    lock = threading.Lock()
    left = num_epochs

    def limited() -> Result:
        nonlocal left
        with lock:
            if not left:
                raise OutOfRangeError(f"limit_epochs: {num_epochs} epochs are over")
            left -= 1
        # Outside of the lock, since the function may take long.
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
    """Copy data into memory and return a function that returns its next rows.

    Pass the function to `batch` and its variants. Any thread may call it. It returns each row once
    per epoch.

    Args:
        values: an array of shape (n, ...), or a tuple or dict of such arrays with the same n.
        rows: number of rows per call, for `enqueue_many=True`; the last call of an epoch may return
            fewer. None returns single rows, without the dimension of rows.
        num_epochs: number of epochs before the function raises `OutOfRangeError`; None repeats
            forever.
        shuffle: whether to reshuffle the rows in each epoch; epochs are never mixed.
        seed: seed of the shuffling; None for a different order each time.
        comm: ranks that keep the data once per node. `values` is then a function that returns it
            and is called on rank 0 only; see `once_per_node`. *Collective*. Each rank returns all
            rows, in its own order.

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
        # Checked on all ranks before `values` is called on rank 0.
        ProcessGroup(comm).run_then_agree(
            "preload", check
        )  # otherwise the other ranks would wait in once_per_node
    parts, form = _unpack(values if comm is None else once_per_node(values, comm))
    if comm is None:
        # The caller may change its arrays later, while another thread reads.
        parts = [part.copy() for part in parts]
    for part in parts:
        part.setflags(write=False)  # because a single row is a view
    count = len(parts[0])
    # Each rank has its own generator: with the same seed the orders are equal.
    generator = np.random.default_rng(seed)
    lock = threading.Lock()

    def order() -> Array:
        return generator.permutation(count) if shuffle else np.arange(count)

    next_epoch = limit_epochs(order, num_epochs)
    # An empty epoch, so that the first call starts one.
    places, at = np.empty(0, np.int64), 0

    def read() -> Any:
        nonlocal places, at
        with lock:
            # Counting and choosing under the lock: each row is returned once.
            if at >= len(places):
                places, at = next_epoch(), 0
            chosen: Any = places[at] if rows is None else places[at : at + rows]
            at += rows or 1
        # Copying outside of the lock, so that threads copy in parallel.
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
    """Enqueue the rows of an array, all of them in each epoch.

    Args:
        values: as for `preload`; several arrays become the components of the queue.
        num_epochs: number of epochs before the queue is closed; None repeats forever.
        shuffle: whether to reshuffle the rows in each epoch; epochs are never mixed.
        seed: seed of the shuffling; None for a different order each time.
        capacity: capacity of the queue in rows; negative for no limit, which needs `num_epochs`.
        name: name of the queue.
        service: tasks that share the rows: each row of an epoch is returned on one task. All tasks
            pass the same values and options. Only row numbers are sent. Each task takes a few at a
            time into its own queue; if the task dies, the rows in it are lost.
        shared_name: name under which the tasks share; requires `service`.
        task: task that holds the queue of row numbers, as for `shared_queue`.

    Returns:
        The queue and its runner.

    Raises:
        ValueError: as for `preload`; only one of `service` and `shared_name`; a capacity of 0; or
            neither `num_epochs` nor a capacity.
        InvalidArgumentError: another task passed another number of rows, other names, dtypes or
            shapes, or other options.
        UnavailableError: the task cannot be reached.
    """
    check_capacity(name, capacity, endless=num_epochs is None)
    # For the description of the queue; the rows are copied by the reader below.
    parts, form = _unpack(values)
    if service is None and shared_name is None:
        read = preload(values, rows=_ROWS, num_epochs=num_epochs, shuffle=shuffle, seed=seed)
    elif service is None or shared_name is None:
        raise ValueError(
            f"{name}: expected both service and shared_name or neither, got {service} and "
            f"{shared_name!r}"
        )
    else:
        line = shared_range(
            len(parts[0]), service=service, shared_name=shared_name, task=task,
            num_epochs=num_epochs, shuffle=shuffle, seed=seed, rows=_words(values, parts),
        )  # fmt: skip
        # At most the capacity, otherwise `enqueue_many` of them would block half way.
        most = _SHARED_ROWS if capacity < 0 else min(_SHARED_ROWS, capacity)
        # Copies, because the thread reads them while the caller may change its arrays.
        own = [part.copy() for part in parts]

        def read() -> Any:
            numbers = line.dequeue_up_to(most)
            return form([part[numbers] for part in own])

    queue = FIFOQueue(
        capacity,
        [dtype_of(part) for part in parts],
        [part.shape[1:] for part in parts],
        # Names of a dict become names of the components.
        names=list(values) if isinstance(values, Mapping) else None,
        name=name,
    )
    return Producer(queue, QueueRunner(queue, [lambda: queue.enqueue_many(read())]))


def _words(values: Any, parts: list[Array]) -> list[str]:
    """Return name, dtype and shape of the rows of each array, as text."""
    names = list(values) if isinstance(values, Mapping) else [""] * len(parts)
    described = zip(names, parts, strict=True)
    return [f"{name} {part.dtype} {part.shape[1:]}".lstrip() for name, part in described]


def string_input_producer(strings: Sequence[str], **options: Unpack[ProducerOptions]) -> Producer:
    """Enqueue the strings, usually file names, once per epoch.

    Args:
        strings: the elements of an epoch.
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
    """Enqueue the int64 numbers from 0 to `limit` - 1; see `input_producer`."""
    integer("range_input_producer", "limit", limit)
    options.setdefault("name", "range_input_producer")
    return input_producer(np.arange(limit), **options)


def slice_input_producer(arrays: Sequence[Any], **options: Unpack[ProducerOptions]) -> Producer:
    """Enqueue tuples of one row of each array; see `input_producer`.

    Args:
        arrays: arrays with the same number of rows.
        **options: as for `input_producer`.

    Raises:
        ValueError: no arrays, no rows, or different numbers of rows.
    """
    options.setdefault("name", "slice_input_producer")
    return input_producer(tuple(arrays), **options)


def _unpack(values: Any) -> tuple[list[Array], Callable[[list[Any]], Any]]:
    """Return the arrays, and a function that arranges a row of each like `values`."""
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
    # A scalar has no rows, and 0 rows would loop for ever.
    if len(counts) != 1 or counts & {(), (0,)}:
        raise ValueError(
            "preload: expected arrays with the same number of rows, at least one, "
            f"got shapes {[part.shape for part in parts]}"
        )
    # Queues hold text as objects.
    return [part.astype(object) if part.dtype.kind in "US" else part for part in parts], form
