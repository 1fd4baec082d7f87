"""`batch`, `shuffle_batch` and CSV pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from strategies.input.csv.parser import decode_csv
from strategies.input.files import Compression, match_files
from strategies.input.pipeline_state import ShardedRows
from strategies.input.pipelines import Batches, BatchOptions, Read
from strategies.input.producers import string_input_producer
from strategies.input.reader import Damage
from strategies.input.readers import TextLineReader
from strategies.input.round_robin import ReaderRoundRobin, RoundRobinNames
from strategies.input.sharded import ShardedInput
from strategies.queues.queue import check_capacity
from strategies.queues.queue_types import FIFOQueue, PaddingFIFOQueue, Queue, RandomShuffleQueue

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["batch", "batch_join", "csv_batches", "shuffle_batch", "shuffle_batch_join"]

_ROWS_PER_READ = 256  # lines per decode_csv call: enough that the overhead per call is negligible


def batch(
    read: Read | ShardedInput[Any],
    batch_size: int,
    *,
    num_threads: int = 1,
    capacity: int = 32,
    shapes: Sequence[Sequence[int | None]] | None = None,
    dynamic_pad: bool = False,
    **options: Unpack[BatchOptions],
) -> Batches:
    """Make batches of the values that `read` returns, in call order if there is one thread.

    Args:
        read: called repeatedly by each thread. Returns one value per component, bare or in a list,
            tuple or dict, and raises `OutOfRangeError` at the end. All elements have the dtypes of
            the first one and, unless they are padded, its shapes. Or a `ShardedInput`, with one
            thread and without `enqueue_many`: any number of ranks can then resume from `state`.
        batch_size: rows per batch.
        num_threads: threads that call `read` at the same time.
        capacity: maximum number of rows that wait to become batches, not 0; negative for no limit.
        shapes: shape of each component of one row; None uses the shapes of the first element.
        dynamic_pad: whether rows may differ in size. A batch is padded at the end with 0, False or
            empty text to its largest row, in all dimensions or where `shapes` has None.
        **options: `enqueue_many`: whether `read` returns several rows at a time, along
            dimension 0. `allow_smaller_final_batch`: whether to return the last rows as a smaller
            batch; otherwise they are dropped. `runners`: runners of queues that `read` uses,
            started and stopped with the pipeline. `turns`: see `batch_join`.

    Returns:
        A pipeline to open with `with`, which makes the first call of `read` in the caller's thread.

    Example:
        >>> from strategies.errors import OutOfRangeError
        >>> numbers = iter(range(7))
        >>> def read():
        ...     for number in numbers:
        ...         return number
        ...     raise OutOfRangeError("no more numbers")
        >>> with batch(read, 3) as batches:
        ...     for numbers_of_batch in batches:
        ...         print(numbers_of_batch)
        [0 1 2]
        [3 4 5]
    """
    if isinstance(read, ShardedInput):
        read = ShardedRows(read)
    # Several threads would record their positions out of order.
    if isinstance(read, ShardedRows) and (num_threads != 1 or options.get("enqueue_many")):
        raise ValueError("batch: a ShardedInput needs num_threads=1 and no enqueue_many")
    return batch_join(
        # The same function for all threads: it is called at the same time by them.
        [read] * num_threads,
        batch_size,
        capacity=capacity,
        shapes=shapes,
        dynamic_pad=dynamic_pad,
        **options,
    )


def batch_join(
    reads: Sequence[Read],
    batch_size: int,
    *,
    capacity: int = 32,
    shapes: Sequence[Sequence[int | None]] | None = None,
    dynamic_pad: bool = False,
    **options: Unpack[BatchOptions],
) -> Batches:
    """As `batch`, with one thread per function, so that each can read its own file.

    Threads deliver rows in any order. With `turns=ReaderRoundRobin(len(reads))` they read
    concurrently and hand over their rows in round-robin order. If no two functions share a source,
    the same input then gives the same batches, and `state` and `resume` work inside an epoch. A
    slow function delays all of them.
    """
    check_capacity("batch", capacity)

    def make_queue(dtypes: Any, first_shapes: Any, names: Any) -> Queue:
        if dynamic_pad:
            # None in every dimension, as no element but the first is known yet.
            padded: Any = shapes or [(None,) * len(shape) for shape in first_shapes]
            return PaddingFIFOQueue(capacity, dtypes, padded, names=names, name="batch")
        known: Any = shapes or first_shapes
        return FIFOQueue(capacity, dtypes, known, names=names, name="batch")

    # A FIFO queue keeps the order of one reader, so the pipeline is repeatable.
    return Batches(reads, batch_size, make_queue, repeatable=True, **options)


def shuffle_batch(
    read: Read,
    batch_size: int,
    *,
    capacity: int,
    min_after_dequeue: int,
    num_threads: int = 1,
    seed: int | None = None,
    **options: Unpack[BatchOptions],
) -> Batches:
    """Make batches of rows drawn at random from a queue that `read` fills.

    Args:
        read: function as for `batch`.
        batch_size: rows per batch.
        capacity: maximum number of rows in the queue, more than `min_after_dequeue`.
        min_after_dequeue: minimum number of rows to draw from, except at the end of the input.
        num_threads: threads that call `read` at the same time.
        seed: seed of the order. With one thread and a seed, the same input gives the same batches,
            because rows are then drawn only from a full queue. Several threads have no fixed order.
        **options: `enqueue_many`, `allow_smaller_final_batch` and `runners`, as for `batch`.

    Returns:
        A pipeline to open with `with`.

    Raises:
        ValueError: the capacity is not more than `min_after_dequeue`.
    """
    return shuffle_batch_join(
        [read] * num_threads,
        batch_size,
        capacity=capacity,
        min_after_dequeue=min_after_dequeue,
        seed=seed,
        **options,
    )


def shuffle_batch_join(
    reads: Sequence[Read],
    batch_size: int,
    *,
    capacity: int,
    min_after_dequeue: int,
    seed: int | None = None,
    **options: Unpack[BatchOptions],
) -> Batches:
    """As `shuffle_batch`, with one thread per function; `turns` as for `batch_join`."""
    if not 0 <= min_after_dequeue < capacity:
        raise ValueError(
            "shuffle_batch: expected capacity > min_after_dequeue >= 0, "
            f"got {capacity} and {min_after_dequeue}"
        )
    # A seeded draw must not depend on how far the reader is, so it waits until the queue is full.
    known = len(reads) == 1 or options.get("turns") is not None
    keep = capacity - 1 if seed is not None and known else min_after_dequeue

    def make_queue(dtypes: Any, shapes: Any, names: Any) -> Queue:
        return RandomShuffleQueue(
            capacity, keep, dtypes, shapes, names=names, seed=seed, name="shuffle_batch"
        )

    # Without a seed the order cannot be repeated.
    return Batches(reads, batch_size, make_queue, repeatable=seed is not None, **options)


@contextmanager
def csv_batches(
    files: str | Sequence[str],
    record_defaults: Sequence[Any],
    *,
    batch_size: int,
    transform: Callable[[list[Any]], Any] = tuple,
    num_threads: int = 1,
    num_epochs: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    min_after_dequeue: int = 1024,
    skip_header_lines: int = 0,
    encoding: str = "utf-8",
    compression: Compression = None,
    allow_smaller_final_batch: bool = False,
    on_damage: Damage = "raise",
    **decode_options: Any,
) -> Iterator[Batches]:
    """Read CSV files in threads, mix their rows, and iterate over batches.

    Use it as a context manager; it yields the batches. Quoted fields may contain line ends. Empty
    lines are skipped.

    Register the batches with `Saver` to resume inside an epoch. The resumed run gets the same
    batches as an uninterrupted run if the number of threads is the same and shuffling has a seed.

    Leaving the block, also early, ends all threads and closes all files. With one epoch each row is
    returned once. With several, the rows of two successive epochs may mix.

    Args:
        files: one or several paths, patterns or URLs, as for `match_files`. Files whose names end
            in `.gz` are decompressed.
        record_defaults: types and defaults of the columns, as for `decode_csv`.
        batch_size: rows per batch.
        transform: converts decoded columns; called in the reader threads with a list of one array
            per column, of up to 256 rows. Returns one array, or a tuple or dict of arrays, with the
            same rows in dimension 0. Stack columns that belong together: each returned array costs
            time for every batch.
        num_threads: threads that read and decode, each its own file.
        num_epochs: number of times each file is read; None repeats forever.
        shuffle: whether to shuffle files and rows. Otherwise one thread keeps their order, and
            several threads alternate by up to 256 rows, in the same order each time.
        seed: seed of the shuffling. The same files and number of threads give the same batches.
        min_after_dequeue: minimum number of rows that a row is drawn from.
        skip_header_lines: lines to skip at the beginning of each file.
        encoding: encoding of the files, as for `TextLineReader`.
        compression: compression of the files, as for `TextLineReader`.
        allow_smaller_final_batch: whether to return the last rows as a smaller batch; otherwise
            they are dropped.
        on_damage: handling of damaged files and malformed lines: "raise", or "skip" and count.
        **decode_options: more arguments for `decode_csv`.

    Yields:
        The batches: an iterable with the counters `rows_read`, `rows_skipped` and `wait_seconds`.

    Raises:
        NotFoundError: a file does not exist.
        DataLossError: a file is damaged, or its text does not have this encoding.
        InvalidArgumentError: a line is malformed. All of these errors name file and line.
        ValueError: no files, or other invalid arguments.

    Example:
        ::

            def split(columns):
                return np.stack(columns[:64], axis=1), columns[64]

            defaults = [np.float32(0)] * 64 + [np.int32(0)]
            with csv_batches(paths, defaults, batch_size=32, transform=split) as batches:
                for pixels, digits in batches:
                    ...
    """
    names = string_input_producer(
        match_files(files), num_epochs=num_epochs, shuffle=shuffle, seed=seed, name="csv_files"
    )
    # Without quotes a field cannot contain a line end, so lines are records.
    has_quotes = decode_options.get("use_quote_delim", True)
    readers = [
        TextLineReader(
            skip_header_lines,
            encoding=encoding,
            field_delim=decode_options.get("field_delim", ",") if has_quotes else None,
            compression=compression,
            on_damage=on_damage,
        )
        for _ in range(num_threads)
    ]
    decode_options.update(record_defaults=record_defaults, on_damage=on_damage)

    # Shuffling without a seed has no fixed order to preserve, so threads need not wait for turns.
    in_turn = num_threads > 1 and (seed is not None or not shuffle)
    turns = ReaderRoundRobin(num_threads) if in_turn else None

    def reads_of(place: int, reader: TextLineReader) -> Read:
        # The next file name is also taken in turn, since the order of files decides that of rows.
        queue: Any = names.queue if turns is None else RoundRobinNames(names.queue, turns, place)

        # `batches` is bound below, before any thread calls this function.
        return lambda: transform(_read_rows(reader, queue, decode_options, batches.count_skipped))

    join: Callable[..., Batches] = batch_join
    # Room for the rows to draw from, and for a batch in each thread.
    options: dict[str, Any] = {"capacity": min_after_dequeue + (num_threads + 2) * batch_size}
    if shuffle:
        join = shuffle_batch_join
        options.update(min_after_dequeue=min_after_dequeue, seed=seed)
    with ExitStack() as stack:
        for reader in readers:
            # Readers are reset after the threads have ended, in reverse order of entering.
            stack.callback(reader.reset)
        batches = join(
            [reads_of(place, reader) for place, reader in enumerate(readers)],
            batch_size,
            enqueue_many=True,
            allow_smaller_final_batch=allow_smaller_final_batch,
            runners=[names.runner],
            turns=turns,
            **options,
        )
        yield stack.enter_context(batches)


def _read_rows(
    reader: TextLineReader,
    queue: Any,
    decode_options: dict[str, Any],
    count_skipped: Callable[[int], None],
) -> list[Any]:
    """Return the columns of the next rows of one file, and count the skipped records."""
    # Counted in `finally`, because skipped records before an error count as well.
    before = reader.num_skipped()
    try:
        keys, lines = reader.read_up_to(queue, _ROWS_PER_READ)
    finally:
        count_skipped(reader.num_skipped() - before)
    if not all(lines):  # decode_csv would refuse an empty line as a record without fields
        keys = [key for key, line in zip(keys, lines, strict=True) if line]
        lines = [line for line in lines if line]
    columns = decode_csv(lines, keys=keys, **decode_options)
    # Malformed lines are skipped by `decode_csv`, so it returns fewer rows.
    count_skipped(len(lines) - len(columns[0]) if columns else 0)
    return columns
