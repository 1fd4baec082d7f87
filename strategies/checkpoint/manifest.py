"""Manifest of a checkpoint: file, offset and checksum of every slice.

`manifest.json` is written last and makes the checkpoint complete. It is a JSON object:

    schema           format version of this file, an integer
    library          version of the library that wrote it
    step             training step, an integer >= 0
    sequence         number in the order of writing, so that "newest" does not depend on clocks
    world_size       ranks of the run that wrote it
    checksum         algorithm of the slices' checksums: "crc32c"
    files            file name -> length in bytes
    tensors          tensor name -> {shape, dtype, slices}; a slice: {file, start, shape, checksum}
    metadata         the user's JSON object
    written          time in seconds since 1970, for `keep_every_n_hours`
    metric           quality of the model, a number or null
    self_checksum    CRC-32 of all the above in canonical JSON

The slices of a tensor hold each of its elements exactly once. Schema 1 can still be read: a tensor
had one file and one checksum, by "crc32" (of zlib).

Files are not trusted until they are checked: lengths before memory is allocated, file names before
they are opened.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from collectives import __version__
from strategies import errors
from strategies.checkpoint.boxes import Box, check_tiles, whole
from strategies.checkpoint.storage import Location, length, opened

__all__ = [
    "CHECKSUM",
    "DTYPES",
    "MAX_NDIM",
    "MAX_SEQUENCE",
    "MAX_STEP",
    "NAME",
    "Manifest",
    "SliceEntry",
    "TensorEntry",
    "adder",
    "json_copy",
    "key",
    "read",
]

NAME = "manifest.json"
SCHEMA = 2
# zlib's CRC-32 reaches 2 to 4 GB/s here, CRC32C by the processor's own instruction 6 to 16.
CHECKSUMS = {1: "crc32", 2: "crc32c"}
CHECKSUM = CHECKSUMS[SCHEMA]
# 64 MiB hold some 300,000 tensors; a longer file is damage or an attempt to exhaust memory.
MAX_BYTES = 64 << 20
# The limit of NumPy 1. Without a limit, a forged shape could make the product take hours.
MAX_NDIM = 32
# Directory names of at most 15 digits sort, print and fit in JSON numbers everywhere.
MAX_STEP = 10**15
# Exclusive limit of sequence numbers. A checkpoint with the last one would block later saves.
MAX_SEQUENCE = 1 << 63
# Largest array of NumPy in bytes. NumPy counts an extent of 0 as 1 in this check.
_MAX_NBYTES = int(np.iinfo(np.intp).max)
# No directory part, and no leading point, so that the file is neither hidden nor "..".
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")

_NUMPY_HAS = (
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64"
)
DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in _NUMPY_HAS.split()},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Supported dtypes by NumPy's name: the ones that safetensors can represent."""


@dataclass(frozen=True)
class SliceEntry:
    """A slice of a tensor in a file: its box, in C order, with its checksum."""

    file: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    checksum: int

    @property
    def box(self) -> Box:
        """Box of the elements."""
        return Box(self.start, self.shape)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: `shape` in elements, `dtype` a key of `DTYPES`, and its slices."""

    shape: tuple[int, ...]
    dtype: str
    slices: tuple[SliceEntry, ...]

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`; see the module docstring for the fields."""

    step: int
    sequence: int
    world_size: int
    files: Mapping[str, int]
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, Any]
    written: float = 0.0
    metric: float | None = None
    checksum: str = CHECKSUM

    def boxes(self) -> dict[str, Box]:
        """Return name -> box of all elements of each tensor."""
        return {name: whole(entry.shape) for name, entry in self.tensors.items()}

    def identity(self) -> int:
        """Return a number that other manifests do not have, apart from chance."""
        return zlib.crc32(self.encode())

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        body = {"schema": SCHEMA, "library": __version__, **asdict(self)}
        # Over canonical JSON, so that the checksum does not depend on the file's formatting.
        sealed = {**body, "self_checksum": zlib.crc32(_canonical(body))}
        # `allow_nan=False`: NaN and Infinity are not JSON, and other readers would reject them.
        return (json.dumps(sealed, indent=1, allow_nan=False) + "\n").encode()


def key(name: str, shape: tuple[int, ...], box: Box) -> str:
    """Return the name of a slice in its file, such as "w[0:4,2:3]".

    Args:
        name: name of the tensor.
        shape: shape of the tensor.
        box: box of the slice. A slice that is the whole tensor has the tensor's name.
    """
    if box == whole(shape):
        return name
    places = zip(box.start, box.shape, strict=True)
    return f"{name}[{','.join(f'{first}:{first + extent}' for first, extent in places)}]"


def adder(algorithm: str) -> Callable[[Any, int], int]:
    """Return a function that adds an array of uint8 to a checksum, which starts at 0."""
    if algorithm == "crc32":
        # zlib reads the array's buffer; `data.data` is its memoryview without a copy.
        return lambda data, value: zlib.crc32(data.data, value)
    extend = importlib.import_module("google_crc32c").extend
    return lambda data, value: int(extend(value, data))


