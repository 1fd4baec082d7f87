"""How fast input is, as ratios to what the standard library needs for the same, in one run.

    python benchmarks/input.py [--json] [--seconds 1] [--folder DIRECTORY]

Each line measures ours and the reference in turn, several times, and compares the best of each.
Nothing here waits, so that time is that of the processor, in which other programs count little. A
line fails if its ratio misses the goal; the exit status says whether any did.

    record   TFRecord with both checksums, 64 KiB per record, page cache warm, against `readinto`
    csv      a file to float32 columns, with `file:line` for each, against csv.reader + float +
             np.array; in rows of few columns, most of the time goes into the names of the lines
    decode   the same of lines in memory
    batch    dequeue_many(128) of 1 KiB items, against queue.Queue.get + np.stack
    pair     one enqueue and dequeue, against put and get of queue.Queue
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import queue
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from strategies.errors import OutOfRangeError
from strategies.input.csv import parser as decode
from strategies.input.readers import TextLineReader, TFRecordReader
from strategies.input.records import TFRecordWriter
from strategies.queues.queue_types import FIFOQueue

RECORD_BYTES = 64 << 10
RECORDS = 1024
ROWS = 20_000
ROWS_PER_READ = 1024
ITEMS = 2048
WAYS = ("ours", "reference")


class Case(NamedTuple):
    """Two ways to do the same, and how they should compare.

    Attributes:
        name: what is measured.
        ours: our way, once.
        reference: the other way, once.
        units: how much is done each time.
        unit: what the units are.
        goal: least speed of ours as a multiple of the reference's; 0 for none.
        prepare: what has to be done before each time, and is not measured.
    """

    name: str
    ours: Callable[[], object]
    reference: Callable[[], object]
    units: int
    unit: str
    goal: float
    prepare: Callable[[], object] = bool


def best_seconds(case: Case, seconds: float) -> tuple[float, float]:
    """Seconds that ours and the reference need, each the best of many turns."""
    case.prepare()
    case.ours()  # loads and compiles
    best = [float("inf")] * 2
    began = time.perf_counter()
    turns = 0
    while time.perf_counter() - began < 2 * seconds or turns < 5:
        for index, function in enumerate((case.ours, case.reference)):
            case.prepare()
            start = time.process_time()
            function()
            best[index] = min(best[index], time.process_time() - start)
        turns += 1
    return best[0], best[1]


def names_queue(path: str) -> FIFOQueue:
    """A queue of one file name."""
    names = FIFOQueue(1, str, [()])
    names.enqueue(path)
    names.close()
    return names


def drained(read: Callable[[], object]) -> None:
    """Call a function until its source ends."""
    with suppress(OutOfRangeError):
        while True:
            read()


def record_case(folder: str) -> Case:
    path = os.path.join(folder, "records")
    with TFRecordWriter(path) as writer:
        for index in range(RECORDS):
            writer.write(random.Random(index).randbytes(RECORD_BYTES))

    def read_records() -> None:
        reader, names = TFRecordReader(), names_queue(path)
        drained(lambda: reader.read_up_to(names, 8))

    def readinto() -> None:
        buffer = bytearray(1 << 20)
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    name = "record: TFRecord with CRC / readinto"
    return Case(name, read_records, readinto, os.path.getsize(path), "B", 0.5)


def csv_case(folder: str, columns: int, make: Callable[[random.Random], str]) -> Case:
    path = os.path.join(folder, f"table-{columns}")
    chance = random.Random(columns)
    with open(path, "w") as file:
        for _ in range(ROWS):
            file.write(",".join(make(chance) for _ in range(columns)) + "\n")
    defaults = [np.float32(0)] * columns
    decode._fields_before_loop = 0  # as in a process that has read some files

    def decode_lines() -> None:
        reader, names = TextLineReader(), names_queue(path)
        drained(lambda: decode.decode_csv(reader.read_up_to(names, ROWS_PER_READ)[1], defaults))

    def by_hand() -> None:
        with open(path, newline="") as file:
            rows = csv.reader(file)
            while table := list(itertools.islice(rows, ROWS_PER_READ)):
                np.array([[float(field) for field in row] for row in table], np.float32)

    name = f"csv: file of {columns} columns / csv.reader + float + np.array"
    return Case(name, decode_lines, by_hand, ROWS, "row", 5.0 if columns > 32 else 0.0)


def decode_case(columns: int, make: Callable[[random.Random], str]) -> Case:
    chance = random.Random(columns)
    lines = [",".join(make(chance) for _ in range(columns)) for _ in range(ROWS_PER_READ)]
    defaults = [np.float32(0)] * columns

    def by_hand() -> None:
        np.array([[float(field) for field in row] for row in csv.reader(lines)], np.float32)

    name = f"decode: {columns} columns / csv.reader + float + np.array"
    return Case(name, lambda: decode.decode_csv(lines, defaults), by_hand, len(lines), "row", 5.0)


def batch_case() -> Case:
    item = np.arange(256, dtype=np.float32)
    ours, theirs = FIFOQueue(-1, np.float32, [(256,)]), queue.Queue()

    def fill() -> None:
        ours.enqueue_many((np.broadcast_to(item, (ITEMS - ours.size(), 256)),))
        for _ in range(ITEMS - theirs.qsize()):
            theirs.put(item.copy())

    def dequeue_many() -> None:
        for _ in range(ITEMS // 128):
            ours.dequeue_many(128)

    def get() -> None:
        for _ in range(ITEMS // 128):
            np.stack([theirs.get() for _ in range(128)])

    name = "batch: dequeue_many(128) of 1 KiB / get + np.stack"
    return Case(name, dequeue_many, get, ITEMS, "item", 3.0, fill)


def pair_case(what: str, dtype: object, shape: tuple[int, ...], value: object) -> Case:
    ours, theirs = FIFOQueue(8, dtype, [shape]), queue.Queue(8)

    def enqueue_and_dequeue() -> None:
        for _ in range(ITEMS):
            ours.enqueue(value)
            ours.dequeue()

    def put_and_get() -> None:
        for _ in range(ITEMS):
            theirs.put(value)
            theirs.get()

    name = f"pair: enqueue + dequeue of {what} / put + get"
    # Ours copies, theirs hands over a reference: only small elements can be compared.
    goal = 0.0 if shape else 1 / 3
    return Case(name, enqueue_and_dequeue, put_and_get, ITEMS, "pair", goal)


def pixel(chance: random.Random) -> str:
    return str(chance.randint(0, 16))


def fraction(chance: random.Random) -> str:
    return f"{chance.random():.5f}"


def cases(folder: str) -> list[Case]:
    return [
        record_case(folder),
        csv_case(folder, 65, pixel),
        csv_case(folder, 10, fraction),
        decode_case(65, pixel),
        decode_case(10, fraction),
        batch_case(),
        pair_case("a number", np.float32, (), np.float32(1)),
        pair_case("1 KiB", np.float32, (256,), np.zeros(256, np.float32)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed of input, as ratios in one run.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each way")
    parser.add_argument("--folder", help="where files are written for a while")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for case in cases(folder):
            ours, reference = best_seconds(case, options.seconds)
            rows.append(
                {
                    "case": case.name,
                    "unit": case.unit,
                    "ours": case.units / ours,
                    "reference": case.units / reference,
                    "ratio": reference / ours,
                    "goal": case.goal,
                    "met": reference / ours >= case.goal,
                }
            )
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print(f"{'':58}{'ours':>14}{'reference':>14}{'ratio':>7}{'goal':>6}")
        for row in rows:
            speeds = "".join(f"{row[way]:>10.3g} {row['unit'] + '/s':<6}" for way in WAYS)
            goal = f"{row['goal']:.2f}" if row["goal"] else "-"
            verdict = "" if row["met"] else "  missed"
            print(f"{row['case']:<58}{speeds}{row['ratio']:>6.2f}{goal:>6}{verdict}")
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
