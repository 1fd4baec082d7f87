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
from strategies.queues.queue_types import FIFOQueue, PaddingFIFOQueue, Queue, RandomShuffleQueue

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["batch", "batch_join", "csv_batches", "shuffle_batch", "shuffle_batch_join"]

_ROWS_PER_READ = 256  # lines decoded at a time: enough that the work per call does not count


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
    """Batches of what a function returns, in the order of its calls if there is one thread.

    Args:
        read: called again and again by each thread; returns one value per component, bare or in a
            list, tuple or dict, and raises `OutOfRangeError` when there is no more. All elements
            have the dtypes and, unless they are padded, the shapes of the first. Or a
            `ShardedInput`: then `state` and `resume` know a place that any number of ranks goes on
            from; with one thread, and without `enqueue_many`.
        batch_size: rows per batch.
        num_threads: threads that call `read` at the same time.
        capacity: rows that wait to become batches.
        shapes: shape of each component of one row; None for those of the first.
        dynamic_pad: whether rows may differ in size; a batch is padded at the end with 0, False or
            empty text to its largest row, in all dimensions, or those that are None in `shapes`.
        **options: `enqueue_many`: whether `read` returns several rows at a time, counted by
            dimension 0. `allow_smaller_final_batch`: whether to return the rest that fills no
            batch; otherwise it is dropped. `runners`: of queues that `read` uses; they are started
            and stopped with the pipeline. `turns`: see `batch_join`.

    Returns:
        A pipeline to be opened with `with`. The first `read` is called there, by the caller.

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
        if num_threads != 1 or options.get("enqueue_many"):
            raise ValueError("batch: of a ShardedInput expected num_threads=1 and no enqueue_many")
        read = ShardedRows(read)
    return batch_join(
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
    """As `batch`, with one thread for each of several functions, so that each may have its file.

    Threads arrive in any order. With `turns=ReaderRoundRobin(len(reads))` they read at the same
    time, but what they have read is handed over by turns: where no two functions share a source,
    the same input then gives the same batches, and `state` and `resume` know a place inside an
    epoch. A function that is slow holds up the others.
    """

    def make_queue(dtypes: Any, first_shapes: Any, names: Any) -> Queue:
        if dynamic_pad:
            padded: Any = shapes or [(None,) * len(shape) for shape in first_shapes]
            return PaddingFIFOQueue(capacity, dtypes, padded, names=names, name="batch")
        known: Any = shapes or first_shapes
        return FIFOQueue(capacity, dtypes, known, names=names, name="batch")

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
    """Batches of what a function returns, drawn at random from a queue.

    Args:
        read: as for `batch`.
        batch_size: rows per batch.
        capacity: most rows in the queue, more than `min_after_dequeue`.
        min_after_dequeue: rows from which the next is drawn, at least; fewer only at the end.
        num_threads: threads that call `read` at the same time.
        seed: of the order. With one thread and a seed, the same input gives the same batches: rows
            are then drawn only while the queue is full. Several threads arrive in any order.
        **options: `enqueue_many`, `allow_smaller_final_batch` and `runners`, as for `batch`.

    Returns:
        A pipeline to be opened with `with`.

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
    """As `shuffle_batch`, with one thread for each of several functions; `turns` as there."""
    if not 0 <= min_after_dequeue < capacity:
        raise ValueError(
            "shuffle_batch: capacity must be more than min_after_dequeue, and that at least 0, "
            f"got {capacity} and {min_after_dequeue}"
        )
    # What a draw finds must not depend on how far the reader happens to be.
    known = len(reads) == 1 or options.get("turns") is not None
    keep = capacity - 1 if seed is not None and known else min_after_dequeue

    def make_queue(dtypes: Any, shapes: Any, names: Any) -> Queue:
        return RandomShuffleQueue(
            capacity, keep, dtypes, shapes, names=names, seed=seed, name="shuffle_batch"
        )

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

    It is a context manager that yields the batches. Quoted fields may contain line ends; empty
    lines are skipped.

    `Saver` takes the batches as a thing: with a seed where rows are shuffled, and the same number
    of threads, a run that was interrupted inside an epoch goes on with the batches of one that was
    not.

    The end of the block, also an early one, ends all threads and closes all files. With one epoch
    each row comes once; with several, rows of two epochs may mix where these meet.

    Args:
        files: one or several paths, patterns or URLs, as for `match_files`; those that end in
            `.gz` are unpacked.
        record_defaults: types and defaults of the columns, as for `decode_csv`.
        batch_size: rows per batch.
        transform: what becomes of decoded columns, called in the reader threads with a list of one
            array per column and some hundred rows; returns one array, or a tuple or dict of arrays,
            with the same rows in dimension 0. Stack columns that belong together: each array of
            the result costs time for every batch.
        num_threads: threads that read and decode, each another file.
        num_epochs: how often each file is read; None for no end.
        shuffle: whether to shuffle files and rows; otherwise they keep their order if there is one
            thread, and several hand over some hundred rows by turns, in the same order each time.
        seed: of the shuffling. The same files and number of threads then give the same batches.
        min_after_dequeue: rows among which a row is drawn, at least.
        skip_header_lines: lines at the beginning of each file to pass over.
        encoding: encoding of the files, as for `TextLineReader`.
        compression: compression of the files, as for `TextLineReader`.
        allow_smaller_final_batch: whether to return the rest that fills no batch; otherwise it is
            dropped.
        on_damage: what to do about damaged files and lines that do not fit: "raise", or "skip" and
            count.
        **decode_options: more arguments for `decode_csv`.

    Yields:
        The batches: an iterable that counts `rows_read`, `rows_skipped` and `wait_seconds`.

    Raises:
        NotFoundError: a file does not exist.
        DataLossError: a file is damaged, or its text does not have this encoding.
        InvalidArgumentError: a line does not fit; like the others it names file and line.
        ValueError: no files, or other arguments that are wrong.

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

    # Without a seed the order is another one each time anyway, and nobody need wait for a turn.
    in_turn = num_threads > 1 and (seed is not None or not shuffle)
    turns = ReaderRoundRobin(num_threads) if in_turn else None

    def reads_of(place: int, reader: TextLineReader) -> Read:
        queue: Any = names.queue if turns is None else RoundRobinNames(names.queue, turns, place)

        return lambda: transform(_read_rows(reader, queue, decode_options, batches.count_skipped))

    join: Callable[..., Batches] = batch_join
    options: dict[str, Any] = {"capacity": min_after_dequeue + (num_threads + 2) * batch_size}
    if shuffle:
        join = shuffle_batch_join
        options.update(min_after_dequeue=min_after_dequeue, seed=seed)
    with ExitStack() as stack:
        for reader in readers:
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
    before = reader.num_skipped()
    try:
        keys, lines = reader.read_up_to(queue, _ROWS_PER_READ)
    finally:
        count_skipped(reader.num_skipped() - before)
    if not all(lines):  # decode_csv would refuse an empty line as a record without fields
        keys = [key for key, line in zip(keys, lines, strict=True) if line]
        lines = [line for line in lines if line]
    columns = decode_csv(lines, keys=keys, **decode_options)
    count_skipped(len(lines) - len(columns[0]) if columns else 0)
    return columns
