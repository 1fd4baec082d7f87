"""Arguments and results of functions that run on other tasks, as values of a message.

Numbers, text, None, arrays, and tuples, lists and dicts of these, with at most `DEEPEST` tuples in
one another: nothing that is read can run code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgpack
import numpy as np

from strategies import arrays
from strategies.errors import DataLossError, InvalidArgumentError
from strategies.remote.bundles import name_of_dtype
from strategies.remote.wire import DEEPEST, Array

__all__ = ["pack", "unpack"]

_TUPLE, _ARRAY, _SCALAR = 1, 2, 3  # types of msgpack extensions


def pack(structure: Any, operation: str) -> list[Any]:
    """Return the values of a message: first the structure, then its arrays, not copied.

    Raises:
        TypeError: something else is in it, or tuples are nested more deeply.
    """
    found: list[Array] = []

    def extension(value: Any, levels: int) -> msgpack.ExtType:
        if isinstance(value, tuple):
            if not levels:
                raise TypeError(
                    f"{operation}: this cannot be sent, expected at most {DEEPEST} tuples in one "
                    f"another, got more"
                )
            return msgpack.ExtType(_TUPLE, packed(list(value), levels - 1))
        if isinstance(value, complex):
            value = np.complex128(value)
        known = isinstance(value, np.generic) or hasattr(value, "__dlpack_device__")
        array = arrays.host(value) if known else None
        if array is None:
            raise TypeError(
                f"{operation}: this cannot be sent, expected numbers, text, arrays in host memory, "
                f"and tuples, lists and dicts of them, got {type(value).__name__}"
            )
        try:
            name_of_dtype(array)
        except InvalidArgumentError as error:
            raise TypeError(f"{operation}: {error}") from error
        found.append(array)
        code = _SCALAR if isinstance(value, np.generic) else _ARRAY
        return msgpack.ExtType(code, str(len(found)).encode())

    def packed(value: Any, levels: int) -> bytes:
        default = partial(extension, levels=levels)
        try:
            raw: bytes = msgpack.packb(
                value, default=default, strict_types=True, unicode_errors="surrogatepass"
            )
        except (OverflowError, ValueError) as error:
            raise TypeError(f"{operation}: this cannot be sent: {error}") from error
        return raw

    return [np.frombuffer(packed(structure, DEEPEST), np.uint8), *found]


def unpack(values: Sequence[Any]) -> Any:
    """Return the structure; its arrays share memory with the message.

    Raises:
        DataLossError: it cannot be read, or tuples are nested too deeply.
    """

    def extension(code: int, data: bytes, levels: int) -> Any:
        if code == _TUPLE:
            if not levels:
                raise ValueError(f"more than {DEEPEST} tuples in one another")
            return tuple(unpacked(data, levels - 1))
        array = values[int(data)]
        return array[()] if code == _SCALAR else array

    def unpacked(data: bytes, levels: int) -> Any:
        hook = partial(extension, levels=levels)
        return msgpack.unpackb(
            data, ext_hook=hook, unicode_errors="surrogatepass", strict_map_key=False
        )

    try:
        return unpacked(values[0].tobytes(), DEEPEST)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise DataLossError(f"message: it cannot be read: {error!r:.200}") from error
