"""Compiled part of `collectives.calls.xla_handler`: the C function that XLA calls.

Importing this module loads numba.
"""

from __future__ import annotations

from collections.abc import Iterator

from numba import types

from collectives.kernels import numba_compiler
from collectives.kernels.intrinsics import call_words, load, record
from collectives.kernels.xla_handler_layout import CALL, TABLE

__all__ = ["all_words", "make"]

# Byte offsets in XLA_FFI_CallFrame, whose argument lists are in place; in XLA_FFI_Buffer; and in
# XLA_FFI_Scalar. Source: `xla/ffi/api/c_api.h`, version 0.
_EXTENSION, _OPERANDS, _RESULTS, _ATTRIBUTES = 8, 72, 112, 160
_DATA, _VALUE = 24, 8

_CALL_BYTES = CALL.itemsize


def _handle(at: int, frame: int) -> int:
    """Run the call of a frame; return NULL or an error of XLA.

    Args:
        at: address of the table.
        frame: address of the frame.
    """
    table = record(at, TABLE)
    if load(frame + _EXTENSION):  # a question of XLA
        return call_words(table.python, frame, 0, 0, 0)
    number = load(load(load(load(frame + _ATTRIBUTES)) + _VALUE))
    # An int: whether this thread holds the GIL already.
    gil = call_words(table.take_gil, 0, 0, 0, 0) & 0xFFFFFFFF
    # After the table may no longer change.
    call = record(table.calls + number * _CALL_BYTES, CALL)
    status, failure = -1, 0
    if call.entry and load(call.unusable) == table.none:
        send = load(load(load(frame + _OPERANDS)) + _DATA)
        out = load(load(load(frame + _RESULTS)) + _DATA)
        status = call_words(table.repeat, call.state, call.entry, send, out)
        if status > 0:
            failure = call_words(table.complete, frame, status, 0, 0)
    call_words(table.drop_gil, gil, 0, 0, 0)
    if status < 0:
        return call_words(table.python, frame, 0, 0, 0)
    return failure


def all_words() -> Iterator[tuple[str, ...]]:
    """Yield the words of all functions."""
    yield ("handle",)


def make(symbol: str, kind: str) -> bytes:
    """Return an object file with a function; arguments as `machine_code.load`."""
    signature = types.int64(types.int64, types.int64)
    return numba_compiler.object_code(_handle, signature, symbol)
