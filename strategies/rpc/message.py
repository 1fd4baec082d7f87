"""Wire format of RPC messages: header, bounded metadata, raw frames.

::

    frame 0        [ version | type | request number | metadata in msgpack ]
    frames 1 ..    values, see `wire`

Each request gets one result or one error with the same number. The format has no pickle, so a
message can only run registered operations.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack

from strategies import errors
from strategies.errors import DataLossError, InternalError, InvalidArgumentError, OpError
from strategies.rpc import wire
from strategies.rpc.wire import Array, Frame, Packed

__all__ = ["Kind", "Message", "decode", "encode", "error_from", "error_to"]

_VERSION = 1
# Version and type, padding that aligns the request number, request number.
_HEADER = struct.Struct("<BBxxxxxxQ")
_MOST_METADATA = 1 << 24  # bytes; enough for the names of 100,000 files


class Kind(IntEnum):
    """Type of a message.

    REQUEST starts an operation; RESULT and ERROR answer it. RECEIVED confirms a result that removed
    data from its owner. WITHDRAW ends a waiting request with the given error; the reply still
    follows. DISOWN drops a request whose reply is no longer needed. PING requests a sign of life,
    PONG answers it. LEAVE is the last message of a task.
    """

    REQUEST = 1
    RESULT = 2
    ERROR = 3
    RECEIVED = 4
    WITHDRAW = 5
    DISOWN = 6
    PING = 7
    PONG = 8
    LEAVE = 9


class Message(NamedTuple):
    """A decoded message."""

    kind: Kind
    number: int
    metadata: dict[str, Any]
    values: list[Any]


def encode(
    kind: Kind,
    number: int = 0,
    metadata: Mapping[str, Any] | None = None,
    values: Sequence[Any] = (),
) -> list[Frame]:
    """Return the frames of a message.

    Args:
        kind: type of the message.
        number: number of the request.
        metadata: mapping that msgpack can encode, at most 16 MiB.
        values: values that `wire.pack` accepts, or its result.

    Raises:
        InvalidArgumentError: the metadata is too long.
        TypeError: a value cannot be sent.
    """
    header = _HEADER.pack(_VERSION, kind, number)
    if not metadata and not values:
        # PING, PONG and DISOWN have nothing to add to the header.
        return [header]
    # `Task.submit` and `_call` pack early, so that a bad value raises in their caller.
    layout, frames = values if isinstance(values, Packed) else wire.pack(values)
    packed = msgpack.packb([metadata or {}, layout])
    if len(packed) > _MOST_METADATA:
        raise InvalidArgumentError(
            f"message: names and descriptions are too long, expected at most {_MOST_METADATA} "
            f"bytes, got {len(packed)}"
        )
    return [header + packed, *frames]


def decode(frames: Sequence[Array]) -> Message:
    """Decode the frames of a message.

    Raises:
        DataLossError: the message is damaged or has another version.
    """
    try:
        head = frames[0].tobytes()
        # Checked in full: another process, possibly of another version, has sent these bytes.
        version, kind, number = _HEADER.unpack_from(head)
        if version != _VERSION or len(head) > _HEADER.size + _MOST_METADATA:
            raise ValueError(f"version {version}, {len(head)} bytes")
        kind = Kind(kind)
        # Messages such as PING have neither metadata nor values.
        if len(head) == _HEADER.size:
            return Message(kind, number, {}, [])
        metadata, layout = msgpack.unpackb(head[_HEADER.size :])
        if not isinstance(metadata, dict) or not isinstance(layout, list):
            raise ValueError("metadata of another form")
    except (ValueError, TypeError, IndexError, struct.error, msgpack.UnpackException) as error:
        raise DataLossError(f"message: the header cannot be read: {error!r:.200}") from error
    return Message(kind, number, metadata, wire.unpack(layout, frames[1:]))


# Only the code of an error travels. The receiver picks the class from this table, so that a message
# cannot name an arbitrary class.
_CLASSES: dict[str, type[OpError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, OpError)
}


def error_to(error: BaseException) -> dict[str, str]:
    """Return an error as metadata."""
    if not isinstance(error, OpError):
        # `ValueError` and `TypeError` are wrong use in this package, so the arguments of the caller
        # are at fault. Any other error is a fault of this task.
        wrong_use = isinstance(error, (ValueError, TypeError))
        kind = InvalidArgumentError if wrong_use else InternalError
        error = kind(f"{error}" if wrong_use else f"{type(error).__name__}: {error}")
    # Shortened, because a message may quote its argument, and metadata beyond `_MOST_METADATA`
    # could not be sent as an error either.
    return {"code": error.code, "message": error.message[:4096]}


def error_from(metadata: Mapping[str, Any]) -> OpError:
    """Return an error of another task, with the same class."""
    kind = _CLASSES.get(str(metadata.get("code")), errors.UnknownError)
    return kind(str(metadata.get("message")))
