"""Whole pipelines, from functions that read and from CSV files."""

import csv as standard_csv
import gc
import gzip
import os
import queue
import threading
import time
import traceback
from collections import Counter
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from strategies.errors import DataLossError, InvalidArgumentError, NotFoundError, OutOfRangeError
from strategies.input import readers
from strategies.input.batching import (
    batch,
    batch_join,
    csv_batches,
    shuffle_batch,
    shuffle_batch_join,
)
from strategies.input.csv import parser
from strategies.input.files import match_files
from strategies.input.producers import preload, string_input_producer
from strategies.input.readers import FixedLengthRecordReader
from strategies.input.runners import QueueRunner
from strategies.queues.queue_types import FIFOQueue

LIMIT = 20.0
AT_ONCE = 10.0  # seconds, on a machine that does much else; nothing here waits for that long
I32, F32 = np.int32, np.float32


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Every test ends with the threads and open files that it began with."""
    decode_csv_is_loaded()
    threads, files = set(threading.enumerate()), open_files()
    yield
    assert set(threading.enumerate()) <= threads
    if not open_files() <= files:
        gc.collect()
    assert open_files() <= files


def decode_csv_is_loaded():
    parser.decode_csv(["1"], [0])


def open_files():
    return set(os.listdir("/proc/self/fd"))


def source(rows, make=lambda value: value):
    """A function that returns one row per call, from any thread."""
    values, lock = iter(rows), threading.Lock()

    def read():
        with lock:
            for value in values:
                return make(value)
        raise OutOfRangeError("no more")

    return read


def shuffle(read, size, **options):
    return shuffle_batch(read, size, capacity=32, min_after_dequeue=16, **options)


def batches_of(pipeline):
    with pipeline as batches:
        return list(batches)


def test_batches_in_order():
    got = batches_of(batch(source(range(30)), 10))
    assert [values.tolist() for values in got] == [[*range(k, k + 10)] for k in (0, 10, 20)]


@pytest.mark.parametrize("make", [batch, shuffle])
@pytest.mark.parametrize("threads", [1, 10])
@pytest.mark.parametrize("smaller", [False, True])
@pytest.mark.parametrize("rows", [0, 7, 35, 300])
def test_every_row_once(make, threads, smaller, rows):
    pipeline = make(source(range(rows)), 10, num_threads=threads, allow_smaller_final_batch=smaller)
    got = batches_of(pipeline)
    assert [len(values) for values in got] == [10] * (rows // 10) + [rows % 10] * (
        smaller and rows % 10 > 0
    )
    values = Counter(np.concatenate([[], *got]).tolist())
    if smaller or not rows % 10:
        assert values == Counter(range(rows))
    else:
        assert not values - Counter(range(rows))
    assert pipeline.rows_read == rows
    assert pipeline.wait_seconds > 0


@pytest.mark.parametrize("make", [batch, shuffle])
def test_many_rows_at_a_time(make):
    chunks = [np.arange(start, start + 7) for start in range(0, 70, 7)]
    pipeline = make(source(chunks), 10, enqueue_many=True)
    values = np.concatenate(batches_of(pipeline))
    assert sorted(values.tolist()) == list(range(70))
    assert (values.tolist() == list(range(70))) == (make is batch)
    assert pipeline.rows_read == 70


@pytest.mark.parametrize("make", [batch, shuffle])
def test_forms(make):
    def row(value):
        return {"id": I32(value), "text": str(value), "pair": np.full(2, value, F32)}

    for got in batches_of(make(source(range(30), row), 10)):
        assert {key: (v.dtype, v.shape) for key, v in got.items()} == {
            "id": (I32, (10,)),
            "text": (object, (10,)),
            "pair": (F32, (10, 2)),
        }
        assert got["text"].tolist() == [str(value) for value in got["id"]]
        assert np.array_equal(got["pair"][:, 1], got["id"])
    for numbers, texts in batches_of(make(source(range(30), lambda v: [v, str(v)]), 10)):
        assert texts.tolist() == [str(value) for value in numbers]


def test_shuffle_depends_on_the_seed():
    def order(seed, threads=1):
        rows = source([np.arange(k, k + 13) for k in range(0, 1300, 13)])
        options = {"num_threads": threads, "enqueue_many": True}
        return np.concatenate(batches_of(shuffle(rows, 10, seed=seed, **options))).tolist()

    first = order(1)
    assert sorted(first) == list(range(1300))
    assert first not in (list(range(1300)), order(2))
    for _ in range(3):
        assert order(1) == first
    assert sorted(order(1, threads=3)) == list(range(1300))


def test_rows_are_drawn_from_at_least_the_minimum():
    got = np.concatenate(batches_of(shuffle(source(range(320)), 10, seed=None)))
    # Row n can leave at place p only if it has come in: at most 32 wait, 10 are with the batch
    # thread, and so never more than that ahead of its place.
    assert (got - np.arange(320) <= 32 + 10).all()
    assert not np.array_equal(got, np.arange(320))


def test_join_gives_each_function_a_thread():
    names = set()

    def reader(start):
        rows = source(range(start, start + 50))

        def read():
            names.add(threading.current_thread().name)
            return rows()

        return read

    for join, options in ((batch_join, {}), (shuffle_batch_join, {"min_after_dequeue": 5})):
        names.clear()
        got = batches_of(join([reader(k) for k in (0, 50, 100)], 10, capacity=20, **options))
        assert sorted(np.concatenate(got).tolist()) == list(range(150))
        assert len(names - {threading.current_thread().name}) == 3


@pytest.mark.parametrize("sizes", [(0, 10), (0, 0, 7, 0, 3), (10, 0), (0, 0)])
@pytest.mark.parametrize("join", [batch_join, shuffle_batch_join])
def test_functions_without_any_row_do_not_end_the_others(join, sizes):
    starts = np.cumsum((0, *sizes))
    reads = [source(range(k, k + n)) for k, n in zip(starts, sizes, strict=False)]
    options = {"min_after_dequeue": 2} if join is shuffle_batch_join else {}
    got = batches_of(join(reads, 2, capacity=8, **options))
    assert sorted(np.concatenate([[], *got]).tolist()) == list(range(sum(sizes)))


@pytest.mark.parametrize("after", [0, 1, 17])
@pytest.mark.parametrize("threads", [1, 4])
def test_an_exception_reaches_the_consumer(after, threads):
    rows = source(range(after))

    def read():
        try:
            return rows()
        except OutOfRangeError:
            raise ZeroDivisionError("in the reader") from None

    with pytest.raises(ZeroDivisionError) as caught, batch(read, 2, num_threads=threads) as batches:
        for _ in batches:
            pass
    assert "in read" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_rows_that_differ_are_an_error():
    rows = source([1.0, 2.0, "three"])
    with pytest.raises(InvalidArgumentError, match="dtype"), batch(rows, 1) as batches:
        list(batches)
    rows = source([np.zeros(2), np.zeros(3)])
    with pytest.raises(InvalidArgumentError, match="shape"), batch(rows, 1) as batches:
        list(batches)


@pytest.mark.parametrize("make", [batch, shuffle])
@pytest.mark.parametrize("taken", [0, 1, 50])
def test_leaving_early_stops_threads_that_wait_for_room(make, taken):
    with make(lambda: np.ones(3), 4, num_threads=5) as batches:
        for _ in range(taken):
            next(batches)
        began = time.monotonic()
    assert time.monotonic() - began < AT_ONCE
    assert list(batches) == []
    batches.close()


def test_leaving_early_stops_a_read_that_waits_for_a_queue():
    numbers = FIFOQueue(10, "int64", [()])
    numbers.enqueue(1)
    never = threading.Event()
    runner = QueueRunner(numbers, [lambda: numbers.enqueue(1) if never.is_set() else wait()])

    def wait():
        # A source with nothing to give that ends when its queue is closed.
        while not numbers.is_closed():
            never.wait(0.01)
        raise OutOfRangeError("closed")

    with batch(numbers.dequeue, 2, runners=[runner]):
        began = time.monotonic()
    assert time.monotonic() - began < AT_ONCE


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("taken", [0, 1, 7])
def test_leaving_early_closes_the_files_of_readers(tmp_path, threads, taken):
    for shard in range(threads + 2):
        (tmp_path / f"{shard}.bin").write_bytes(bytes(range(200)))
    names = string_input_producer(match_files(str(tmp_path / "*.bin")))
    with ExitStack() as stack:
        readers = [stack.enter_context(FixedLengthRecordReader(2)) for _ in range(threads)]
        reads = [lambda reader=reader: reader.read(names.queue) for reader in readers]
        with batch_join(reads, 2, runners=[names.runner]) as batches:
            for _ in range(taken):
                keys, records = next(batches)
                assert all(key.startswith(str(tmp_path)) for key in keys)
                assert all(len(record) == 2 for record in records)
            began = time.monotonic()
    assert time.monotonic() - began < AT_ONCE


def test_an_error_in_the_block_comes_through():
    with pytest.raises(KeyError), batch(lambda: 1, 4, num_threads=3):
        raise KeyError


def test_an_error_nobody_asked_for_is_logged(caplog):
    rows, failed = source(range(2)), queue.Queue()

    def read():
        try:
            return rows()
        except OutOfRangeError:
            failed.put(threading.current_thread())
            raise ZeroDivisionError from None

    with batch(read, 1):
        thread = failed.get(timeout=LIMIT)
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert "ZeroDivisionError" in caplog.text


def test_an_error_in_a_runner_is_the_error_of_the_pipeline():
    numbers = FIFOQueue(10, "int64", [()])

    def fail():
        raise ZeroDivisionError("in the runner")

    pipeline = batch(numbers.dequeue, 2, runners=[QueueRunner(numbers, [fail])])
    with pytest.raises(ZeroDivisionError), pipeline:
        pass


def test_a_pipeline_is_opened_once():
    pipeline = batch(source(range(4)), 2)
    with pytest.raises(RuntimeError, match="with"):
        next(pipeline)
    assert len(batches_of(pipeline)) == 2
    with pytest.raises(RuntimeError, match="once"):
        pipeline.__enter__()


def test_arguments():
    with pytest.raises(ValueError, match="bad batch_size, expected an integer >= 1, got 0"):
        batch(source([1]), 0)
    with pytest.raises(ValueError, match="at least one function that reads"):
        batch(source([1]), 1, num_threads=0)
    with pytest.raises(ValueError, match="batch: bad capacity, expected at least 1.*, got 0"):
        batch(source([1]), 1, capacity=0)
    for capacity, keep in ((5, 5), (5, 6), (5, -1)):
        with pytest.raises(ValueError, match="capacity"):
            shuffle_batch(source([1]), 1, capacity=capacity, min_after_dequeue=keep)


# Padding.


def ragged(count):
    """Row n is n % 4 + 1 times the number n, and its text as often."""
    return source(range(count), lambda n: (np.full(n % 4 + 1, n), [str(n)] * (n % 4 + 1)))


@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("smaller", [False, True])
def test_dynamic_pad(join, smaller):
    options = {"dynamic_pad": True, "allow_smaller_final_batch": smaller}
    rows = ragged(11)
    got = batches_of(batch_join([rows], 3, **options) if join else batch(rows, 3, **options))
    assert [numbers.shape for numbers, _ in got] == [(3, 3), (3, 4), (3, 4)] + smaller * [(2, 3)]
    for start, (numbers, texts) in zip(range(0, 11, 3), got, strict=False):
        for row, value in enumerate(range(start, start + len(numbers))):
            size = value % 4 + 1
            assert numbers[row].tolist() == [value] * size + [0] * (len(numbers[row]) - size)
            assert texts[row].tolist() == [str(value)] * size + [""] * (len(texts[row]) - size)


def test_dynamic_pad_of_several_rows_at_a_time():
    chunks = [np.full((2, n % 3 + 1), n) for n in range(6)]
    got = batches_of(batch(source(chunks), 4, enqueue_many=True, dynamic_pad=True))
    assert [values.shape for values in got] == [(4, 2), (4, 3), (4, 3)]
    assert got[0].tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_shapes():
    rows = source(range(6), lambda n: np.zeros((n % 2 + 1, 3)))
    with pytest.raises(InvalidArgumentError, match=r"expected \[\?,4\]"):
        batches_of(batch(rows, 2, dynamic_pad=True, shapes=[(None, 4)]))
    rows = source(range(6), lambda n: np.zeros((n % 2 + 1, 3)))
    got = batches_of(batch(rows, 2, dynamic_pad=True, shapes=[(None, 3)]))
    assert [values.shape for values in got] == [(2, 2, 3)] * 3
    with pytest.raises(InvalidArgumentError, match=r"expected \[2\], got \[3\]"):
        batches_of(batch(source([np.zeros(3)]), 1, shapes=[(2,)]))
    with pytest.raises(ValueError, match="fully known"):
        batches_of(batch(source([np.zeros(3)]), 1, shapes=[(None,)]))


# CSV files.

DEFAULTS = [F32(0)] * 4 + [I32(0)]


def split(columns):
    return np.stack(columns[:4], axis=1), columns[4]


def shard(path, start, rows=20, bad=None):
    """A file of rows that can be told apart by their last column; `bad` = {row: line}."""
    lines = ["a,b,c,d,label"]
    lines += [f"{k},{2 * k},0.5,-1,{k}" for k in range(start, start + rows)]
    for row, line in (bad or {}).items():
        lines[row] = line
    text = "\n".join(lines) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


@pytest.fixture
def shards(tmp_path):
    names = [f"train-{n}.csv" + ".gz" * (n == 2) for n in range(5)]
    return [shard(tmp_path / name, 20 * n) for n, name in enumerate(names)]


def read_csv(files, size=8, **options):
    options = {"num_epochs": 1, "min_after_dequeue": 30, **options}
    return csv_batches(
        files, DEFAULTS, batch_size=size, transform=split, skip_header_lines=1, **options
    )


@pytest.mark.parametrize("way", [0, 1 << 62])
@pytest.mark.parametrize("threads", [1, 3, 10])
@pytest.mark.parametrize("shuffled", [False, True])
def test_csv_rows_come_once_per_epoch(shards, threads, shuffled, way, monkeypatch):
    monkeypatch.setattr(parser, "_fields_before_loop", way)
    options = {"num_threads": threads, "num_epochs": 3, "shuffle": shuffled}
    with read_csv(shards, allow_smaller_final_batch=True, **options) as batches:
        labels = []
        for features, label in batches:
            assert features.dtype == F32
            assert features.flags.c_contiguous
            expected = [[k, 2 * k, 0.5, -1] for k in label.tolist()]
            assert features.tolist() == expected
            labels += label.tolist()
        assert batches.rows_read == 300
    assert Counter(labels) == Counter([*range(100)] * 3)
    if threads == 1:
        assert (labels == [*range(100)] * 3) == (not shuffled)


def test_csv_order_depends_on_the_seed(shards):
    def order(seed):
        with read_csv(shards, seed=seed) as batches:
            return [label.tolist() for _, label in batches]

    assert order(1) == order(1) != order(2)


def test_csv_without_transform(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text("ann,\nbob,7\n")
    with csv_batches([str(path)], ["", I32(30)], batch_size=2, num_epochs=1) as batches:
        ((names, ages),) = list(batches)
    assert sorted(zip(names.tolist(), ages.tolist(), strict=True)) == [("ann", 30), ("bob", 7)]


# Files as spreadsheets write them: bytes, options, rows.
SHEETS = {
    "byte order mark": (b"\xef\xbb\xbfcat,1\ncat,2\n", {}, [("cat", 1), ("cat", 2)]),
    "byte order mark alone": (b"\xef\xbb\xbf", {}, []),
    "mark before a header": (b"\xef\xbb\xbfname\nx,1\n", {"skip_header_lines": 1}, [("x", 1)]),
    "line end in quotes": (
        b'"a cat\non a mat",1\r\n"say ""hi""\r\n\nbye",2\r\nx,3',
        {},
        [("a cat\non a mat", 1), ('say "hi"\n\nbye', 2), ("x", 3)],
    ),
    "quotes are no special characters": (
        b'"a,1\nb",2\n', {"use_quote_delim": False}, [('"a', 1), ('b"', 2)],
    ),
    "semicolons": (b'"a;\n,b";1\n', {"field_delim": ";"}, [("a;\n,b", 1)]),
    "latin-1": ("chat gâté,1\n".encode("latin-1"), {"encoding": "latin-1"}, [("chat gâté", 1)]),
    "a mark in latin-1 is text": (b"\xef\xbb\xbf,1\n", {"encoding": "latin-1"}, [("ï»¿", 1)]),
    "empty lines": (b"\ncat,1\r\n\r\ncat,2\n\n\n", {}, [("cat", 1), ("cat", 2)]),
    "nothing but empty lines": (b"\n\n", {}, []),
    "packed": (gzip.compress(b"cat,1\n"), {"compression": "GZIP"}, [("cat", 1)]),
    "a quote that nothing closes": (
        b'a,1\n"b,2\nc,3\n', {"on_damage": "skip"}, [("a", 1), ("c", 3)],
    ),
    "a quote that the next one does not close": (
        b'"b,2\n"c",3\n', {"on_damage": "skip"}, [("c", 3)],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("data", "options", "rows"), SHEETS.values(), ids=SHEETS)
@pytest.mark.parametrize("rows_before", [0, 20_000])  # several pieces of the file are read
def test_csv_files_of_spreadsheets(tmp_path, data, options, rows, rows_before):
    if options.get("compression") is None and not data.startswith(b"\xef\xbb\xbf"):
        delimiter = options.get("field_delim", ",")
        data = f"before{delimiter}0\n".encode() * rows_before + data
    path = tmp_path / "sheet.csv"
    path.write_bytes(data)
    options = {"allow_smaller_final_batch": True, "shuffle": False, "num_epochs": 1, **options}
    found = []
    with csv_batches(str(path), ["", I32(0)], batch_size=4096, **options) as batches:
        for names, numbers in batches:
            found += zip(names.tolist(), numbers.tolist(), strict=True)
    assert [row for row in found if row[0] != "before"] == rows


@pytest.mark.parametrize("piece", [7, 64 << 10])
@given(rows=some.lists(some.tuples(*[some.text('a,"\n', max_size=4)] * 2), max_size=8))
@settings(max_examples=100, deadline=None)
def test_records_are_those_that_the_standard_library_writes(tmp_path_factory, piece, rows):
    path = tmp_path_factory.mktemp("csv") / "x.csv"
    with path.open("w", newline="") as file:
        standard_csv.writer(file, lineterminator="\n").writerows(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_PIECE", piece)
        with csv_batches(
            str(path), ["", ""], batch_size=9, num_epochs=1, shuffle=False,
            allow_smaller_final_batch=True,
        ) as batches:  # fmt: skip
            found = [row for batch in batches for row in zip(*batch, strict=True)]
    assert found == rows


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("7,14,0", "Expect 5 fields but have 3"),
        ("7,14,0.5,7", "Expect 5 fields but have 4"),
        ("7,14,0.5,-1,7,8", "Expect 5 fields but have 6"),
        ("7,14,five,-1,7", "Field 2 in record 7 is not a valid float32: 'five'"),
        ("7,14,0.5,-1,7.5", "Field 4 in record 7 is not a valid int32: '7.5'"),
        ('7,14,0.5,"-1,7', "Quoted field has to end with quote followed by delim or end"),
    ],
)
@pytest.mark.parametrize("way", [0, 1 << 62])
def test_a_bad_line_is_an_error_with_file_and_line(tmp_path, line, what, threads, way, monkeypatch):
    monkeypatch.setattr(parser, "_fields_before_loop", way)
    files = [shard(tmp_path / f"{n}.csv", 20 * n) for n in range(3)]
    files.append(shard(tmp_path / "bad.csv", 0, bad={8: line}))
    with (
        pytest.raises(InvalidArgumentError, match=rf"{what}.*bad.csv:9\)$"),
        read_csv(files, num_threads=threads) as batches,
    ):
        list(batches)


def test_a_file_cut_in_its_last_line(tmp_path):
    path = shard(tmp_path / "cut.csv", 0)
    with open(path, "rb+") as file:
        file.truncate(os.path.getsize(path) - 6)
    with pytest.raises(InvalidArgumentError, match=r"cut.csv:21\)"), read_csv([path]) as batches:
        list(batches)


def test_missing_and_damaged_files(tmp_path, shards):
    with pytest.raises(NotFoundError, match="none.csv"), read_csv([*shards, "none.csv"]) as batches:
        list(batches)
    bad = tmp_path / "bad.csv.gz"
    bad.write_bytes(gzip.compress(b"1,2,3,4,5\n" * 1000)[:-20])
    with pytest.raises(DataLossError, match=r"bad.csv.gz:\d+"), read_csv([str(bad)]) as batches:
        list(batches)
    packed = tmp_path / "packed.csv"
    packed.write_bytes(gzip.compress(b"1,2,3,4,5\n"))
    words = r"starts like a gzip file, expected text; .*packed.csv"
    with pytest.raises(DataLossError, match=words), read_csv([str(packed)]) as batches:
        list(batches)
    with pytest.raises(ValueError, match="at least one"), read_csv([]):
        pass


@pytest.mark.parametrize("threads", [1, 3])
def test_csv_skips_and_counts(tmp_path, threads):
    bad = {3: "x,1,2,3,4", 4: "1,2", 20: '"'}
    files = [shard(tmp_path / f"{n}.csv", 20 * n, bad=bad if n else None) for n in range(3)]
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress(b"head\n" + b"7,14,0.5,-1,7\n" * 1000)[:-4])
    options = {"num_threads": threads, "on_damage": "skip", "allow_smaller_final_batch": True}
    with read_csv([*files, str(cut)], **options) as batches:
        labels = Counter(np.concatenate([label for _, label in batches]).tolist())
        assert batches.rows_skipped == 7
    labels.subtract({7: 1000})
    expected = Counter(range(60))
    for start in (20, 40):
        expected.subtract([start + 2, start + 3, start + 19])
    assert +labels == +expected


@pytest.mark.parametrize("good", [0, 5])
def test_csv_begins_behind_lines_that_are_all_damaged(tmp_path, good):
    path = tmp_path / "names.csv"
    path.write_text("no second field\n" * 600 + "".join(f"name {k},{k}\n" for k in range(good)))
    options = {"num_epochs": 1, "shuffle": False, "on_damage": "skip"}
    with csv_batches(str(path), ["", 0], batch_size=5, **options) as batches:
        names = [name for text, _ in batches for name in text]
    assert names == [f"name {k}" for k in range(good)]
    assert (batches.rows_read, batches.rows_skipped) == (good, 600)


def test_csv_of_patterns(shards, tmp_path):
    with read_csv(str(tmp_path / "train-*"), allow_smaller_final_batch=True) as batches:
        labels = np.concatenate([label for _, label in batches])
    assert sorted(labels.tolist()) == list(range(100))
    with pytest.raises(NotFoundError, match="none"), read_csv(str(tmp_path / "none-*")):
        pass


@pytest.mark.parametrize("threads", [1, 5])
def test_csv_left_early(shards, threads):
    for taken in (0, 1, 30):
        with read_csv(shards, num_epochs=None, num_threads=threads) as batches:
            for _, (_, labels) in zip(range(taken), batches, strict=False):
                assert len(labels) == 8
            began = time.monotonic()
        assert time.monotonic() - began < AT_ONCE


def test_rows_that_are_too_few_for_any_batch_are_warned_of_once(caplog):
    with batch(preload(np.arange(3), num_epochs=1, shuffle=False), 4) as batches:
        assert list(batches) == list(batches) == []
    words = "batch: the input gave no batch, its 3 rows are fewer than batch_size 4; allow_smaller"
    assert [words in message for message in caplog.messages] == [True]


def test_a_last_batch_that_is_left_out_is_not_warned_of(caplog):
    with batch(preload(np.arange(6), num_epochs=1, shuffle=False), 4) as batches:
        assert len(list(batches)) == 1
    assert not caplog.messages
