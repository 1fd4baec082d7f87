"""Handler of compiled programs: XLA calls it for every operation on traced arrays.

XLA's foreign function interface passes a C structure, the *call frame*, with the addresses of the
operands and results. The handler wraps the buffers in NumPy arrays without a copy and runs the
operation. It returns NULL, or an error that JAX raises where the program waits for a result.

`ProgramCall` is the state of one call in one program. Its number is an attribute of the call in the
program.

Source: `xla/ffi/api/c_api.h` in `jax.ffi.include_dir()`, version 0.3; version 0 keeps the layout of
the structures below.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

import collectives as cc
from strategies.jax.call_rules import Array, forget
from strategies.jax.failures import record_failure

__all__ = ["TARGET", "ProgramCall", "Runner", "is_usable"]

Runner: TypeAlias = Callable[[Sequence[Array], Sequence[Array]], None]

# Name of the handler in programs.
TARGET = "unisono_collective"

# Programs usually reuse a few buffers; more views are dropped together.
_MOST_VIEWS = 64

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Frame(ctypes.Structure):
    """XLA_FFI_CallFrame, with XLA_FFI_Args, _Rets and _Attrs in place, up to the last used field.

    Addresses are integers, because the handler computes with them.
    """

    _fields_ = [
        *((name, _INT) for name in ("struct_size", "extension", "api", "ctx")),
        ("stage", _INT),  # an enumeration of 4 bytes, and 4 bytes of padding
        *((f"args_{name}", _INT) for name in ("size", "extension", "count", "types", "buffers")),
        *((f"rets_{name}", _INT) for name in ("size", "extension", "count", "types", "buffers")),
        *((f"attrs_{name}", _INT) for name in ("size", "extension", "count", "types", "names")),
        ("attrs_values", _INT),
    ]


class _Extension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = [("size", _INT), ("type", ctypes.c_int), ("next", _INT), ("metadata", _INT)]


class _Metadata(ctypes.Structure):
    """XLA_FFI_Metadata up to the traits."""

    _fields_ = [
        ("struct_size", _INT),
        ("version_size", _INT),
        ("version_extension", _INT),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("traits", ctypes.c_uint32),
    ]


class _Error(ctypes.Structure):
    """XLA_FFI_Error_Create_Args."""

    _fields_ = [
        ("size", _INT),
        ("extension", _POINTER),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    ]


_METADATA = 1  # XLA_FFI_Extension_Metadata
_INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
_DATA, _VALUE = 24, 8  # offsets of XLA_FFI_Buffer.data and XLA_FFI_Scalar.value
_ERROR_CREATE = 48  # offset in XLA_FFI_Api

_Handler = ctypes.CFUNCTYPE(_POINTER, _INT)
_ErrorCreate = ctypes.CFUNCTYPE(_POINTER, ctypes.POINTER(_Error))


def _integer(address: int) -> int:
    return _INT.from_address(address).value


class ProgramCall:
    """One call in one program, with views of the buffers that XLA has passed.

    Args:
        run: called with host arrays, the operands and the results to fill.
        operands: shape and dtype of every operand.
        results: shape and dtype of every result.
        comm: the user's communicator; None if the call has none.
    """

    def __init__(
        self,
        run: Runner,
        operands: Sequence[Any],
        results: Sequence[Any],
        comm: cc.Communicator | None = None,
    ) -> None:
        self._run = run
        self._comm = comm
        self._specs = [(aval.shape, np.dtype(aval.dtype)) for aval in (*operands, *results)]
        self._count = len(operands)
        self._views: dict[tuple[int, ...], tuple[list[Array], list[Array]]] = {}

    def numbered(self) -> int:
        """Return a number by which the handler finds the call."""
        # Calls stay in the table, because JAX drops programs without notice. Those of a closed or
        # failed communicator only raise its error, so its shared memory can be freed.
        for call in list(_calls.values()):
            if call._comm is not None and call._comm.failure is not None:
                call._views.clear()
                forget(call._comm)
        number = next(_numbers)
        _calls[number] = self
        return number

    def run(self, frame: _Frame) -> None:
        """Run the call on the buffers of a frame."""
        # Each list ends with the token that orders the calls.
        addresses = (
            *_data_addresses(frame.args_buffers, self._count),
            *_data_addresses(frame.rets_buffers, len(self._specs) - self._count),
        )
        views = self._views.get(addresses)
        if views is None:
            views = self._view(addresses)
        self._run(*views)

    def _view(self, addresses: tuple[int, ...]) -> tuple[list[Array], list[Array]]:
        views = [
            _array_at(address, shape, dtype)
            for address, (shape, dtype) in zip(addresses, self._specs, strict=True)
        ]
        if len(self._views) == _MOST_VIEWS:
            self._views.clear()
        self._views[addresses] = divided = views[: self._count], views[self._count :]
        return divided


_numbers = itertools.count()
_calls: dict[int, ProgramCall] = {}


def _data_addresses(buffers: int, count: int) -> list[int]:
    """Return the addresses of the elements of an array of pointers to XLA_FFI_Buffer."""
    return [_integer(_integer(buffers + 8 * i) + _DATA) for i in range(count)]


def _array_at(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not nbytes:  # XLA may pass NULL
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    array: Array = np.frombuffer(memory, dtype).reshape(shape)
    return array


def _handle(address: int) -> int | None:
    """Run the call of a frame; return NULL or an error of XLA."""
    frame = _Frame.from_address(address)
    # An exception must not leave a C function, also a KeyboardInterrupt.
    try:
        if frame.extension and _is_metadata_request(frame):
            return None
        # The only attribute: a scalar, which has the address of its value.
        number = _integer(_integer(_integer(frame.attrs_values) + _VALUE))
        _calls[number].run(frame)
    except BaseException as error:
        message = record_failure(error).encode()
        arguments = _Error(ctypes.sizeof(_Error), None, message, _INTERNAL)
        create = _ErrorCreate(_integer(frame.api + _ERROR_CREATE))
        failure: int | None = create(ctypes.byref(arguments))
        return failure
    return None


def _is_metadata_request(frame: _Frame) -> bool:
    """Answer XLA's question for the handler's version, which precedes the first call."""
    extension = _Extension.from_address(frame.extension)
    if extension.type != _METADATA:
        return False
    metadata = _Metadata.from_address(extension.metadata)
    metadata.major, metadata.minor = _header_version()
    metadata.traits = 0
    return True


# Kept, because the handler must outlive all programs.
_c_handle = _Handler(_handle)


@functools.cache
def _header_version() -> tuple[int, int]:
    """Return the version of the interface in the headers of jaxlib."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    text = header.read_text()
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    major, minor = (int(match[1]) if match else -1 for match in found)
    return major, minor


@functools.cache
def is_usable() -> bool:
    """Register the handler with XLA, and return whether the interface is the known one."""
    if not hasattr(jax, "ffi"):
        found = f"JAX {jax.__version__} has no jax.ffi, expected JAX 0.5 or newer"
    elif (version := _header_version())[0] != 0:
        found = f"expected version 0, got {version[0]}.{version[1]}"
    else:
        address = ctypes.cast(_c_handle, _POINTER).value
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(address), platform="cpu")
        return True
    warnings.warn(
        f"strategies.jax: the foreign function interface of XLA does not fit: {found}; compiled "
        "programs call operations by the slower io_callback; docs/support.md lists the tested "
        "versions of JAX",
        stacklevel=2,
    )
    return False
