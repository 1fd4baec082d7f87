"""FIFO, shuffling, padding and priority queues.

Elements are checked and copied on entry, so a caller may reuse its arrays. Dequeued elements belong
to the caller. `state_machine` defines waiting, closing and deadlines.
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
        capacity: number of elements at which enqueues start to wait; negative for no limit.
        dtypes: one per component, or a single one: NumPy dtypes, `str` or `bytes`.
        shapes: shape of each component of one element, such as `[(), (28, 28)]`; None if elements
            may differ, which allows no batches.
        names: keys of the elements, which are then dicts.
        name: name for errors and threads; None chooses one.

    Raises:
        ValueError: numbers of dtypes, shapes or names differ, or a shape is not fully known.
        TypeError: a dtype is neither numeric nor text.

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
    """A queue that returns its elements in random order, each with equal probability.

    Args:
        capacity: number of elements at which enqueues start to wait; negative for no limit.
        min_after_dequeue: number of elements that must stay while the queue is open, so that they
            are well mixed.
        dtypes: as for `FIFOQueue`.
        shapes: as for `FIFOQueue`.
        names: as for `FIFOQueue`.
        seed: seed of the order; None for a different one each time. With a seed, the same calls in
            the same order return the same elements.
        name: name for errors and threads; None chooses one.

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
        # With all rows reserved for mixing, no dequeue of an open queue could succeed.
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
    """A `FIFOQueue` whose elements may differ in size; batches are padded.

    Args:
        capacity: number of elements at which enqueues start to wait; negative for no limit.
        dtypes: as for `FIFOQueue`.
        shapes: shape of each component of one element; None for a dimension of variable size.
            `dequeue_many` pads these at the end to the largest of the batch, with 0, False or
            empty text; `dequeue` does not pad.
        names: as for `FIFOQueue`.
        name: name for errors and threads; None chooses one.

    Raises:
        ValueError: as for `FIFOQueue`, or `shapes` is None.
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
        # Padding happens when a batch leaves, so rows are stored unpadded.
        components = Components(dtypes, shapes, names, padded=True)
        name = name or f"padding_fifo_queue_{next(_numbers)}"
        super().__init__(FifoRows(*components.storage()), components, capacity=capacity, name=name)


class PriorityQueue(Queue):
    """A queue that returns the element with the smallest priority first.

    Elements have one more component than `dtypes`: the first one is the priority, an int64 scalar.
    Elements of equal priority leave in the order of their arrival. A waiting batch collects
    elements as they arrive, so a smaller priority that arrives later is behind in it.

    Args:
        capacity: number of elements at which enqueues start to wait; negative for no limit.
        dtypes: as for `FIFOQueue`, without the priority; may be `()`.
        shapes: as for `FIFOQueue`, without the priority.
        names: as for `FIFOQueue`, with a name for the priority as the first one.
        name: name for errors and threads; None chooses one.

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
