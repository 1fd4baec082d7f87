"""TFRecord files: length-prefixed records with checksums.

::

    offset   0                 8                12                12 + length
             | length, 8 bytes | crc of these 8 | length x data   | crc of the data |

Numbers are little-endian. A crc is the CRC-32C of the bytes, rotated and shifted by a constant, so
that a file which holds crcs itself does not look valid by chance.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import struct
from collections.abc import Callable, Iterator

from strategies.errors import DataLossError
from strategies.input.files import Compression, Sink, Source, check_compression, pass_over

__all__ = ["TFRecordWriter", "frame", "unframe"]

_log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")
_HEADER = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_MASK, _ALL = 0xA282EAD8, 0xFFFFFFFF  # the format's constant; 32 bits


@functools.cache
def _crc32c() -> Callable[[bytes], int]:
    try:
        value: Callable[[bytes], int] = importlib.import_module("google_crc32c").value
    except ImportError as error:
        raise ImportError(
            "TFRecord: checksums need google-crc32c, install it with `pip install google-crc32c`"
        ) from error
    return value


def _mask(crc: int) -> int:
    return (crc >> 15 | crc << 17) + _MASK & _ALL


def frame(data: bytes) -> bytes:
    """Return a record as it stands in a file.

    Raises:
        ImportError: google-crc32c is not installed.
    """
    crc32c = _crc32c()
    length = _LENGTH.pack(len(data))
    parts = (length, _CRC.pack(_mask(crc32c(length))), data, _CRC.pack(_mask(crc32c(data))))
    return b"".join(parts)


def unframe(
    source: Source, path: str, limit: int, damaged: Callable[[DataLossError], None]
) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the data of each record of a file.

    Up to 11 bytes after the last record are the rest of a header that was not written to its end;
    they are logged, and are not an error.

    Args:
        source: the file.
        path: its name, for errors.
        limit: longest data in bytes that is not damage. It is compared, as is what is left of the
            file, before memory is taken.
        damaged: called with the error when only one record is damaged; if it returns, the record
            is passed over.

    Raises:
        DataLossError: what follows cannot be read: a length is wrong, or the file is cut.
        ImportError: google-crc32c is not installed.
    """
    crc32c = _crc32c()
    read = source.file.read
    size = source.size
    # The next header is read with a record, but not where that could meet damage before its time.
    ahead = 0 if size is None else _HEADER.size
    offset = 0
    header = read(_HEADER.size)
    while len(header) == _HEADER.size:
        length, expected = _HEADER.unpack(header)
        crc = crc32c(header[: _LENGTH.size])
        # `_mask`, written out without its call: this runs twice for each record.
        if (crc >> 15 | crc << 17) + _MASK & _ALL != expected:
            hint = "; is this a TFRecord file, and packed as you say?" if offset == 0 else ""
            raise _corruption_error(offset, "length", expected, crc, f"({path}){hint}")
        end = offset + _HEADER.size + length + _CRC.size
        if size is not None and end > size:
            raise _truncation_error(offset, length, path)
        if length > limit:
            why = f"has {length} bytes, more than max_record_bytes = {limit}"
            damaged(DataLossError(f"read: record at {offset} {why} ({path})"))
            if pass_over(source.file, length + _CRC.size):
                raise _truncation_error(offset, length, path)
            header = read(_HEADER.size)
        else:
            data = read(length)
            rest = read(_CRC.size + ahead)
            if len(rest) < _CRC.size:
                raise _truncation_error(offset, length, path)
            (expected,) = _CRC.unpack_from(rest)
            crc = crc32c(data)
            if (crc >> 15 | crc << 17) + _MASK & _ALL == expected:
                yield offset, data
            else:
                damaged(_corruption_error(offset, "data", expected, crc, f"({path})"))
            header = rest[_CRC.size :] if ahead else read(_HEADER.size)
        offset = end
    if header:
        _log.warning("read: %d bytes too few for a header at %d (%s)", len(header), offset, path)


def _corruption_error(offset: int, part: str, expected: int, crc: int, where: str) -> DataLossError:
    return DataLossError(
        f"read: corrupted record at {offset}: checksum of its {part}, "
        f"expected {expected:#010x}, got {_mask(crc):#010x} {where}"
    )


def _truncation_error(offset: int, length: int, path: str) -> DataLossError:
    return DataLossError(
        f"read: truncated record at {offset}: the file ends before its {length} bytes ({path})"
    )


class TFRecordWriter:
    """Write records to a file; to be used with `with`.

    Args:
        path: local path or URL; what was there is replaced.
        compression: "GZIP", "ZLIB", "" for none; None for GZIP if the name ends in `.gz`.

    Raises:
        ValueError: an unknown compression.
        OSError: the system cannot write there.
        ImportError: google-crc32c is not installed, or fsspec for a URL.
    """

    def __init__(self, path: str | os.PathLike[str], compression: Compression = None) -> None:
        check_compression(compression)
        _crc32c()
        self._file = Sink(os.fspath(path), compression)

    def __enter__(self) -> TFRecordWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, record: bytes) -> None:
        """Append a record.

        Raises:
            TypeError: it is not bytes.
            ValueError: the writer is closed.
        """
        if not isinstance(record, (bytes, bytearray, memoryview)):
            raise TypeError(f"TFRecordWriter: expected bytes, got {type(record).__name__}")
        self._file.write(frame(bytes(record)))

    def flush(self) -> None:
        """Hand all records to the system."""
        self._file.flush()

    def close(self) -> None:
        """Finish and close the file; harmless when repeated."""
        self._file.close()
