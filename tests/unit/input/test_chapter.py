"""The examples from which people learn queues, with their numbers, built from the single parts."""

import threading
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest

from strategies.errors import CancelledError, OutOfRangeError
from strategies.input.coordinator import Coordinator
from strategies.input.csv.parser import decode_csv
from strategies.input.producers import string_input_producer
from strategies.input.readers import TextLineReader
from strategies.input.runners import QueueRunner, start_queue_runners
from strategies.queues.queue_types import FIFOQueue, RandomShuffleQueue

LIMIT = 20.0


def test_a_queue_of_pairs():
    queue = FIFOQueue(10, "float32", [(2,)], name="q")
    for pair in ([1.0, 2.0], [3.0, 4.0]):
        queue.enqueue([pair])
    queue.enqueue_many([[[5.0, 6.0], [7.0, 8.0], [9.0, 10.0]]])
    assert queue.dequeue().tolist() == [1, 2]
    assert queue.dequeue_many(2).tolist() == [[3, 4], [5, 6]]
    assert queue.size() == 2
    queue.close()
    with pytest.raises(CancelledError):
        queue.enqueue([[11.0, 12.0]])
    with pytest.raises(OutOfRangeError):
        queue.dequeue_many(3)
    assert queue.dequeue_up_to(3).tolist() == [[7, 8], [9, 10]]
    with pytest.raises(OutOfRangeError):
        queue.dequeue()


def test_a_queue_of_tuples():
    queue = FIFOQueue(10, ["int32", "float32"], [(), (3, 2)])
    queue.enqueue((10, [[1, 2], [3, 4], [5, 6]]))
    queue.enqueue((11, [[2, 4], [6, 8], [0, 2]]))
    queue.enqueue((12, [[3, 6], [9, 2], [5, 8]]))
    first, table = queue.dequeue()
    assert (first, table.tolist()) == (10, [[1, 2], [3, 4], [5, 6]])
    numbers, tables = queue.dequeue_many(2)
    assert numbers.tolist() == [11, 12]
    assert tables.shape == (2, 3, 2)
    assert tables[1].tolist() == [[3, 6], [9, 2], [5, 8]]


def instances(path, threads, blank):
    """Rows of a CSV file with the columns x1, x2, target, mixed by a queue; yields batches of 2."""
    coord = Coordinator()
    names = string_input_producer([str(path)], num_epochs=1)
    reader = TextLineReader(skip_header_lines=1)
    queue = RandomShuffleQueue(10, 2, ["float32", "int32"], [(2,), ()], name="instance_queue")

    def read_and_push():
        key, line = reader.read(names.queue)
        x1, x2, target = decode_csv(
            line, [np.float32(-1), np.float32(-1), np.int32(-1)], keys=[key], blank_is_missing=blank
        )
        queue.enqueue((np.stack([x1, x2]), target))

    runner = QueueRunner(queue, [read_and_push] * threads)
    start_queue_runners([names.runner, runner], coord)
    batches = []
    try:
        while True:
            batches.append(queue.dequeue_up_to(2, timeout=LIMIT))
    except OutOfRangeError:
        pass
    finally:
        coord.request_stop()
        coord.join(stop_grace_period_secs=LIMIT)
    return batches


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("missing", ["", " "])
def test_a_file_with_a_missing_value(tmp_path, threads, missing):
    path = tmp_path / "my_test.csv"
    path.write_text(f"x1,x2,target\n1.,{missing},0\n4.,5.,1\n7.,8.,0\n")
    before = threading.active_count()
    batches = instances(path, threads, blank=bool(missing))
    assert [len(target) for _, target in batches] == [2, 1]
    rows = Counter(
        (*x.tolist(), int(t))
        for features, targets in batches
        for x, t in zip(features, targets, strict=True)
    )
    assert rows == Counter([(1, -1, 0), (4, 5, 1), (7, 8, 0)])
    assert threading.active_count() == before


def test_what_a_blank_is_without_being_asked(tmp_path):
    path = tmp_path / "my_test.csv"
    path.write_text("x1,x2,target\n1., ,0\n")
    with pytest.raises(
        ValueError,
        match=r"Field 1 .* not a valid float32: ' '; blank_is_missing=True .*\(.*my_test.csv:2\)",
    ):
        instances(path, 1, blank=False)


def test_five_readers_on_sharded_files(tmp_path):
    """Each thread has a reader of its own; they share the files, and no row comes twice."""
    for shard in range(7):
        rows = "".join(f"{100 * shard + n},{n}\n" for n in range(30))
        (tmp_path / f"shard-{shard}.csv").write_text("id,value\n" + rows)
    coord = Coordinator()
    paths = sorted(map(str, tmp_path.glob("*.csv")))
    names = string_input_producer(paths, num_epochs=2)
    queue = RandomShuffleQueue(50, 20, "int64", [(2,)])
    readers = [TextLineReader(1) for _ in range(5)]

    def filler(reader):
        def read_and_push():
            _, lines = reader.read_up_to(names.queue, 8)
            columns = decode_csv(lines, [np.int64(0), np.int64(0)])
            queue.enqueue_many((np.stack(columns, axis=1),))

        return read_and_push

    runner = QueueRunner(queue, [filler(reader) for reader in readers])
    start_queue_runners([names.runner, runner], coord)
    seen = []
    with suppress(OutOfRangeError):
        while True:
            seen += queue.dequeue_up_to(16, timeout=LIMIT).tolist()
    coord.request_stop()
    coord.join(stop_grace_period_secs=LIMIT)
    expected = Counter((100 * s + n, n) for s in range(7) for n in range(30))
    assert Counter(map(tuple, seen)) == Counter(dict.fromkeys(expected, 2))
    assert sum(reader.num_records_produced() for reader in readers) == 420
    assert sum(reader.num_work_units_completed() for reader in readers) == 14
