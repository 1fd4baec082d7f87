"""Shard files in the safetensors format.

::

    8 bytes      length of the header, little-endian
    header       JSON: name -> {dtype, shape, data_offsets}, padded with spaces to 8 bytes
    bytes        one slice after the other, without holes, those of larger elements first

Checksums are made on the way, while the bytes are in the processor's caches: a file is written
once and read once. Nothing in a damaged or hostile file decides how much memory is taken: the
header is compared with the manifest before, and what a tensor needs was checked there.
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

# Bytes written, read and added to a checksum at a time: still in the caches of the core when they
# are added, and few enough calls that a thread in the background seldom asks for Python's lock.
_CHUNK = 1 << 20
# What safetensors takes.
_MAX_HEADER = 100_000_000
# What differs from the rule of `_word`.
_WORDS = {"bool": "BOOL", "complex64": "C64", "bfloat16": "BF16"}

Array = npt.NDArray[Any]


class NamedSlice(NamedTuple):
    """A slice on its way into a file.

    Attributes:
        name: of the tensor.
        shape: of the whole tensor.
        box: which elements.
        array: these, in C order.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    array: Array


class Target(NamedTuple):
    """Where some elements of a tensor go when they are read."""

    box: Box
    array: Array


Targets = Mapping[tuple[str, Box], Target]
"""Tensor name and box of a slice -> where its elements go."""


def as_slices(tensors: Mapping[str, npt.ArrayLike | Slice]) -> dict[str, Slice]:
    """Give the tensors as arrays that a file can hold: C order, native bytes; copied if need be.

    Tensors of PyTorch in host memory are taken without their history. What is no slice of a larger
    array is one that holds all of its own.

    Raises:
        InvalidArgumentError: a name or dtype that the file format has no room for, or an array
            that is not in host memory.
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
        except (TypeError, ValueError, RuntimeError) as error:  # the last: of PyTorch
            raise errors.InvalidArgumentError(
                f"save: {error} (tensor: {name}). Copy device arrays to the host first"
            ) from error
        if array.dtype.name not in DTYPES or array.ndim > MAX_NDIM:
            raise errors.InvalidArgumentError(
                f"save: unsupported array, expected at most {MAX_NDIM} dimensions of "
                f"{', '.join(DTYPES)}, got {array.ndim} of {array.dtype} (tensor: {name})"
            )
        array = array.astype(DTYPES[array.dtype.name], copy=False)
        if isinstance(value, Slice):
            found[name] = Slice(array, value.start, value.shape)
        else:
            found[name] = Slice(array, (0,) * array.ndim, array.shape)
    return found


def as_bytes(array: Array) -> npt.NDArray[np.uint8]:
    """Give the memory of a C-contiguous array of any dtype as one row of bytes."""
    return array.reshape(-1).view(np.uint8)


def empty(name: str, shape: tuple[int, ...], dtype: str) -> Array:
    """Make an array for a tensor.

    Raises:
        ResourceExhaustedError: it does not fit in memory.
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
    """Write the slices.

    Args:
        put: appends bytes to the file, all of those given.
        file: its name, for the manifest.
        pieces: what to write.
        rest: called after each chunk.

    Returns:
        The length of the file, and of each slice the tensor's name and what the manifest says.

    Raises:
        InvalidArgumentError: two slices have the same name in the file.
        OSError: as `put`.
    """
    ordered = sorted(pieces, key=lambda piece: -piece.array.itemsize)  # so that all are aligned
    header: dict[str, Any] = {}
    end = 0
    for piece in ordered:
        name = key(piece.name, piece.shape, piece.box)
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
    text += b" " * (-len(text) % 8)
    put(len(text).to_bytes(8, "little") + text)
    add = adder(CHECKSUM)
    entries = []
    for piece in ordered:
        checksum = 0
        for chunk in _chunks(as_bytes(piece.array)):
            checksum = add(chunk, checksum)
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
    """Check that a file holds what the manifest says, and read what is wanted of it, in one pass.

    Args:
        directory: where it is.
        file: its name.
        entries: all tensors of the checkpoint.
        targets: by name and box of a slice, where its elements go; others are passed over. None
            checks all of the file, and keeps nothing.
        algorithm: of the checksums.

    Raises:
        DataLossError: the header is damaged or disagrees with the manifest, or a checksum differs;
            the message names the tensor. What the targets hold is of no use then.
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
            target = None if targets is None else targets.get((name, one.box))
            if targets is not None and target is None:
                continue
            if target is not None and one.box.size and overlap(one.box, target.box) is None:
                continue
            source.seek(place)
            found = 0
            for chunk, done in _passes(entry, one.box, target):
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
    entry: TensorEntry, box: Box, target: Target | None
) -> Iterator[tuple[Array, Callable[[], None]]]:
    """Yield memory for the next elements of a slice, and what is to be called once they are there.

    It is the target's own where the slice lies in one run there; else a buffer of some rows.
    """
    if not box.size:
        return
    dtype = DTYPES[entry.dtype]
    if target is not None and overlap(box, target.box) == box:
        view = target.array[inside(box, target.box)]
        if view.flags.c_contiguous:
            yield from ((chunk, _nothing) for chunk in _chunks(as_bytes(view)))
            return
    lines = box.shape[0] if box.shape else 1
    line = (*box.shape[1:],)
    many = max(1, min(lines, _CHUNK // (whole(line).size * dtype.itemsize)))
    buffer = empty("a buffer", (many, *line), entry.dtype)
    for first in range(0, lines, many):
        chunk = buffer[: min(many, lines - first)]
        yield chunk, lambda: None if target is None else _move(chunk, first, box, target)  # noqa: B023


def _move(chunk: Array, first: int, box: Box, target: Target) -> None:
    """Copy what a target wants of some rows of a slice."""
    if not box.shape:
        target.array[...] = chunk.reshape(())
        return
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
    """Give (name, first byte in the file) of the expected slices, in the order of the file."""
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
    """Read what a file says of itself; name -> shape, dtype, begin and end; and where bytes begin.

    Raises:
        ValueError: it makes no sense.
    """
    nbytes = int.from_bytes(source.read(8), "little")
    if not 2 <= nbytes <= min(_MAX_HEADER, size - 8):
        raise ValueError(f"header of {nbytes} bytes")
    data = bytearray(nbytes)
    if source.readinto(data) != nbytes:
        raise ValueError("header is cut")
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
    """Read until `part` is full; one call gives 2 GiB at most."""
    while part:
        count = source.readinto(part)
        if not count:
            raise errors.DataLossError(f"restore: file ended too early (file: {path})")
        part = part[count:]


def _word(dtype: str) -> str:
    """Give the word of safetensors for a dtype: "F32" for "float32"."""
    return _WORDS.get(dtype) or dtype[0].upper() + dtype.lstrip("abcdefghijklmnopqrstuvwxyz")


def _is_text(name: str) -> bool:
    """Whether the name can be encoded: a str may hold halves of characters."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
