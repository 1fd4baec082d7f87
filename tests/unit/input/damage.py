"""Read many damaged files, and say what came of it.

    python tests/unit/input/damage.py [--files 100000] [--seed 0] [--folder DIRECTORY]

Each file is a good one in which bytes were changed, cut, inserted, repeated or replaced by numbers
that are dangerous as lengths, also with checksums that are right. Prints one line of JSON: how
many files were read, which errors they gave, and by how many MiB the memory of the process grew.
Any error that is not documented, and any TFRecord that nobody wrote, ends it with a traceback.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import random
import resource
import struct
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable

import numpy as np

from strategies.errors import DataLossError, InvalidArgumentError, OutOfRangeError
from strategies.input.csv import parser as csv
from strategies.input.readers import (
    FixedLengthRecordReader,
    TextLineReader,
    TFRecordReader,
    WholeFileReader,
)
from strategies.input.records import frame
from strategies.queues.queue_types import FIFOQueue

RECORDS = [b"", b"abc", bytes(range(256)) * 3, b"x" * 1000]
GOOD_RECORDS = b"".join(map(frame, RECORDS * 2))
HEADER = "a,b,c\n"
GOOD_CSV = (HEADER + "".join(f'{n},{n / 7:.5f},"text ""{n}"""\n' for n in range(60))).encode()
NUMBERS_CSV = (HEADER + "".join(f"{n},{n / 7:.5f},{-n}e-3\n" for n in range(60))).encode()
LENGTHS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1, 16 << 20]
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "GZIP": lambda data: gzip.compress(data, 1),
    "ZLIB": lambda data: zlib.compress(data, 1),
}


def bomb(piece: bytes, times: int) -> bytes:
    """Much that takes little, made without taking much."""
    pack = zlib.compressobj(wbits=31)
    return b"".join(pack.compress(piece) for _ in range(times)) + pack.flush()


BOMBS = [bomb(bytes(1 << 20), 96), bomb(b"1,2,3\n" * 10_000, 20)]


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Change some bytes."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        at = chance.randrange(len(changed) + 1)
        size = chance.choice([1, 1, 2, 8, 40])
        way = chance.randrange(6)
        if way == 0 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif way == 1:
            del changed[at:]
        elif way == 2:
            del changed[at : at + size]
        elif way == 3:
            changed[at:at] = chance.randbytes(size)
        elif way == 4:
            changed[at:at] = changed[at : at + 10 * size] * chance.choice([1, 3])
        else:
            changed[at : at + 8] = struct.pack("<Q", chance.choice(LENGTHS))
    return bytes(changed)


def lying(chance: random.Random) -> bytes:
    """Records of which one says a wrong length, with a right checksum."""
    start = chance.choice([0, 16, 35])
    packed = struct.pack("<Q", chance.choice(LENGTHS))
    return GOOD_RECORDS[:start] + packed + frame(packed)[-4:] + GOOD_RECORDS[start + 12 :]


def read_all(reader, path: str, use: Callable[[list, list], None]) -> None:
    queue = FIFOQueue(1, str, [()])
    queue.enqueue(path)
    queue.close()
    while True:
        use(*reader.read_up_to(queue, 64))


def written(_: list, values: list) -> None:
    for value in values:
        assert value in RECORDS, value


def read_records(path: str, compression: str, damage: str) -> None:
    read_all(TFRecordReader(compression=compression, on_damage=damage), path, written)


def read_csv(path: str, compression: str, damage: str, defaults: list) -> None:
    def use(keys: list, lines: list) -> None:
        columns = csv.decode_csv(lines, defaults, keys=keys, on_damage=damage)
        assert len({len(column) for column in columns}) == 1

    read_all(TextLineReader(1, compression=compression, on_damage=damage), path, use)


def read_bytes(path: str, compression: str, damage: str, hop: int) -> None:
    fixed = FixedLengthRecordReader(
        100, header_bytes=6, hop_bytes=hop, compression=compression, on_damage=damage
    )
    try:
        read_all(fixed, path, lambda keys, values: None)
    except OutOfRangeError:
        whole = WholeFileReader(compression=compression, on_damage=damage)
        read_all(whole, path, lambda keys, values: None)


def read_one(path: str, chance: random.Random) -> None:
    """Write one damaged file and read it to its end."""
    compression = chance.choice(["", "", "GZIP", "ZLIB"])
    damage = chance.choice(["raise", "skip"])
    kind = chance.choice(["records", "lying", "csv", "numbers", "bytes"])
    good = {"csv": GOOD_CSV, "numbers": NUMBERS_CSV}.get(kind, GOOD_RECORDS)
    if kind == "lying":
        data = PACK[compression](lying(chance))
    elif compression and chance.random() < 0.002:
        compression, data = "GZIP", chance.choice(BOMBS)
        if chance.random() < 0.5:
            data = mutated(data, chance)
    elif chance.random() < 0.5:
        data = PACK[compression](mutated(good, chance))
    else:
        data = mutated(PACK[compression](good), chance)
    with open(path, "wb") as file:
        file.write(data)
    if kind in ("records", "lying"):
        read_records(path, compression, damage)
    elif kind == "bytes":
        read_bytes(path, compression, damage, chance.choice([0, 7, 1000]))
    elif kind == "csv":
        read_csv(path, compression, damage, [0, 0.0, ""])
    else:
        read_csv(path, compression, damage, [0, np.float64(0), np.array([], "float32")])


def megabytes() -> float:
    """The most memory that the process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    logging.disable()
    chance = random.Random(options.seed)
    for _ in range(257):  # 4 million fields, after which the compiled loop begins
        csv.decode_csv(["0" + ",0" * 1023] * 16, [0] * 1024)
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = os.path.join(folder, "file")
        before = megabytes()
        for _ in range(options.files):
            try:
                read_one(path, chance)
            except (OutOfRangeError, DataLossError, InvalidArgumentError) as error:
                outcomes[type(error).__name__] += 1
                if not isinstance(error, OutOfRangeError) and path not in str(error):
                    raise
    grown = megabytes() - before
    print(json.dumps({"files": options.files, "errors": outcomes, "grown_mib": round(grown, 1)}))


if __name__ == "__main__":
    main()
