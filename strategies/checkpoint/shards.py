"""Shard files in the safetensors format.

::

    8 bytes      length of the header, little-endian
    header       JSON: name -> {dtype, shape, data_offsets}, padded with spaces to 8 bytes
    bytes        the slices without gaps, those with larger elements first

Checksums are computed while the bytes are in the processor's caches, so a file is written once and
read once. A damaged or hostile file cannot decide how much memory is allocated: its header is
compared with the manifest first, and the manifest's sizes were checked before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strategies import errors
from strategies.checkpoint.boxes import Box, Slice, inside, overlap, whole
from strategies.checkpoint.manifest import (
    CHECKSUM,
    DTYPES,
    MAX_NDIM,
    SliceEntry,
    TensorEntry,
    adder,
    key,
)
from strategies.checkpoint.storage import Location, length, opened
from strategies.core import array_ops

__all__ = ["NamedSlice", "Target", "Targets", "as_bytes", "as_slices", "empty", "read", "write"]

# Bytes per write, read and checksum call: small enough to be in the core's caches for the checksum,
# A chunk is also the unit after which `AsyncWriter.throttle` pauses.
# and large enough that a background thread seldom requests Python's lock.
_CHUNK = 1 << 20
# Limit of the safetensors library, in bytes.
_MAX_HEADER = 100_000_000
# Exceptions from the rule of `_word`.
_WORDS = {"bool": "BOOL", "complex64": "C64", "bfloat16": "BF16"}

Array = npt.NDArray[Any]


class NamedSlice(NamedTuple):
    """A slice of a tensor to write to a file.

    Attributes:
        name: name of the tensor.
        shape: shape of the whole tensor.
        box: box of the slice.
        array: its elements, in C order.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    array: Array


class Target(NamedTuple):
    """Destination of some elements of a tensor when it is read: the box that `array` holds."""

    box: Box
    array: Array


Targets = Mapping[tuple[str, Box], Sequence[Target]]
"""Tensor name and box of a slice -> disjoint destinations of its elements."""


def as_slices(tensors: Mapping[str, npt.ArrayLike | Slice]) -> dict[str, Slice]:
    """Return the tensors as arrays that a file can hold: C order, native bytes; copied if needed.

    PyTorch tensors in host memory are detached. A whole array becomes a slice that covers it.

    Raises:
        InvalidArgumentError: the file format does not support a name or dtype, or an array is not
            in host memory.
    """
    found = {}
    for name, value in tensors.items():
        if not isinstance(name, str) or name in ("", "__metadata__") or not _is_text(name):
            raise errors.InvalidArgumentError(
                f"save: bad tensor name, expected a non-empty str other than '__metadata__', "
                f"got {name!r}"
            )
        part = value.array if isinstance(value, Slice) else value
        try:
            view = array_ops.host(part)
            array = np.asarray(part if view is None else view, order="C")
        except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: PyTorch's
            raise errors.InvalidArgumentError(
                f"save: {error} (tensor: {name}). Copy device arrays to the host first"
            ) from error
        if array.dtype.name not in DTYPES or array.ndim > MAX_NDIM:
            raise errors.InvalidArgumentError(
                f"save: unsupported array, expected at most {MAX_NDIM} dimensions of "
                f"{', '.join(DTYPES)}, got {array.ndim} of {array.dtype} (tensor: {name})"
            )
        # Converts foreign byte order to the machine's; no copy otherwise.
        array = array.astype(DTYPES[array.dtype.name], copy=False)
        if isinstance(value, Slice):
            found[name] = Slice(array, value.start, value.shape)
        else:
            found[name] = Slice(array, (0,) * array.ndim, array.shape)
    return found


def as_bytes(array: Array) -> npt.NDArray[np.uint8]:
    """Return the memory of a C-contiguous array of any dtype as a 1-D array of bytes."""
    # `reshape` first: NumPy cannot change the item size of an array of 0 dimensions.
    return array.reshape(-1).view(np.uint8)


def empty(name: str, shape: tuple[int, ...], dtype: str) -> Array:
    """Allocate an array for a tensor.

    Raises:
        ResourceExhaustedError: the array does not fit in memory.
    """
    try:
        return np.empty(shape, DTYPES[dtype])
    except MemoryError as error:
        nbytes = whole(shape).size * DTYPES[dtype].itemsize
        raise errors.ResourceExhaustedError(
            f"restore: out of memory, expected {nbytes} bytes free (tensor: {name})"
        ) from error


