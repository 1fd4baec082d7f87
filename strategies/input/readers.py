"""Readers by format: text lines, fixed length, TFRecord, whole files, file names.

They take file names from a queue and return pairs of a key, which says where a record stood, and
the record. What they have in common is in `reader`.
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
"""Longest record in bytes unless the user says otherwise: memory that a damaged file can take."""

_PIECE = 64 << 10  # bytes read at a time: enough that the work per call does not count
_GZIP = b"\x1f\x8b"  # the first bytes of a gzip file


class _FileReader(Reader[Value]):
    """What readers of records of any length take: how long one may be, how a file is packed."""

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
    r"""The lines of text files, without their ends `\n` or `\r\n`.

    Keys are `file:line`, where lines count from 1 and include the header. Empty lines are records,
    and so is a last line without an end. A byte order mark at the beginning of a UTF-8 file is
    dropped.

    Args:
        skip_header_lines: lines to skip at the beginning of each file.
        encoding: encoding of the text; its line end must be the byte 10, so not UTF-16.
        field_delim: delimiter of CSV fields, whose quoted fields may contain line ends. The lines
            of one record are joined by `\n`, and its key names the first line. None: each line is
            a record.
        max_record_bytes: longest line, without its end, that is not damage.
        compression: "GZIP", "ZLIB", "" for none; None for GZIP if the name ends in `.gz`.
        on_damage: "raise" or "skip", see `Reader`.

    Raises:
        InvalidArgumentError: a negative number of header lines, or no room for a record.
        ValueError: an unknown compression or encoding, or an unknown way with damage.
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
        # The line after the last good one is where people have to look.
        with open_source(work, self._compression, lambda: f"{work}:{number + 1}") as (file, _):
            read = getattr(file, "read1", file.read)
            head = self._head(file, work)
            while data := head + read(_PIECE):
                head = b""
                # Most lines are whole and good: those are taken apart all at once.
                block, newline, tail = data.rpartition(b"\n")
                texts: Iterable[str | None] | None = self._texts(block, number) if newline else ()
                if texts is None:
                    lines = [line.removesuffix(b"\r") for line in block.split(b"\n")]
                    texts = (
                        self._text(line, work, at) for at, line in enumerate(lines, number + 1)
                    )
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
                    line = _complete_line(file, tail, self._limit)
                    text = self._text(line, work, number + 1)
                    number += 1
                    if joiner is not None:
                        for first, record in joiner.add(number, text):
                            yield f"{work}:{first}", record
                    elif text is not None:
                        yield f"{work}:{number}", text
                    while line is None and (piece := file.readline(_PIECE)):
                        line = b"" if piece.endswith(b"\n") else None
            for first, record in () if joiner is None else joiner.flush():
                yield f"{work}:{first}", record

    def _head(self, file: IO[bytes], work: str) -> bytes:
        """Return the first bytes of a file, without a byte order mark.

        Raises:
            DataLossError: a gzip file that the reader does not decompress.
        """
        head = file.read(len(codecs.BOM_UTF8))
        if head.startswith(_GZIP):
            raise DataLossError(
                f"read: the file begins as a gzip file does, expected text, compressed? A name "
                f"that ends in .gz, or compression='GZIP', decompresses it ({work})"
            )
        has_mark = self._encoding == "utf-8" and head == codecs.BOM_UTF8
        return b"" if has_mark else head

    def _texts(self, block: bytes, before: int) -> list[str] | None:
        """The lines of a block, or None if they have to be looked at one by one."""
        if len(block) > self._limit or before < self._skip:
            return None
        try:
            texts = block.decode(self._encoding).split("\n")
        except UnicodeDecodeError:
            return None
        return [text.removesuffix("\r") for text in texts] if b"\r" in block else texts

    def _text(self, line: bytes | None, work: str, number: int) -> str | None:
        """One line, or None for one that is not to be returned."""
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
    """Records of a fixed number of bytes, one after the other or overlapping.

    ::

        | header | record | gap |   hop_bytes = record_bytes + gap
                 | record | gap | record | ... | footer |

    Keys are `file:number`, where records count from 0. What is left at the end and is not a
    whole record is ignored.

    Args:
        record_bytes: bytes of a record.
        header_bytes: bytes before the first record.
        footer_bytes: bytes at the end of the file that belong to no record.
        hop_bytes: bytes from the beginning of a record to that of the next; 0 for `record_bytes`.
        compression: as for `TextLineReader`; other numbers refer to the unpacked file.
        on_damage: as for `TextLineReader`. A file shorter than its header is damaged.

    Raises:
        InvalidArgumentError: `record_bytes` below 1, or another number below 0.
        ValueError: an unknown compression, or an unknown way with damage.
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
                if hop > needed and pass_over(file, hop - needed):
                    return
                window = window[hop:]
                window += file.read(needed - len(window))


class TFRecordReader(_FileReader[bytes]):
    """The records of TFRecord files; their checksums are verified.

    Keys are `file:offset`, in bytes of the unpacked file.

    Args:
        max_record_bytes: longest record that is not damage.
        compression: as for `TextLineReader`.
        on_damage: as for `TextLineReader`.

    Raises:
        InvalidArgumentError: no room for a record.
        ValueError: an unknown compression, or an unknown way with damage.
        ImportError: when reading, google-crc32c is not installed.
    """

    def _open(self, work: str) -> Records[bytes]:
        offset = 0
        with open_source(work, self._compression, lambda: f"{work}:{offset}") as source:
            for offset, data in unframe(source, work, self._limit, self._handle_damage):  # noqa: B007
                yield f"{work}:{offset}", data


class WholeFileReader(_FileReader[bytes]):
    """Each file as one record, whose key is the name of the file.

    Args:
        max_record_bytes: longest contents that are not damage.
        compression: as for `TextLineReader`; "" for the bytes as they are on disk.
        on_damage: as for `TextLineReader`.

    Raises:
        InvalidArgumentError: no room for a record.
        ValueError: an unknown compression, or an unknown way with damage.
    """

    def _open(self, work: str) -> Records[bytes]:
        with open_source(work, self._compression, lambda: work) as (file, size):
            fits = size is None or size <= self._limit
            data = file.read(self._limit + 1) if fits else b""
        if not fits or len(data) > self._limit:
            raise DataLossError(
                f"read: file is longer than max_record_bytes = {self._limit} ({work})"
            )
        yield work, data


class IdentityReader(Reader[str]):
    """The names in the queue themselves, as keys and as values; no file is opened."""

    def _open(self, work: str) -> Records[str]:
        yield work, work


def _checked_encoding(name: str) -> str:
    """Return the canonical name of an encoding.

    Raises:
        ValueError: the name is unknown, or line ends of this encoding are not the byte 10.
    """
    try:
        canonical = codecs.lookup(name).name
        fits = "\n".encode(canonical) == b"\n"
    except LookupError:  # also an encoding of bytes as bytes, such as "hex"
        fits = False
    if not fits and name.lower().replace("_", "-") != "utf-8-sig":
        raise ValueError(
            f"TextLineReader: bad encoding, expected one in which a line end is the byte 10, such "
            f"as 'utf-8' or 'latin-1', got {name!r}"
        )
    return canonical if fits else "utf-8"


def _complete_line(file: IO[bytes], beginning: bytes, limit: int) -> bytes | None:
    """Read on to the end of a line and return it, or None when it is too long and has not ended."""
    pieces, length = [beginning], len(beginning)
    while length <= limit + 1:  # two bytes may be the end of the line
        piece = file.readline(_PIECE)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        length += len(piece)
        if piece.endswith(b"\n"):
            return b"".join(pieces).removesuffix(b"\n").removesuffix(b"\r")
    return None
