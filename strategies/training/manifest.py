"""The manifest of a checkpoint: which tensor lies in which file, how long, with which checksum.

`manifest.json` is written last and is what makes a checkpoint complete. It is a JSON object:

    schema           format version of this file, an integer
    library          version of the library that wrote it
    step             training step, an integer >= 0
    sequence         place in the order of writing, so that "newest" does not depend on clocks
    world_size       ranks of the run that wrote it
    checksum         algorithm of every checksum below: "crc32" (of zlib)
    files            file name -> length in bytes
    tensors          tensor name -> {file, shape, dtype, checksum of the tensor's bytes}
    metadata         the user's JSON object
    written          when, in seconds since 1970, for those who keep one every so many hours
    metric           how good the model is, a number or null
    self_checksum    checksum of all the above in canonical JSON

A file is hostile until it is checked: lengths before memory is allocated, file names before they
are opened.
"""

from __future__ import annotations

import json
import math
import re
import stat
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from collectives import __version__
from strategies import errors
from strategies.training.durable import explained

__all__ = [
    "DTYPES",
    "MAX_NDIM",
    "MAX_SEQUENCE",
    "MAX_STEP",
    "NAME",
    "Manifest",
    "TensorEntry",
    "checksum",
    "inside",
    "json_copy",
    "read",
]

NAME = "manifest.json"
SCHEMA = 1
CHECKSUM = "crc32"
checksum = zlib.crc32  # of some bytes, and of what came before them
# 64 MiB hold some 400,000 tensors; a longer file is damage or an attempt to fill the memory.
MAX_BYTES = 64 << 20
# NumPy 1 stops here; without a limit, the product of the extents could be made to take hours.
MAX_NDIM = 32
# A directory name of 15 digits at most sorts, prints and fits in JSON numbers everywhere.
MAX_STEP = 10**15
# The first place in the order of writing that a manifest cannot hold; the last one leaves no later.
MAX_SEQUENCE = 1 << 63
# Bytes of which NumPy can make an array, where it takes an extent of 0 for 1.
_MAX_NBYTES = int(np.iinfo(np.intp).max)
# No directory part, and no leading point, so that it is neither hidden nor "..".
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")

_NUMPY_HAS = (
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64"
)
DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in _NUMPY_HAS.split()},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""What a checkpoint can hold, by NumPy's name: the types that safetensors has words for."""


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `shape` in elements, `dtype` a key of `DTYPES`, C order."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    checksum: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`; see the module's text for the fields."""

    step: int
    sequence: int
    world_size: int
    files: Mapping[str, int]
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, Any]
    written: float = 0.0
    metric: float | None = None

    def encode(self) -> bytes:
        """Give the bytes of the file."""
        body = {"schema": SCHEMA, "library": __version__, "checksum": CHECKSUM, **asdict(self)}
        sealed = {**body, "self_checksum": checksum(_canonical(body))}
        return (json.dumps(sealed, indent=1, allow_nan=False) + "\n").encode()


def read(directory: Path) -> Manifest:
    """Read and check the manifest of the checkpoint in `directory`, and its files' lengths.

    Raises:
        NotFoundError: the manifest or a file that it names does not exist.
        DataLossError: the manifest is damaged or unsafe, or a file has another length.
        FailedPreconditionError: it was written by a newer version of the library.
    """
    path = inside(directory, NAME)
    with explained("restore", path), path.open("rb") as file:
        length = path.stat().st_size
        if length > MAX_BYTES:
            raise errors.DataLossError(
                f"restore: manifest is too long, expected at most {MAX_BYTES} bytes, got {length} "
                f"(file: {path})"
            )
        data = file.read(length)
    manifest = _decode(data, path)
    for name, nbytes in manifest.files.items():
        file_path = inside(directory, name)
        with explained("restore", file_path):
            found = file_path.stat().st_size
        if found != nbytes:
            raise errors.DataLossError(
                f"restore: file has the wrong length, expected {nbytes} bytes, "
                f"got {found} (file: {file_path})"
            )
    return manifest


