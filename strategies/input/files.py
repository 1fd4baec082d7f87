"""Opening of paths, globs and URLs, with compression.

File contents are not trusted. Every failure becomes an error of `strategies.errors` that names the
file, and decompression yields no more bytes than requested.
"""

from __future__ import annotations

import glob
import io
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, Any, Literal, NamedTuple, TypeAlias, cast

from strategies.core.urls import fsspec, is_url
from strategies.errors import DataLossError, InvalidArgumentError, NotFoundError, UnknownError

__all__ = [
    "Compression",
    "Sink",
    "Source",
    "check_compression",
    "match_files",
    "open_source",
    "pass_over",
]

Compression: TypeAlias = Literal["", "GZIP", "ZLIB"] | None
"""Compression of a file; "" for no compression, None for GZIP if its name ends in `.gz`."""

# Read-ahead in bytes: the fastest size for records of 64 KiB (`benchmarks/input.py`).
_BUFFER = 256 << 10
_PIECE = 64 << 10  # bytes per read when decompressing or skipping
# zlib's `wbits` for a gzip header without name and time, and for a zlib header.
_BITS = {"GZIP": 31, "ZLIB": 15}


class Source(NamedTuple):
    """An open file.

    Attributes:
        file: positioned at its beginning, and decompressed.
        size: its length in bytes; None if unknown before its end.
    """

    file: IO[bytes]
    size: int | None


def check_compression(compression: str | None) -> Compression:
    """Return the argument if it is a known compression.

    Raises:
        ValueError: it is unknown.
    """
    if compression not in (None, "", "GZIP", "ZLIB"):
        raise ValueError(f"compression: expected None, '', 'GZIP' or 'ZLIB', got {compression!r}")
    return cast(Compression, compression)