def write(
    put: Callable[[Any], object],
    file: str,
    pieces: Sequence[NamedSlice],
    rest: Callable[[], object] | None = None,
) -> tuple[int, list[tuple[str, SliceEntry]]]:
    """Write slices to a file.

    Args:
        put: appends all bytes of its argument to the file.
        file: name of the file, for the manifest.
        pieces: the slices.
        rest: called after each chunk.

    Returns:
        The length of the file; and the tensor's name and manifest entry of each slice.

    Raises:
        InvalidArgumentError: two slices have the same name in the file.
        OSError: as `put`.
    """
    # Larger elements first: each slice is then aligned to its element size without padding.
    ordered = sorted(pieces, key=lambda piece: -piece.array.itemsize)
    header: dict[str, Any] = {}
    end = 0
    for piece in ordered:
        name = key(piece.name, piece.shape, piece.box)
        # A sharded tensor may be called "w[0:4]", like the slice of another.
        if name in header:
            raise errors.InvalidArgumentError(
                f"save: two arrays have the same name in a file, expected one (tensor: {name})"
            )
        place, end = end, end + piece.array.nbytes
        header[name] = {
            "dtype": _word(piece.array.dtype.name),
            "shape": list(piece.array.shape),
            "data_offsets": [place, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    # The data after the header must be aligned for all dtypes.
    text += b" " * (-len(text) % 8)
    put(len(text).to_bytes(8, "little") + text)
    add = adder(CHECKSUM)
    entries = []
    for piece in ordered:
        checksum = 0
        for chunk in _chunks(as_bytes(piece.array)):
            checksum = add(chunk, checksum)
            # The chunk is in the cache after the checksum, so `put` reads it from there.
            put(chunk.data)
            if rest is not None:
                rest()
        entries.append((piece.name, SliceEntry(file, *piece.box, checksum)))
    return 8 + len(text) + end, entries


def read(
    directory: Location,
    file: str,
    entries: Mapping[str, TensorEntry],
    targets: Targets | None,
    algorithm: str,
) -> None:
    """Verify a file against the manifest and read the requested slices, in one pass.

    Args:
        directory: the checkpoint.
        file: name of the file.
        entries: all tensors of the checkpoint.
        targets: name and box of a slice -> destinations; other slices are skipped. None verifies
            all slices and stores nothing.
        algorithm: algorithm of the checksums.

    Raises:
        DataLossError: the header is damaged or disagrees with the manifest, or a checksum differs;
            names the tensor. The contents of the targets are then undefined.
    """
    path = directory / file
    expected = {
        key(name, entry.shape, one.box): (name, entry, one)
        for name, entry in entries.items()
        for one in entry.slices
        if one.file == file
    }
    add = adder(algorithm)
    with opened(path) as source:
        for label, place in _places(source, length(directory, file), path, expected):
            name, entry, one = expected[label]
            given = () if targets is None else targets.get((name, one.box), ())
            near = [target for target in given if overlap(one.box, target.box) is not None]
            # The rank needs other parts of the tensor. Empty slices are verified, as their checksum
            # costs nothing.
            if targets is not None and not near and (one.box.size or not given):
                continue
            source.seek(place)
            found = 0
            for chunk, done in _passes(entry, one.box, near):
                # The checksum covers the bytes of the file; `done` moves them afterwards.
                data = as_bytes(chunk)
                _fill(source, data.data, path)
                found = add(data, found)
                done()
            if found != one.checksum:
                raise errors.DataLossError(
                    f"restore: checksum differs, expected {one.checksum:08x}, "
                    f"got {found:08x} (tensor: {label}, file: {path})"
                )


def _passes(
    entry: TensorEntry, box: Box, targets: Sequence[Target]
) -> Iterator[tuple[Array, Callable[[], None]]]:
    """Yield memory for the next elements of a slice, and a function to call once it is filled.

    The memory is a target's own if the slice is contiguous there, otherwise a small buffer.
    """
    if not box.size:
        return
    dtype = DTYPES[entry.dtype]
    # The whole slice is wanted: read it without a second copy.
    for target in targets:
        if overlap(box, target.box) == box:
            view = target.array[inside(box, target.box)]
            if view.flags.c_contiguous:
                yield from ((chunk, _nothing) for chunk in _chunks(as_bytes(view)))
                return
    lines = box.shape[0] if box.shape else 1
    line = (*box.shape[1:],)
    # Rows of the slice that fit in a chunk, at least one row.
    many = max(1, min(lines, _CHUNK // (whole(line).size * dtype.itemsize)))
    buffer = empty("a buffer", (many, *line), entry.dtype)
    for first in range(0, lines, many):
        chunk = buffer[: min(many, lines - first)]
        # The caller uses the lambda before the next round changes `chunk` and `first`.
        yield chunk, lambda: _move(chunk, first, box, targets)  # noqa: B023


def _move(chunk: Array, first: int, box: Box, targets: Sequence[Target]) -> None:
    """Copy the elements that the targets need from some rows of a slice."""
    for target in targets:
        # An array of 0 dimensions has no first axis.
        if not box.shape:
            target.array[...] = chunk.reshape(())
            continue
        here = Box((box.start[0] + first, *box.start[1:]), chunk.shape)
        both = overlap(here, target.box)
        if both is not None:
            target.array[inside(both, target.box)] = chunk[inside(both, here)]


def _nothing() -> None:
    pass


def _chunks(data: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint8]]:
    for first in range(0, len(data), _CHUNK):
        yield data[first : first + _CHUNK]


_Expected = Mapping[str, tuple[str, TensorEntry, SliceEntry]]


def _places(source: Any, size: int, path: Location, expected: _Expected) -> list[tuple[str, int]]:
    """Return (name, first byte in the file) of the expected slices, in the order of the header."""
    try:
        described, begin = _header(source, size)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise errors.DataLossError(
            f"restore: damaged file: {str(error)[:300]} (file: {path})"
        ) from error
    wanted = {name: (one.shape, _word(entry.dtype)) for name, (_, entry, one) in expected.items()}
    for name in sorted(described.keys() | wanted.keys()):
        there = described[name][:2] if name in described else None
        if there != wanted.get(name):
            raise errors.DataLossError(
                f"restore: file and manifest disagree, expected {wanted.get(name)}, "
                f"got {str(there)[:200]} (tensor: {name}, file: {path})"
            )
    # Each byte belongs to exactly one slice, so that no part of the file is unchecked.
    place = 0
    for name, (_, _, first, end) in sorted(described.items(), key=lambda item: item[1][2:]):
        _, entry, one = expected[name]
        if first != place or end - first != one.box.size * DTYPES[entry.dtype].itemsize:
            raise errors.DataLossError(
                f"restore: damaged file: bytes from {first} to {end}, expected them from {place} "
                f"on (tensor: {name}, file: {path})"
            )
        place = end
    if begin + place != size:
        raise errors.DataLossError(
            f"restore: damaged file: expected {begin + place} bytes, got {size} (file: {path})"
        )
    return [(name, begin + facts[2]) for name, facts in described.items()]


_Described = dict[str, tuple[tuple[int, ...], str, int, int]]


def _header(source: Any, size: int) -> tuple[_Described, int]:
    """Read the header: name -> shape, dtype, begin and end; and the offset of the first slice.

    Raises:
        ValueError: the header is malformed.
    """
    nbytes = int.from_bytes(source.read(8), "little")
    # The length is not trusted: compare it with the file before allocating.
    if not 2 <= nbytes <= min(_MAX_HEADER, size - 8):
        raise ValueError(f"header of {nbytes} bytes")
    data = bytearray(nbytes)
    if source.readinto(data) != nbytes:
        raise ValueError("header is truncated")
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError("header is not an object")
    found.pop("__metadata__", None)
    described = {}
    for name, facts in found.items():
        first, end = facts["data_offsets"]
        if type(first) is not int or type(end) is not int or not isinstance(facts["shape"], list):
            raise ValueError(f"header of {name}")
        described[name] = tuple(facts["shape"]), facts["dtype"], first, end
    return described, 8 + nbytes


def _fill(source: Any, part: memoryview, path: Location) -> None:
    """Fill `part` from a file. It loops, because Linux reads at most 2 GiB per call."""
    while part:
        count = source.readinto(part)
        if not count:
            raise errors.DataLossError(f"restore: file ended too early (file: {path})")
        part = part[count:]


def _word(dtype: str) -> str:
    """Return safetensors' name of a dtype: "F32" for "float32"."""
    return _WORDS.get(dtype) or dtype[0].upper() + dtype.lstrip("abcdefghijklmnopqrstuvwxyz")


def _is_text(name: str) -> bool:
    """Return whether a name can be encoded; a str may contain lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