def inside(directory: Path, name: str) -> Path:
    """Give the path of the regular file `name` in `directory`, never one outside of it.

    Raises:
        NotFoundError: it does not exist.
        DataLossError: the name has a directory part, or leads out of the directory by a link, or
            is not a regular file.
    """
    path = directory / name
    if not _FILE_NAME.fullmatch(name):
        raise errors.DataLossError(
            f"restore: unsafe file name, expected a plain name inside the checkpoint, "
            f"got {name[:100]!r} (checkpoint: {directory})"
        )
    with explained("restore", path):
        try:
            real = path.resolve(strict=True)
        except RuntimeError as error:  # a circle of links, before Python 3.13
            raise errors.DataLossError(f"restore: {error} (file: {path})") from error
        regular = stat.S_ISREG(real.stat().st_mode)
    if not real.is_relative_to(directory.resolve()) or not regular:
        raise errors.DataLossError(
            f"restore: unsafe file, expected a regular file inside the checkpoint, "
            f"got {real} (file: {path})"
        )
    return path


def json_copy(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Give what reading the metadata back would give, so that it comes back as it went in.

    Raises:
        InvalidArgumentError: JSON cannot hold it, or would change it (tuples, keys that are no
            strings, nan and infinity, NumPy scalars).
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


def _decode(data: bytes, path: Path) -> Manifest:
    """Check every field; what is wrong is named with the file."""
    try:
        body = json.loads(data)
        if not isinstance(body, dict):
            raise ValueError(f"expected an object, got {type(body).__name__}")
        if isinstance(body.get("schema"), int) and body["schema"] > SCHEMA:
            raise errors.FailedPreconditionError(
                f"restore: manifest has schema {str(body['schema'])[:50]}, this library reads "
                f"up to {SCHEMA} (file: {path}). Update the library"
            )
        seal = body.pop("self_checksum", None)
        if seal != checksum(_canonical(body)):
            raise ValueError("checksum of the manifest differs")
        return _checked(body)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = f"missing {error}" if isinstance(error, KeyError) else str(error)
        raise errors.DataLossError(
            f"restore: damaged manifest: {what[:300]} (file: {path})"
        ) from error


def _checked(body: dict[str, Any]) -> Manifest:
    schema = _count(body["schema"], "schema")
    if schema != SCHEMA or body["checksum"] != CHECKSUM:
        raise ValueError(f"unknown schema {schema} or checksum {body['checksum']!r}")
    if not isinstance(body["metadata"], dict):
        raise TypeError("metadata: expected an object")
    files = {name: _count(nbytes, f"length of {name}") for name, nbytes in body["files"].items()}
    tensors = {name: _entry(name, entry, files) for name, entry in body["tensors"].items()}
    return Manifest(
        step=_count(body["step"], "step", MAX_STEP),
        sequence=_count(body["sequence"], "sequence", MAX_SEQUENCE),
        world_size=_count(body["world_size"], "world_size"),
        files=files,
        tensors=tensors,
        metadata=body["metadata"],
        # Not there in what was written before these were.
        written=_finite(body.get("written", 0.0), "written"),
        metric=None if body.get("metric") is None else _finite(body["metric"], "metric"),
    )


def _entry(name: str, entry: dict[str, Any], files: dict[str, int]) -> TensorEntry:
    extents = entry["shape"]
    if not isinstance(extents, list) or len(extents) > MAX_NDIM:
        raise ValueError(f"shape of {name}: expected a list of at most {MAX_NDIM} extents")
    shape = tuple(_count(extent, f"shape of {name}") for extent in extents)
    if entry["dtype"] not in DTYPES or entry["file"] not in files:
        raise ValueError(f"{name}: unknown dtype {entry['dtype']!r} or file {entry['file']!r}")
    room = math.prod(extent or 1 for extent in shape) * DTYPES[entry["dtype"]].itemsize
    if room > _MAX_NBYTES:  # also where an extent of 0 makes it empty
        raise ValueError(f"shape of {name}: no array can have it, got {list(shape)}")
    result = TensorEntry(
        entry["file"], shape, entry["dtype"], _count(entry["checksum"], f"checksum of {name}")
    )
    if result.nbytes > files[result.file]:
        raise ValueError(f"{name}: longer than its file")
    return result


def _finite(value: Any, what: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{what}: expected a finite number, got {str(value)[:50]}")
    return float(value)


def _count(value: Any, what: str, end: int = 1 << 63) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise ValueError(f"{what}: expected an integer in 0..{end - 1}, got {str(value)[:50]}")
    return value
