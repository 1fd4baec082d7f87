"""TFRecord files: length-prefixed records with checksums.

::

    offset   0                 8                12                12 + length
             | length, 8 bytes | crc of these 8 | length x data   | crc of the data |

Numbers are little-endian. A crc is the CRC-32C of the bytes, rotated and shifted by a constant. So
data that contains crcs does not match its own by chance.
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
_MASK, _ALL = 0xA282EAD8, 0xFFFFFFFF  # constant of the format; 32 bits


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
    # Rotation by 15 bits and a constant, as TensorFlow's `crc32c::Mask` does.
    return (crc >> 15 | crc << 17) + _MASK & _ALL


def frame(data: bytes) -> bytes:
    """Return a record in the format of a file.

    Raises:
        ImportError: google-crc32c is not installed.
    """
    crc32c = _crc32c()
    length = _LENGTH.pack(len(data))
    # The length has its own checksum: a reader trusts it before it allocates.
    parts = (length, _CRC.pack(_mask(crc32c(length))), data, _CRC.pack(_mask(crc32c(data))))
    return b"".join(parts)


def unframe(
    source: Source, path: str, limit: int, damaged: Callable[[DataLossError], None]
) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the data of each record of a file.

    Up to 11 bytes after the last record are an incompletely written header. They are logged, and
    are not an error.

    Args:
        source: the file.
        path: name of the file, for errors.
        limit: maximum length of the data in bytes. The length is compared with the limit and with
            the rest of the file before memory is allocated.
        damaged: called with the error if only one record is damaged; if it returns, the record is
            skipped.

    Raises:
        DataLossError: the rest cannot be read: a length is wrong, or the file is truncated.
        ImportError: google-crc32c is not installed.
    """
    crc32c = _crc32c()
    read = source.file.read
    size = source.size
    # Read the next header together with a record, except in a compressed file: damage there would
    # raise before the record is yielded.
    ahead = 0 if size is None else _HEADER.size
    offset = 0
    # Read before the loop, which reads the header of the next record with each record.
    header = read(_HEADER.size)
    while len(header) == _HEADER.size:
        length, expected = _HEADER.unpack(header)
        crc = crc32c(header[: _LENGTH.size])
        # `_mask` inlined, because this runs twice per record.
        if (crc >> 15 | crc << 17) + _MASK & _ALL != expected:
            # At offset 0 the file is probably of another kind.
            hint = "; is this a TFRecord file, and packed as you say?" if offset == 0 else ""
            raise _corruption_error(offset, "length", expected, crc, f"({path}){hint}")
        end = offset + _HEADER.size + length + _CRC.size
        # Compared with the file before memory is allocated.
        if size is not None and end > size:
            raise _truncation_error(offset, length, path)
        if length > limit:
            why = f"has {length} bytes, more than max_record_bytes = {limit}"
            # Skipped and counted; the next header is at a known place.
            damaged(DataLossError(f"read: record at {offset} {why} ({path})"))
            if pass_over(source.file, length + _CRC.size):
                raise _truncation_error(offset, length, path)
            header = read(_HEADER.size)
        else:
            data = read(length)
            # Checksum and next header in one read: two reads per record.
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
    # A writer that died; complete records before it are good.
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
    """Writes records to a file; use it with `with`.

    Args:
        path: local path or URL; an existing file is replaced.
        compression: "GZIP", "ZLIB", "" for none; None for GZIP if the name ends in `.gz`.

    Raises:
        ValueError: an unknown compression.
        OSError: the system cannot write there.
        ImportError: google-crc32c is not installed, or for a URL fsspec.
    """

    def __init__(self, path: str | os.PathLike[str], compression: Compression = None) -> None:
        check_compression(compression)
        # Raises here if the package is missing, not in the first write.
        _crc32c()
        self._file = Sink(os.fspath(path), compression)

    def __enter__(self) -> TFRecordWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, record: bytes) -> None:
        """Append a record.

        Raises:
            TypeError: the record is not bytes.
            ValueError: the writer is closed.
        """
        if not isinstance(record, (bytes, bytearray, memoryview)):
            raise TypeError(f"TFRecordWriter: expected bytes, got {type(record).__name__}")
        self._file.write(frame(bytes(record)))

    def flush(self) -> None:
        """Pass all records to the system."""
        self._file.flush()

    def close(self) -> None:
        """Finish and close the file; harmless when repeated."""
        self._file.close()