def match_files(patterns: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the files that match one or several patterns, each file once.

    Args:
        patterns: paths or URLs, with the wildcards `*`, `?`, `[...]` and, between slashes, `**`. A
            path that exists is used literally. A path without wildcards may be missing.

    Returns:
        Paths in the order of the patterns; the matches of one pattern are sorted.

    Raises:
        NotFoundError: nothing matches a pattern.
        ImportError: a pattern is a URL, and fsspec is not installed.
    """
    listed = [patterns] if isinstance(patterns, (str, os.PathLike)) else patterns
    # A dict keeps the order and drops duplicates.
    return list(dict.fromkeys(name for pattern in listed for name in _matches(os.fspath(pattern))))


def _matches(pattern: str) -> list[str]:
    # A chain such as `simplecache::s3://...` names one file.
    if not any(character in pattern for character in "*?[") or "::" in pattern:
        return [pattern]
    if is_url(pattern):
        files, path = fsspec().core.url_to_fs(pattern)
        names = [files.unstrip_protocol(name) for name in files.glob(path)]
    elif os.path.exists(pattern):
        # A file may have such characters in its name.
        return [pattern]
    else:
        # Directories match `*` as well, but cannot be read as files.
        names = [name for name in glob.glob(pattern, recursive=True) if os.path.isfile(name)]
    if not names:
        raise NotFoundError(f"match_files: no file matches ({pattern})")
    # Sorted, because the order of a directory differs between machines.
    return sorted(names)


@contextmanager
def open_source(path: str, compression: Compression, where: Callable[[], str]) -> Iterator[Source]:
    """Open a file for reading, and close it at the end of the block.

    Args:
        path: local path or URL.
        compression: compression of the file.
        where: returns the current position, for errors.

    Raises:
        NotFoundError: the file does not exist.
        DataLossError: the file does not have this compression, or is damaged.
        UnknownError: the system cannot read the file.
        ImportError: the path is a URL, and fsspec is not installed.
    """
    try:
        # A stack, since the compressed reader wraps the file and both must close.
        with ExitStack() as stack:
            file = stack.enter_context(_open(path, "rb"))
            packed = _compression_of(path, compression)
            if packed:
                unpacked = io.BufferedReader(_Unpacked(file, packed), _BUFFER)
                yield Source(stack.enter_context(unpacked), None)
            else:
                yield Source(file, _size(file))
    except (EOFError, zlib.error) as error:
        what = "compressed file is damaged"
        # The position is read when the error occurs.
        raise DataLossError(f"read: {what}: {error} ({where()})") from error
    except FileNotFoundError:
        raise NotFoundError(f"read: no such file ({path})") from None
    except OSError as error:
        raise UnknownError(f"read: {error} ({where()})") from error


def pass_over(file: IO[bytes], count: int) -> int:
    """Skip `count` bytes; return how many of them are missing."""
    # By reading, because decompressed streams cannot seek.
    while count:
        passed = len(file.read(min(count, _PIECE)))
        if not passed:
            break
        count -= passed
    return count


def _open(path: str, mode: str) -> Any:
    """Open a local file; for a URL, return fsspec's `OpenFile`, which opens in `with`."""
    try:
        return fsspec().open(path, mode) if is_url(path) else open(path, mode, _BUFFER)
    except ValueError as error:  # an invalid name, such as one with a zero byte
        raise InvalidArgumentError(f"files: {error} ({path!r})") from error


def _compression_of(path: str, compression: Compression) -> str:
    if compression is None:
        return "GZIP" if path.endswith(".gz") else ""
    return compression


def _size(file: IO[bytes]) -> int | None:
    if not file.seekable():
        return None
    # By seeking, which files of fsspec also support.
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    return size


class _Unpacked(io.RawIOBase):
    """Decompressed contents of a file up to the first damage, followed by the error.

    `gzip` of the standard library discards the data before the damage.
    """

    def __init__(self, file: IO[bytes], compression: str) -> None:
        self._file = file
        self._bits = _BITS[compression]
        self._unpack = zlib.decompressobj(self._bits)
        self._packed = b""  # read from the file, not yet passed to `_unpack`

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[:_BUFFER]  # bounded, because `decompress` returns a second copy
        while not self._unpack.eof or self._next_member():
            # Unconsumed input first: `decompress` stops at the requested length.
            packed = self._unpack.unconsumed_tail or self._packed or self._file.read(_PIECE)
            self._packed = b""
            data = self._unpack.decompress(packed, len(view))
            if data:
                view[: len(data)] = data
                return len(data)
            # No input is left, but the stream has not ended.
            if not packed and not self._unpack.eof:
                raise EOFError("it is truncated")
        return 0

    def _next_member(self) -> bool:
        """Start the next stream. A gzip file may have several, followed by zeros."""
        rest = self._unpack.unused_data or self._file.read(_PIECE)
        if self._bits != _BITS["GZIP"] and rest:
            raise zlib.error("data after its end")
        # Some tools pad gzip files with zeros.
        while rest and not rest.strip(b"\0"):
            rest = self._file.read(_PIECE)
        if rest:
            self._packed = rest.lstrip(b"\0")
            self._unpack = zlib.decompressobj(self._bits)
        return bool(rest)


class Sink:
    """A file to write to, with compression. Equal contents give equal bytes.

    Args:
        path: local path or URL; an existing file is replaced.
        compression: compression of the file.

    Raises:
        OSError: the system cannot write there.
        ImportError: the path is a URL, and fsspec is not installed.
    """

    def __init__(self, path: str, compression: Compression) -> None:
        opened = _open(path, "wb")
        # `OpenFile.open` instead of `with`, as the sink lives until `close`.
        self._file: Any = opened.open() if is_url(path) else opened
        packed = _compression_of(path, compression)
        self._pack = zlib.compressobj(wbits=_BITS[packed]) if packed else None

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._file.write(data if self._pack is None else self._pack.compress(data))

    def flush(self) -> None:
        """Pass all data to the system, so that readers see it."""
        if self._pack is not None:
            # A sync flush ends a block at a byte, so that a reader can decompress all of it.
            self._file.write(self._pack.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()

    def close(self) -> None:
        """Finish and close the file; harmless when repeated."""
        # A second flush of the compressor would raise.
        if self._file.closed:
            return
        try:
            if self._pack is not None:
                self._file.write(self._pack.flush())
        finally:
            self._file.close()
