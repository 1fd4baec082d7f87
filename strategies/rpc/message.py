"""Wire format of RPC messages: header, bounded metadata, raw frames.

::

    frame 0        [ version | type | number of the request | msgpack of the metadata ]
    frames 1 ..    the values, see `wire`

A request is answered by one result or one error with its number. There is no pickle: what a message
can make the receiver do is what its operations are.
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
_HEADER = struct.Struct("<BBxxxxxxQ")
_MOST_METADATA = 1 << 24  # bytes; the names of 100,000 files


class Kind(IntEnum):
    """What a message is for.

    REQUEST asks for an operation; RESULT and ERROR answer it. RECEIVED confirms a result that has
    carried something away. WITHDRAW ends a request that waits, with the error that it names; it is
    answered as the request is. DISOWN says that nobody wants the answer any more. PING asks for a
    sign of life, PONG is one, LEAVE is the last message.
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
    """A message, taken apart."""

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
        kind: what it is for.
        number: of the request that it concerns.
        metadata: what msgpack can write, at most 16 MiB.
        values: see `wire.pack`, or what that has returned.

    Raises:
        InvalidArgumentError: too much metadata.
        TypeError: a value cannot be sent.
    """
    header = _HEADER.pack(_VERSION, kind, number)
    if not metadata and not values:
        return [header]
    layout, frames = values if isinstance(values, Packed) else wire.pack(values)
    packed = msgpack.packb([metadata or {}, layout])
    if len(packed) > _MOST_METADATA:
        raise InvalidArgumentError(
            f"message: names and descriptions are too long, expected at most {_MOST_METADATA} "
            f"bytes, got {len(packed)}"
        )
    return [header + packed, *frames]


def decode(frames: Sequence[Array]) -> Message:
    """Take a message apart.

    Raises:
        DataLossError: it is damaged, or of another version.
    """
    try:
        head = frames[0].tobytes()
        version, kind, number = _HEADER.unpack_from(head)
        if version != _VERSION or len(head) > _HEADER.size + _MOST_METADATA:
            raise ValueError(f"version {version}, {len(head)} bytes")
        kind = Kind(kind)
        if len(head) == _HEADER.size:
            return Message(kind, number, {}, [])
        metadata, layout = msgpack.unpackb(head[_HEADER.size :])
        if not isinstance(metadata, dict) or not isinstance(layout, list):
            raise ValueError("metadata of another form")
    except (ValueError, TypeError, IndexError, struct.error, msgpack.UnpackException) as error:
        raise DataLossError(f"message: the header cannot be read: {error!r:.200}") from error
    return Message(kind, number, metadata, wire.unpack(layout, frames[1:]))


_CLASSES: dict[str, type[OpError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, OpError)
}


def error_to(error: Exception) -> dict[str, str]:
    """Return an error as metadata."""
    if not isinstance(error, OpError):
        wrong_use = isinstance(error, (ValueError, TypeError))
        kind = InvalidArgumentError if wrong_use else InternalError
        error = kind(f"{error}" if wrong_use else f"{type(error).__name__}: {error}")
    return {"code": error.code, "message": error.message[:4096]}


def error_from(metadata: Mapping[str, Any]) -> OpError:
    """Return the error that another task has met, of the same class."""
    kind = _CLASSES.get(str(metadata.get("code")), errors.UnknownError)
    return kind(str(metadata.get("message")))
