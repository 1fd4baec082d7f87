"""Readers by format: text lines, fixed length, TFRecord, whole files, file names.

They take file names from a queue and return pairs of key and record. The key is the record's
position. `reader` has the common base.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import IO

from strategies.errors import DataLossError, InvalidArgumentError
from strategies.input.csv.quoting import RecordJoiner
from strategies.input.files import Compression, check_compression, open_source, pass_over
from strategies.input.reader import Damage, Reader, Records, Value
from strategies.input.records import unframe

__all__ = [
    "MAX_RECORD_BYTES",
    "FixedLengthRecordReader",
    "IdentityReader",
    "Reader",
    "TFRecordReader",
    "TextLineReader",
    "WholeFileReader",
]

MAX_RECORD_BYTES = 16 << 20
"""Default for the longest record in bytes; it bounds the memory that a damaged file can take."""

_PIECE = 64 << 10  # bytes per read: enough that the overhead per call is negligible
_GZIP = b"\x1f\x8b"  # the first bytes of a gzip file


class _FileReader(Reader[Value]):
    """Base of readers of records of any length: limit of their length, and compression."""

    def __init__(
        self,
        *,
        max_record_bytes: int = MAX_RECORD_BYTES,
        compression: Compression = None,
        on_damage: Damage = "raise",
    ) -> None:
        if max_record_bytes < 1:
            raise InvalidArgumentError(
                f"{type(self).__name__}: max_record_bytes must be at least 1, "
                f"got {max_record_bytes}"
            )
        super().__init__(on_damage=on_damage)
        self._limit = max_record_bytes
        self._compression = check_compression(compression)


class TextLineReader(_FileReader[str]):
    r"""Reads the lines of text files, without their ends `\n` or `\r\n`.

    Keys are `file:line`, where lines count from 1 and include the header. Empty lines are records,
    and so is a last line without an end. A byte order mark at the beginning of a UTF-8 file is
    dropped.

    Args:
        skip_header_lines: lines to skip at the beginning of each file.
        encoding: encoding of the text. Its line end must be the byte 10, which excludes UTF-16.
        field_delim: delimiter of CSV fields, whose quoted fields may contain line ends. The lines
            of one record are joined by `\n`, and its key names the first line. None: each line is
            a record.
        max_record_bytes: maximum length of a line without its end; a longer one is damage.
        compression: "GZIP", "ZLIB", "" for none; None for GZIP if the name ends in `.gz`.
        on_damage: "raise" or "skip", see `Reader`.

    Raises:
        InvalidArgumentError: `skip_header_lines` below 0 or `max_record_bytes` below 1.
        ValueError: an unknown compression, encoding or `on_damage`.
    """

    def __init__(
        self,
        skip_header_lines: int = 0,
        *,
        encoding: str = "utf-8",
        field_delim: str | None = None,
        max_record_bytes: int = MAX_RECORD_BYTES,
        compression: Compression = None,
        on_damage: Damage = "raise",
    ) -> None:
        if skip_header_lines < 0:
            raise InvalidArgumentError(
                f"TextLineReader: skip_header_lines must be at least 0, got {skip_header_lines}"
            )
        super().__init__(
            max_record_bytes=max_record_bytes, compression=compression, on_damage=on_damage
        )
        self._skip = skip_header_lines
        self._encoding = _checked_encoding(encoding)
        self._field_delim = field_delim

    def _open(self, work: str) -> Records[str]:
        number = 0
        delimiter = self._field_delim
        joiner = None if delimiter is None else RecordJoiner(delimiter, self._limit)
        # Errors name the line after the last good one.
        with open_source(work, self._compression, lambda: f"{work}:{number + 1}") as (file, _):
            # `read1` returns the bytes at hand, instead of waiting for a full piece.
            read = getattr(file, "read1", file.read)
            head = self._head(file, work)
            # The head belongs to the text unless it is a byte order mark.
            while data := head + read(_PIECE):
                head = b""
                # Most blocks have only good lines: decode them in one call.
                block, newline, tail = data.rpartition(b"\n")
                # The tail has no line end yet; it is completed below.
                texts: Iterable[str | None] | None = self._texts(block, number) if newline else ()
                if texts is None:
                    lines = [line.removesuffix(b"\r") for line in block.split(b"\n")]
                    texts = (
                        self._text(line, work, at) for at, line in enumerate(lines, number + 1)
                    )
                # Files without quotes skip the joiner.
                if joiner is not None and (joiner.is_open or b'"' in block):
                    for text in texts:
                        number += 1
                        for first, record in joiner.add(number, text):
                            yield f"{work}:{first}", record
                else:
                    for text in texts:
                        number += 1
                        if text is not None:
                            yield f"{work}:{number}", text
                if tail:
                    # Read to its end here, so that blocks start at a line.
                    line = _complete_line(file, tail, self._limit)
                    text = self._text(line, work, number + 1)
                    number += 1
                    if joiner is not None:
                        for first, record in joiner.add(number, text):
                            yield f"{work}:{first}", record
                    elif text is not None:
                        yield f"{work}:{number}", text
                    # The rest of a line that is too long is skipped without keeping it.
                    while line is None and (piece := file.readline(_PIECE)):
                        line = b"" if piece.endswith(b"\n") else None
            # A quoted field that the file does not close.
            for first, record in () if joiner is None else joiner.flush():
                yield f"{work}:{first}", record

    def _head(self, file: IO[bytes], work: str) -> bytes:
        """Return the first bytes of a file, without a byte order mark.

        Raises:
            DataLossError: a gzip file that the reader does not decompress.
        """
        # A gzip file without the name would be read as damaged text, with a misleading error.
        head = file.read(len(codecs.BOM_UTF8))
        if head.startswith(_GZIP):
            raise DataLossError(
                f"read: the file starts like a gzip file, expected text; a name that ends in .gz, "
                f"or compression='GZIP', decompresses it ({work})"
            )
        # Only UTF-8 has this mark; other encodings may have its bytes as text.
        has_mark = self._encoding == "utf-8" and head == codecs.BOM_UTF8
        return b"" if has_mark else head

    def _texts(self, block: bytes, before: int) -> list[str] | None:
        """Return the lines of a block; None if they must be decoded one by one."""
        # A block within the limit has no line above it. Header lines need their numbers.
        if len(block) > self._limit or before < self._skip:
            return None
        # Decoded at once, which is many times faster than line by line.
        try:
            texts = block.decode(self._encoding).split("\n")
        except UnicodeDecodeError:
            return None
        return [text.removesuffix("\r") for text in texts] if b"\r" in block else texts

    def _text(self, line: bytes | None, work: str, number: int) -> str | None:
        """Return one line; None if it is a header, or damaged and skipped."""
        if line is None or len(line) > self._limit:
            why = f"line is longer than {self._limit} bytes"
            self._handle_damage(DataLossError(f"read: {why} ({work}:{number})"))
            return None
        if number <= self._skip:
            return None
        try:
            return line.decode(self._encoding)
        except UnicodeDecodeError as error:
            name = self._encoding.upper()
            why = f"line is not {name}: {error}; `encoding=` names another encoding"
            self._handle_damage(DataLossError(f"read: {why} ({work}:{number})"))
            return None


class FixedLengthRecordReader(Reader[bytes]):
    """Reads records of a fixed number of bytes, consecutive or overlapping.

    ::

        | header | record | gap |   hop_bytes = record_bytes + gap
                 | record | gap | record | ... | footer |

    Keys are `file:number`, where records count from 0. An incomplete record at the end of a file is
    ignored.

    Args:
        record_bytes: bytes of a record.
        header_bytes: bytes before the first record.
        footer_bytes: bytes at the end of the file that belong to no record.
        hop_bytes: bytes from the start of a record to that of the next; 0 for `record_bytes`.
        compression: as for `TextLineReader`; the other sizes refer to the decompressed file.
        on_damage: as for `TextLineReader`. A file shorter than its header is damaged.

    Raises:
        InvalidArgumentError: `record_bytes` below 1, or another number below 0.
        ValueError: an unknown compression or `on_damage`.
    """

    def __init__(
        self,
        record_bytes: int,
        *,
        header_bytes: int = 0,
        footer_bytes: int = 0,
        hop_bytes: int = 0,
        compression: Compression = None,
        on_damage: Damage = "raise",
    ) -> None:
        if record_bytes < 1 or min(header_bytes, footer_bytes, hop_bytes) < 0:
            raise InvalidArgumentError(
                "FixedLengthRecordReader: record_bytes must be at least 1, the others at least 0, "
                f"got {record_bytes}, {header_bytes}, {footer_bytes} and {hop_bytes}"
            )
        super().__init__(on_damage=on_damage)
        self._record = record_bytes
        self._header = header_bytes
        self._footer = footer_bytes
        self._hop = hop_bytes or record_bytes
        self._compression = check_compression(compression)

    def _open(self, work: str) -> Records[bytes]:
        number = 0
        record, hop = self._record, self._hop
        # A record is returned only if the footer fits behind it, so the footer is never returned.
        needed = record + self._footer
        with open_source(work, self._compression, lambda: f"{work}:{number}") as (file, _):
            missing = pass_over(file, self._header)
            if missing:
                raise DataLossError(
                    f"read: the file ends {missing} bytes before the end of its header ({work})"
                )
            window = file.read(needed)
            while len(window) == needed:
                yield f"{work}:{number}", window[:record]
                number += 1
                # A gap beyond the window is skipped; the end of the file there ends the records.
                if hop > needed and pass_over(file, hop - needed):
                    return
                # The window keeps the bytes that the next record shares.
                window = window[hop:]
                window += file.read(needed - len(window))


class TFRecordReader(_FileReader[bytes]):
    """Reads the records of TFRecord files and verifies their checksums.

    Keys are `file:offset`, in bytes of the decompressed file.

    Args:
        max_record_bytes: maximum length of a record; a longer one is damage.
        compression: as for `TextLineReader`.
        on_damage: as for `TextLineReader`.

    Raises:
        InvalidArgumentError: `max_record_bytes` below 1.
        ValueError: an unknown compression or `on_damage`.
        ImportError: in the first read, if google-crc32c is not installed.
    """

    def _open(self, work: str) -> Records[bytes]:
        offset = 0
        with open_source(work, self._compression, lambda: f"{work}:{offset}") as source:
            # The loop assigns `offset` for the errors of `open_source`.
            for offset, data in unframe(source, work, self._limit, self._handle_damage):  # noqa: B007
                yield f"{work}:{offset}", data


class WholeFileReader(_FileReader[bytes]):
    """Reads each file as one record, whose key is the name of the file.

    Args:
        max_record_bytes: maximum length of a file; a longer one is damage.
        compression: as for `TextLineReader`; "" returns the bytes on disk.
        on_damage: as for `TextLineReader`.

    Raises:
        InvalidArgumentError: `max_record_bytes` below 1.
        ValueError: an unknown compression or `on_damage`.
    """

    def _open(self, work: str) -> Records[bytes]:
        with open_source(work, self._compression, lambda: work) as (file, size):
            # The size first: a file that is too long is not read.
            fits = size is None or size <= self._limit
            # One byte more than allowed, to detect a compressed file that is too long.
            data = file.read(self._limit + 1) if fits else b""
        if not fits or len(data) > self._limit:
            raise DataLossError(
                f"read: file is longer than max_record_bytes = {self._limit} ({work})"
            )
        yield work, data


class IdentityReader(Reader[str]):
    """Returns the names in the queue, as keys and as values; opens no file."""

    def _open(self, work: str) -> Records[str]:
        yield work, work


def _checked_encoding(name: str) -> str:
    """Return the canonical name of an encoding.

    Raises:
        ValueError: the name is unknown, or line ends of this encoding are not the byte 10.
    """
    try:
        canonical = codecs.lookup(name).name
        # A line end of one byte with this value, so that blocks can be cut at it.
        fits = "\n".encode(canonical) == b"\n"
    except LookupError:  # also raised for codecs from bytes to bytes, such as "hex"
        fits = False
    # `utf-8-sig` is UTF-8 with a mark, which `_head` drops.
    if not fits and name.lower().replace("_", "-") != "utf-8-sig":
        raise ValueError(
            f"TextLineReader: bad encoding, expected one in which a line end is the byte 10, such "
            f"as 'utf-8' or 'latin-1', got {name!r}"
        )
    return canonical if fits else "utf-8"


def _complete_line(file: IO[bytes], beginning: bytes, limit: int) -> bytes | None:
    """Return a line, read to its end; None if it exceeds `limit` before its end."""
    pieces, length = [beginning], len(beginning)
    while length <= limit + 1:  # the line end may have two bytes
        piece = file.readline(_PIECE)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        length += len(piece)
        if piece.endswith(b"\n"):
            return b"".join(pieces).removesuffix(b"\n").removesuffix(b"\r")
    return None
