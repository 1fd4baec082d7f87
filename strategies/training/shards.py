"""One safetensors file of a checkpoint: write arrays, verify the file, read arrays.

Reading has two passes: `verify` looks at the header and at every checksum with a buffer of fixed
size, so that nothing in a damaged or hostile file decides how much memory is taken; `read` then
allocates and fills the arrays (from the page cache, mostly).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from strategies import arrays, errors
from strategies.training import durable
from strategies.training.manifest import DTYPES, MAX_NDIM, TensorEntry, checksum

__all__ = ["as_arrays", "as_bytes", "read", "verify", "write"]

# Bytes read at a time by `verify`; from the page cache 3.6 GB/s with 16 KiB, 5.0 with 64, 5.4 with
# 256, no more with larger ones.
_BUFFER_BYTES = 256 << 10
# What differs from the rule of `_word`.
_WORDS = {"bool": "BOOL", "complex64": "C64", "bfloat16": "BF16"}


def as_arrays(tensors: Mapping[str, npt.ArrayLike]) -> dict[str, npt.NDArray[Any]]:
    """Give the tensors as arrays that a file can hold: C order, native bytes; copied if need be.

    Tensors of PyTorch in host memory are taken without their history.

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
        try:
            view = arrays.host(value)
            array = np.asarray(value if view is None else view, order="C")
        except (TypeError, ValueError, RuntimeError) as error:  # the last: of PyTorch
            raise errors.InvalidArgumentError(
                f"save: {error} (tensor: {name}). Copy device arrays to the host first"
            ) from error
        if array.dtype.name not in DTYPES or array.ndim > MAX_NDIM:
            raise errors.InvalidArgumentError(
                f"save: unsupported array, expected at most {MAX_NDIM} dimensions of "
                f"{', '.join(DTYPES)}, got {array.ndim} of {array.dtype} (tensor: {name})"
            )
        found[name] = array.astype(DTYPES[array.dtype.name], copy=False)
    return found


def as_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Give the memory of a C-contiguous array of any dtype as one row of bytes."""
    return array.reshape(-1).view(np.uint8)


def write(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write the arrays to a new file and fsync it.

    Raises:
        OSError: with the number and the file, as the writing library puts them only in words.
    """
    try:
        safetensors.numpy.save_file(dict(arrays), path)
    except safetensors.SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise errors.InvalidArgumentError(f"save: {error} (file: {path})") from error
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from error
    # The library makes it readable for its owner alone; the directory follows the user's umask.
    path.chmod(path.parent.stat().st_mode & 0o666)
    durable.sync(path)


def verify(path: Path, entries: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Check that the file holds exactly `entries`, unharmed; give each one's place in bytes.

    Raises:
        DataLossError: the header is damaged or disagrees with `entries`, or a checksum differs;
            the message names the tensor.
    """
    places = dict(_places(path, entries))
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        for name, place in places.items():
            file.seek(place)
            found, rest = checksum(b""), entries[name].nbytes
            while rest:
                part = buffer[: min(rest, len(buffer))]
                _fill(file, part, path)
                found, rest = checksum(part, found), rest - len(part)
            if found != entries[name].checksum:
                raise errors.DataLossError(
                    f"restore: checksum differs, expected {entries[name].checksum:08x}, "
                    f"got {found:08x} (tensor: {name}, file: {path})"
                )
    return places


def read(
    path: Path, entries: Mapping[str, TensorEntry], places: Mapping[str, int]
) -> dict[str, npt.NDArray[Any]]:
    """Read the tensors at `places`, as given by `verify`, into arrays of their own.

    Raises:
        ResourceExhaustedError: a tensor does not fit in memory.
    """
    tensors = {}
    with path.open("rb", buffering=0) as file:
        for name, place in places.items():
            entry = entries[name]
            try:
                array = np.empty(entry.shape, DTYPES[entry.dtype])
            except MemoryError as error:
                raise errors.ResourceExhaustedError(
                    f"restore: out of memory, expected {entry.nbytes} bytes free "
                    f"(tensor: {name}, file: {path})"
                ) from error
            file.seek(place)
            if entry.nbytes:
                _fill(file, as_bytes(array).data, path)
            tensors[name] = array
    return tensors


def _places(path: Path, entries: Mapping[str, TensorEntry]) -> Iterator[tuple[str, int]]:
    """Give (name, first byte in the file), in the order of the file, for the expected tensors."""
    try:
        # Opening checks the header: its length, no holes, no overlaps, all bytes spoken for. So
        # the tensors lie one after the other up to the end of the file.
        with safetensors.safe_open(path, framework="np") as header:
            names = header.offset_keys()
            found = {name: header.get_slice(name) for name in names}
            described = {
                name: (tuple(part.get_shape()), part.get_dtype()) for name, part in found.items()
            }
    except safetensors.SafetensorError as error:
        raise errors.DataLossError(f"restore: damaged file: {error} (file: {path})") from error
    expected = {name: (entry.shape, _word(entry.dtype)) for name, entry in entries.items()}
    for name in sorted(described.keys() | expected.keys()):
        if described.get(name) != expected.get(name):
            raise errors.DataLossError(
                f"restore: file and manifest disagree, expected {expected.get(name)}, "
                f"got {described.get(name)} (tensor: {name}, file: {path})"
            )
    place = path.stat().st_size - sum(entry.nbytes for entry in entries.values())
    for name in names:
        yield name, place
        place += entries[name].nbytes


def _fill(file: FileIO, part: memoryview, path: Path) -> None:
    """Read until `part` is full; one call gives 2 GiB at most."""
    while part:
        count = file.readinto(part)
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
