"""Handler of compiled programs: XLA calls it for every operation on traced arrays.

XLA's foreign function interface passes a C structure, the *call frame*, with the addresses of the
operands and results. The handler wraps the buffers in NumPy arrays without a copy and runs the
operation. It returns NULL, or an error that JAX raises where the program waits for a result.
Reductions and broadcasts in shared memory have a second handler, which repeats a call in compiled
code (`collectives.calls.xla_handler`).

`ProgramCall` is the state of one call in one program. Its number is an attribute of the call in the
program.

Source: `xla/ffi/api/c_api.h` in `jax.ffi.include_dir()`, version 0.3; version 0 keeps the layout of
the structures below.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from collectives.extend import XlaHandler, calls_from, create_xla_handler, learn_call
from strategies.jax import call_rules
from strategies.jax.call_rules import Array, Call
from strategies.jax.failures import record_failure

__all__ = ["ProgramCall", "Runner", "is_usable"]

Runner: TypeAlias = Callable[[Sequence[Array], Sequence[Array]], None]

# Names of the handlers in programs.
_TARGET, _COMPILED = "unisono_collective", "unisono_repeated_collective"

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
        call: operation that `run` runs; None for another function.

    Attributes:
        target: name of the handler.
        number: number by which the handler finds the call.
    """

    def __init__(
        self,
        run: Runner,
        operands: Sequence[Any],
        results: Sequence[Any],
        call: Call | None = None,
    ) -> None:
        self._run = run
        self._call = call
        self._specs = [(aval.shape, np.dtype(aval.dtype)) for aval in (*operands, *results)]
        self._count = len(operands)
        self._views: dict[tuple[int, ...], tuple[list[Array], list[Array]]] = {}

        learns = call is not None and call.comm.size > 1 and call_rules.is_repeatable(call)
        handler = _compiled_handler() if learns else None
        self._learns = handler is not None
        self.target = _TARGET if handler is None else _COMPILED
        self.number = next(_numbers)
        if handler is not None:
            handler.add(self.number)
        # Calls stay in the table, because JAX drops programs without notice. Those of a closed or
        # failed communicator only raise its error, so its shared memory can be freed.
        for known in list(_calls.values()):
            known._release()
        _calls[self.number] = self

    def _release(self) -> None:
        if self._call is None or self._call.comm.failure is None:
            return
        self._views.clear()
        call_rules.forget(self._call.comm)
        if self.target == _COMPILED:
            self._learns = False
            _known_handler().forget(self.number)

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
        # XLA passes NULL for empty arrays.
        if self._learns and views[0][0].nbytes:
            assert self._call is not None
            own = call_rules.communicator_of(self._call)
            self._learns = learn_call(_known_handler(), self.number, own, self._call.comm)

    def complete(self, status: int) -> None:
        """Complete the call after a status of its kernel."""
        assert self._call is not None
        with calls_from(self._call.origin):
            _known_handler().complete(self.number, status)

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
    if frame.extension and _is_metadata_request(frame):
        return None
    return _guarded(frame, lambda: _calls[_number_of(frame)].run(frame))


def _complete(address: int, status: int) -> int | None:
    """Complete the call of a frame, which compiled code has begun; return as `_handle`."""
    frame = _Frame.from_address(address)
    return _guarded(frame, lambda: _calls[_number_of(frame)].complete(status))


def _guarded(frame: _Frame, run: Callable[[], None]) -> int | None:
    """Run a function; return NULL, or its exception as an error of XLA."""
    # An exception must not leave a C function, also a KeyboardInterrupt.
    try:
        run()
    except BaseException as error:
        # A second Ctrl-C may interrupt the lines that report the first one.
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                return _failure(frame, record_failure(error))
    return None


def _failure(frame: _Frame, text: str) -> int | None:
    """Return an error of XLA."""
    arguments = _Error(ctypes.sizeof(_Error), None, text.encode(), _INTERNAL)
    create = _ErrorCreate(_integer(frame.api + _ERROR_CREATE))
    failure: int | None = create(ctypes.byref(arguments))
    return failure


def _number_of(frame: _Frame) -> int:
    # The only attribute: a scalar, which has the address of its value.
    return _integer(_integer(_integer(frame.attrs_values) + _VALUE))


def _is_metadata_request(frame: _Frame) -> bool:
    """Answer XLA's question for the handler's version, which precedes the first call."""
    extension = _Extension.from_address(frame.extension)
    if extension.type != _METADATA:
        return False
    metadata = _Metadata.from_address(extension.metadata)
    metadata.major, metadata.minor = _header_version()
    metadata.traits = 0
    return True


_registering = threading.Lock()

# Kept, because the handlers must outlive all programs.
_c_handle = _Handler(_handle)
_c_complete = ctypes.CFUNCTYPE(_POINTER, _INT, _INT)(_complete)


def _compiled_handler() -> XlaHandler | None:
    """Return the compiled handler; None without compiled code for this Python."""
    with _registering:  # two threads may lower programs
        return _register_compiled()


def _known_handler() -> XlaHandler:
    handler = _compiled_handler()
    assert handler is not None
    return handler


@functools.cache
def _register_compiled() -> XlaHandler | None:
    """Register the compiled handler with XLA before the first program that uses it."""
    handler = create_xla_handler(_address_of(_c_handle), _address_of(_c_complete))
    if handler is not None:
        jax.ffi.register_ffi_target(_COMPILED, jax.ffi.pycapsule(handler.address), platform="cpu")
    return handler


def _address_of(function: Any) -> int:
    return ctypes.cast(function, _POINTER).value or 0


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
        capsule = jax.ffi.pycapsule(_address_of(_c_handle))
        jax.ffi.register_ffi_target(_TARGET, capsule, platform="cpu")
        return True
    warnings.warn(
        f"strategies.jax: the foreign function interface of XLA does not fit: {found}; compiled "
        "programs call operations by the slower io_callback; docs/support.md lists the tested "
        "versions of JAX",
        stacklevel=2,
    )
    return False