def read(directory: Location) -> Manifest:
    """Read and check the manifest of a checkpoint, and the lengths of its files.

    Raises:
        NotFoundError: the manifest or one of its files does not exist.
        DataLossError: the manifest is damaged or unsafe, or a file has another length.
        FailedPreconditionError: a newer version of the library wrote the manifest.
    """
    path = directory / NAME
    # The length first: a forged manifest of gigabytes must not be read into memory.
    nbytes = length(directory, NAME)
    if nbytes > MAX_BYTES:
        raise errors.DataLossError(
            f"restore: manifest is too long, expected at most {MAX_BYTES} bytes, got {nbytes} "
            f"(file: {path})"
        )
    with opened(path) as file:
        data = file.read(nbytes)
    # The manifest's checksum does not prevent forgery, so every field is checked as well.
    manifest = _decode(data, path)
    for name, expected in manifest.files.items():
        # Before the name becomes part of a path.
        if not _FILE_NAME.fullmatch(name):
            raise errors.DataLossError(
                f"restore: unsafe file name, expected a plain name inside the checkpoint, "
                f"got {name[:100]!r} (checkpoint: {directory})"
            )
        found = length(directory, name)
        if found != expected:
            raise errors.DataLossError(
                f"restore: file has the wrong length, expected {expected} bytes, "
                f"got {found} (file: {directory / name})"
            )
    return manifest


def json_copy(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the metadata as JSON would return it, after a check that nothing changes.

    Raises:
        InvalidArgumentError: JSON cannot represent the metadata, or would change it (tuples, keys
            other than strings, nan and infinity, NumPy scalars).
    """
    try:
        copy = json.loads(json.dumps(metadata or {}, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.InvalidArgumentError(f"save: metadata is not JSON: {error}") from error
    if not isinstance(copy, dict) or copy != (metadata or {}):
        raise errors.InvalidArgumentError(
            "save: JSON would change the metadata, expected a dict of str keys, lists, dicts, "
            f"str, int, float, bool and None, got {str(metadata)[:200]}"
        )
    return copy


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _decode(data: bytes, path: Location) -> Manifest:
    """Check every field; errors name the field and the file."""
    try:
        body = json.loads(data)
        if not isinstance(body, dict):
            raise ValueError(f"expected an object, got {type(body).__name__}")
        # First, so that a newer schema is not reported as damage.
        if isinstance(body.get("schema"), int) and body["schema"] > SCHEMA:
            raise errors.FailedPreconditionError(
                f"restore: manifest has schema {str(body['schema'])[:50]}, this library reads "
                f"up to {SCHEMA} (file: {path}). Update the library"
            )
        seal = body.pop("self_checksum", None)
        if seal != zlib.crc32(_canonical(body)):
            raise ValueError("checksum of the manifest differs")
        return _check(body)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        # A `KeyError` has only the missing key as its text.
        what = f"missing {error}" if isinstance(error, KeyError) else str(error)
        raise errors.DataLossError(
            f"restore: damaged manifest: {what[:300]} (file: {path})"
        ) from error


def _check(body: dict[str, Any]) -> Manifest:
    schema = _count(body["schema"], "schema")
    if CHECKSUMS.get(schema) != body["checksum"]:
        raise ValueError(f"unknown schema {schema} or checksum {body['checksum']!r}")
    if not isinstance(body["metadata"], dict):
        raise TypeError("metadata: expected an object")
    files = {name: _count(nbytes, f"length of {name}") for name, nbytes in body["files"].items()}
    return Manifest(
        step=_count(body["step"], "step", MAX_STEP),
        sequence=_count(body["sequence"], "sequence", MAX_SEQUENCE),
        world_size=_count(body["world_size"], "world_size"),
        files=files,
        tensors={name: _entry(name, one, files, schema) for name, one in body["tensors"].items()},
        metadata=body["metadata"],
        # Absent in manifests of versions before these fields.
        written=_finite(body.get("written", 0.0), "written"),
        metric=None if body.get("metric") is None else _finite(body["metric"], "metric"),
        checksum=body["checksum"],
    )


def _entry(name: str, entry: dict[str, Any], files: dict[str, int], schema: int) -> TensorEntry:
    shape = _extents(entry["shape"], f"shape of {name}")
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name}: unknown dtype {entry['dtype']!r}")
    itemsize = DTYPES[entry["dtype"]].itemsize
    # Python integers do not overflow, so a forged shape cannot wrap around to a small size.
    room = math.prod(extent or 1 for extent in shape) * itemsize
    if room > _MAX_NBYTES:  # NumPy refuses such a shape even if an extent of 0 makes it empty
        raise ValueError(f"shape of {name}: too large for an array, got {list(shape)}")
    if schema == 1:
        # Schema 1 had one slice per tensor, with file and checksum beside the shape.
        listed = [{**entry, "start": [0] * len(shape)}]
    elif not isinstance(listed := entry["slices"], list):
        raise ValueError(f"slices of {name}: expected a list")
    slices = tuple(
        SliceEntry(
            one["file"],
            _extents(one["start"], f"start in {name}"),
            _extents(one["shape"], f"shape in {name}"),
            _count(one["checksum"], f"checksum of {name}"),
        )
        for one in listed
    )
    try:
        # Also with a valid checksum: a gap would leave uninitialized memory in the array.
        check_tiles(shape, [one.box for one in slices])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    for one in slices:
        if one.file not in files:
            raise ValueError(f"{name}: unknown file {one.file!r}")
        # No slice may claim more memory than its file has bytes.
        if one.box.size * itemsize > files[one.file]:
            raise ValueError(f"{name}: longer than its file")
    return TensorEntry(shape, entry["dtype"], slices)


def _extents(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_NDIM:
        raise ValueError(f"{what}: expected a list of at most {MAX_NDIM} extents")
    return tuple(_count(extent, what) for extent in value)


def _finite(value: Any, what: str) -> float:
    # `type` instead of `isinstance`, because JSON's `true` would count as the number 1.
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{what}: expected a finite number, got {str(value)[:50]}")
    return float(value)


def _count(value: Any, what: str, end: int = 1 << 63) -> int:
    # Not isinstance, because bool is a subclass of int.
    if type(value) is not int or not 0 <= value < end:
        raise ValueError(f"{what}: expected an integer in 0..{end - 1}, got {str(value)[:50]}")
    return value
