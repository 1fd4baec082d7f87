"""FIFO, shuffling, padding and priority queues.

Elements are checked and copied on entry, so that a caller may reuse its arrays, and belong to the
taker when they leave. Waiting, closing and deadlines follow one state machine, see `state_machine`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from strategies.errors import InvalidArgumentError
from strategies.queues.components import Components
from strategies.queues.queue import Queue
from strategies.queues.slot_store import PriorityStore, ShuffledStore
from strategies.queues.store import FifoRows

__all__ = ["FIFOQueue", "PaddingFIFOQueue", "PriorityQueue", "Queue", "RandomShuffleQueue"]

_numbers = itertools.count()


class FIFOQueue(Queue):
    """A queue whose elements leave in the order of their arrival.

    Args:
        capacity: number of elements at which enqueues begin to wait; negative for no limit.
        dtypes: one per component, or a single one: NumPy dtypes, `str` or `bytes`.
        shapes: shape of each component of one element, such as `[(), (28, 28)]`; None if elements
            may differ, then they are only dequeued one by one.
        names: keys of the elements if they are to be dicts.
        name: for errors and threads; made up if None.

    Raises:
        ValueError: numbers of dtypes, shapes or names differ, or a shape is not fully known.
        TypeError: a dtype that is neither numeric nor text.

    Example:
        >>> queue = FIFOQueue(3, ["float32", str], [(2,), ()])
        >>> queue.enqueue(([1, 2], "one"))
        >>> queue.dequeue()
        (array([1., 2.], dtype=float32), 'one')
    """

    def __init__(
        self,
        capacity: int,
        dtypes: Any,
        shapes: Sequence[Sequence[int]] | None = None,
        *,
        names: Sequence[str] | None = None,
        name: str | None = None,
    ) -> None:
        components = Components(dtypes, shapes, names)
        name = name or f"fifo_queue_{next(_numbers)}"
        super().__init__(FifoRows(*components.storage()), components, capacity=capacity, name=name)


class RandomShuffleQueue(Queue):
    """A queue from which each of the elements that are in is equally likely to leave next.

    Args:
        capacity: number of elements at which enqueues begin to wait; negative for no limit.
        min_after_dequeue: number of elements that must stay while the queue is open, so that they
            are well mixed.
        dtypes: as for `FIFOQueue`.
        shapes: as for `FIFOQueue`.
        names: as for `FIFOQueue`.
        seed: of the order; None for a different one each time. The same calls in the same order
            then give the same elements.
        name: for errors and threads; made up if None.

    Raises:
        InvalidArgumentError: `min_after_dequeue` is negative, or not less than the capacity.
        ValueError: as for `FIFOQueue`.
        TypeError: as for `FIFOQueue`.
    """

    def __init__(
        self,
        capacity: int,
        min_after_dequeue: int,
        dtypes: Any,
        shapes: Sequence[Sequence[int]] | None = None,
        *,
        names: Sequence[str] | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        if min_after_dequeue < 0 or 0 <= capacity <= min_after_dequeue:
            raise InvalidArgumentError(
                "RandomShuffleQueue: min_after_dequeue must be at least 0 and less than the "
                f"capacity, got {min_after_dequeue} (capacity: {capacity})"
            )
        components = Components(dtypes, shapes, names)
        name = name or f"random_shuffle_queue_{next(_numbers)}"
        self.min_after_dequeue = min_after_dequeue
        self.seed = seed
        super().__init__(
            ShuffledStore(*components.storage(), seed),
            components,
            capacity=capacity,
            min_after_dequeue=min_after_dequeue,
            name=name,
        )


class PaddingFIFOQueue(Queue):
    """A `FIFOQueue` whose elements may differ in size, and are padded when several are taken.

    Args:
        capacity: number of elements at which enqueues begin to wait; negative for no limit.
        dtypes: as for `FIFOQueue`.
        shapes: shape of each component of one element; None for a dimension whose size may differ.
            `dequeue_many` fills these up at the end, to the largest of the batch, with 0, False or
            empty text; `dequeue` returns the element as it is.
        names: as for `FIFOQueue`.
        name: for errors and threads; made up if None.

    Raises:
        ValueError: as for `FIFOQueue`, or no shapes.
        TypeError: as for `FIFOQueue`.

    Example:
        >>> queue = PaddingFIFOQueue(3, "int32", [(None,)])
        >>> queue.enqueue([[1]])
        >>> queue.enqueue([[2, 3]])
        >>> queue.dequeue_many(2)
        array([[1, 0],
               [2, 3]], dtype=int32)
    """

    def __init__(
        self,
        capacity: int,
        dtypes: Any,
        shapes: Sequence[Sequence[int | None]],
        *,
        names: Sequence[str] | None = None,
        name: str | None = None,
    ) -> None:
        if shapes is None:
            raise ValueError("PaddingFIFOQueue: a list of shapes must be provided, got None")
        components = Components(dtypes, shapes, names, padded=True)
        name = name or f"padding_fifo_queue_{next(_numbers)}"
        super().__init__(FifoRows(*components.storage()), components, capacity=capacity, name=name)


class PriorityQueue(Queue):
    """A queue from which the element with the smallest priority leaves first.

    Elements have one component more than `dtypes` says: the first one is the priority, an int64
    scalar. Elements of equal priority leave in the order of their arrival. A batch that is waited
    for collects elements as they come: a smaller priority that comes later is behind in it.

    Args:
        capacity: number of elements at which enqueues begin to wait; negative for no limit.
        dtypes: as for `FIFOQueue`, without the priority; may be `()`.
        shapes: as for `FIFOQueue`, without the priority.
        names: as for `FIFOQueue`, with a name for the priority as the first one.
        name: for errors and threads; made up if None.

    Raises:
        ValueError: as for `FIFOQueue`.
        TypeError: as for `FIFOQueue`; when enqueuing, a priority that is not an int64.

    Example:
        >>> queue = PriorityQueue(3, str, [()])
        >>> queue.enqueue((2, "later"))
        >>> queue.enqueue((1, "sooner"))
        >>> queue.dequeue()
        (np.int64(1), 'sooner')
    """

    def __init__(
        self,
        capacity: int,
        dtypes: Any = (),
        shapes: Sequence[Sequence[int]] | None = None,
        *,
        names: Sequence[str] | None = None,
        name: str | None = None,
    ) -> None:
        components = Components(dtypes, shapes, names, prioritised=True)
        name = name or f"priority_queue_{next(_numbers)}"
        store = PriorityStore(*components.storage())
        super().__init__(store, components, capacity=capacity, name=name)
