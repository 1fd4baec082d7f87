"""Opening of paths, globs and URLs, with compression.

The contents are not trusted. Whatever is wrong with a file becomes one of the errors of
`strategies.errors`, with its name; decompression yields no more bytes than were asked for.
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
"""How a file is packed; "" for not at all, None for GZIP if its name ends in `.gz`."""

# Bytes read ahead: records of 64 KiB come fastest with this one (`benchmarks/input.py`).
_BUFFER = 256 << 10
_PIECE = 64 << 10  # bytes read at a time that are unpacked or passed over
# What zlib calls a gzip header without name and time, and a zlib header.
_BITS = {"GZIP": 31, "ZLIB": 15}


class Source(NamedTuple):
    """An open file.

    Attributes:
        file: at its beginning; unpacked if it was compressed.
        size: bytes in it, or None if that is not known before its end.
    """

    file: IO[bytes]
    size: int | None


def check_compression(compression: str | None) -> Compression:
    """Return the argument if it is a known compression.

    Raises:
        ValueError: it is not.
    """
    if compression not in (None, "", "GZIP", "ZLIB"):
        raise ValueError(f"compression: expected None, '', 'GZIP' or 'ZLIB', got {compression!r}")
    return cast(Compression, compression)


def match_files(patterns: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the files that one or several patterns stand for, each file once.

    Args:
        patterns: paths or URLs, in which `*`, `?`, `[...]` and, between slashes, `**` may stand
            for parts of names. A path that exists is taken as it is, and so is one without such
            characters, which may be missing.

    Returns:
        Paths in the order of the patterns, those of one pattern sorted.

    Raises:
        NotFoundError: nothing matches a pattern.
        ImportError: a URL, and fsspec is not installed.
    """
    listed = [patterns] if isinstance(patterns, (str, os.PathLike)) else patterns
    return list(dict.fromkeys(name for pattern in listed for name in _matches(os.fspath(pattern))))


def _matches(pattern: str) -> list[str]:
    # A chain such as `simplecache::s3://...` names one file.
    if not any(character in pattern for character in "*?[") or "::" in pattern:
        return [pattern]
    if is_url(pattern):
        files, path = fsspec().core.url_to_fs(pattern)
        names = [files.unstrip_protocol(name) for name in files.glob(path)]
    elif os.path.exists(pattern):
        return [pattern]
    else:
        names = [name for name in glob.glob(pattern, recursive=True) if os.path.isfile(name)]
    if not names:
        raise NotFoundError(f"match_files: no file matches ({pattern})")
    return sorted(names)


@contextmanager
def open_source(path: str, compression: Compression, where: Callable[[], str]) -> Iterator[Source]:
    """Open a file for reading, and close it at the end of the block.

    Args:
        path: local path or URL.
        compression: how it is packed.
        where: returns the place that is being read, for errors.

    Raises:
        NotFoundError: there is no such file.
        DataLossError: it is not packed as it should be, or damaged there.
        UnknownError: the system cannot read it.
        ImportError: a URL, and fsspec is not installed.
    """
    try:
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
        raise DataLossError(f"read: {what}: {error} ({where()})") from error
    except FileNotFoundError:
        raise NotFoundError(f"read: no such file ({path})") from None
    except OSError as error:
        raise UnknownError(f"read: {error} ({where()})") from error


def pass_over(file: IO[bytes], count: int) -> int:
    """Read so many bytes and forget them; return how many of them are missing."""
    while count:
        passed = len(file.read(min(count, _PIECE)))
        if not passed:
            break
        count -= passed
    return count


def _open(path: str, mode: str) -> Any:
    """Open a file, or return what opens the one behind a URL."""
    try:
        return fsspec().open(path, mode) if is_url(path) else open(path, mode, _BUFFER)
    except ValueError as error:  # a name that no file can have
        raise InvalidArgumentError(f"files: {error} ({path!r})") from error


def _compression_of(path: str, compression: Compression) -> str:
    if compression is None:
        return "GZIP" if path.endswith(".gz") else ""
    return compression


def _size(file: IO[bytes]) -> int | None:
    if not file.seekable():
        return None
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    return size


class _Unpacked(io.RawIOBase):
    """The contents of a packed file, as far as it is whole, and then the error.

    The standard library has such a thing for gzip, which keeps what precedes damage for itself.
    """

    def __init__(self, file: IO[bytes], compression: str) -> None:
        self._file = file
        self._bits = _BITS[compression]
        self._unpack = zlib.decompressobj(self._bits)
        self._packed = b""  # read, but not given to `_unpack` yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[:_BUFFER]  # what is unpacked exists twice for a moment
        while not self._unpack.eof or self._next_member():
            packed = self._unpack.unconsumed_tail or self._packed or self._file.read(_PIECE)
            self._packed = b""
            data = self._unpack.decompress(packed, len(view))
            if data:
                view[: len(data)] = data
                return len(data)
            if not packed and not self._unpack.eof:
                raise EOFError("it is cut")
        return 0

    def _next_member(self) -> bool:
        """Begin the next stream of the file; a gzip file may have several, and zeros after them."""
        rest = self._unpack.unused_data or self._file.read(_PIECE)
        if self._bits != _BITS["GZIP"] and rest:
            raise zlib.error("there is more after the end")
        while rest and not rest.strip(b"\0"):
            rest = self._file.read(_PIECE)
        if rest:
            self._packed = rest.lstrip(b"\0")
            self._unpack = zlib.decompressobj(self._bits)
        return bool(rest)


class Sink:
    """A file to write to, which packs what it gets: the same bytes for the same contents.

    Args:
        path: local path or URL; what was there is replaced.
        compression: how to pack.

    Raises:
        OSError: the system cannot write there.
        ImportError: a URL, and fsspec is not installed.
    """

    def __init__(self, path: str, compression: Compression) -> None:
        opened = _open(path, "wb")
        self._file: Any = opened.open() if is_url(path) else opened
        packed = _compression_of(path, compression)
        self._pack = zlib.compressobj(wbits=_BITS[packed]) if packed else None

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._file.write(data if self._pack is None else self._pack.compress(data))

    def flush(self) -> None:
        """Hand everything to the system, so that a reader finds it."""
        if self._pack is not None:
            self._file.write(self._pack.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()

    def close(self) -> None:
        """Finish and close the file; harmless when repeated."""
        if self._file.closed:
            return
        try:
            if self._pack is not None:
                self._file.write(self._pack.flush())
        finally:
            self._file.close()
