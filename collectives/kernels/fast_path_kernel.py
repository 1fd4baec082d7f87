"""Compiled part of `collectives.calls.fast_path`: a repeated call as one C function.

It holds the GIL, except while the kernel of the plan runs. Importing this module loads numba.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import njit, types

from collectives.kernels import numba_compiler
from collectives.kernels.buffer_address_kernel import array, is_contiguous, is_writable
from collectives.kernels.fast_path_layout import ENTRY, STATE, TENSOR
from collectives.kernels.intrinsics import call_words, copy, load, pointer, record, store
from collectives.kernels.structures import offsets

__all__ = ["all_words", "make"]

_WORD = 8
_LENGTH = np.dtype([("bytes", "u2")])

# Arguments of the operation: the array, the result, the frame and the timeout; then its options.
_BEFORE_OPTIONS = 4

_ENTRY, _STATE = offsets(ENTRY), offsets(STATE)
_ENTRY_BYTES, _TENSOR_BYTES = ENTRY.itemsize, TENSOR.itemsize

_CPU = 1  # device type of DLPack

# Objects are passed as their addresses.
_take: Any = types.ExternalFunction("Py_IncRef", types.void(types.int64))
_drop: Any = types.ExternalFunction("Py_DecRef", types.void(types.int64))
_thread: Any = types.ExternalFunction("PyThread_get_thread_ident", types.int64())
_code_of: Any = types.ExternalFunction("PyFrame_GetCode", types.int64(types.int64))
_back_of: Any = types.ExternalFunction("PyFrame_GetBack", types.int64(types.int64))
_clear_error: Any = types.ExternalFunction("PyErr_Clear", types.void())


@njit
def _set(slot: Any, new: Any) -> None:
    """Store an object in a slot of another object."""
    old = load(slot)
    if old != new:
        _take(new)
        store(slot, new)
        if old:
            _drop(old)


@njit
def _is_at(state: Any, frame: Any, code: Any, instruction: Any) -> bool:
    """Return whether a frame runs an instruction of a code object."""
    found = _code_of(frame)
    _drop(found)  # the frame keeps it
    if found != code:
        return False
    # An int, in the lower half of the word.
    return bool(call_words(state.instruction_of, frame, 0, 0, 0) & 0xFFFFFFFF == instruction)


@njit
def _is_called_by(state: Any, entry: Any, frame: Any) -> bool:
    """Return whether the program's frame, some frames further out, is that of an entry."""
    _take(frame)
    for _ in range(entry.depth):
        outer = _back_of(frame)
        _drop(frame)
        if not outer:
            return False
        frame = outer
    found = _is_at(state, frame, entry.program_code, entry.program_instruction)
    _drop(frame)
    return found


@njit
def _same_words(a: Any, b: Any, count: Any) -> bool:
    for i in range(count):  # noqa: SIM110 (numba compiles no generator expression)
        if load(a + _WORD * i) != load(b + _WORD * i):
            return False
    return True


@njit
def _is_negated(state: Any, argument: Any) -> bool:
    """Return whether other numbers than a tensor's are in its memory; True also if unknown."""
    answer = call_words(state.call, state.is_neg, argument, 1, 0)
    if not answer:
        _clear_error()
        return True
    _drop(answer)
    return bool(answer != state.false)


@njit
def _describe(state: Any, tensor: Any, at: Any) -> bool:
    """Describe a tensor at an address; return whether it is on the host and in C order."""
    # An int, in the lower half of the word.
    if call_words(state.describe, tensor, at, 0, 0) & 0xFFFFFFFF:
        _clear_error()
        return False
    x = record(at, TENSOR)
    if x.device_type != _CPU or x.byte_offset or not x.data:
        return False
    expected = 1
    for i in range(x.axes):
        axis = _WORD * (x.axes - 1 - i)
        length = load(x.shape + axis)
        # Axes of length 1 have arbitrary strides.
        if x.strides and length != 1 and load(x.strides + axis) != expected:
            return False
        expected *= length
    return True


@njit
def _dtype_number(x: Any) -> int:
    return (x.lanes << 16) + (x.bits << 8) + x.code


@njit
def _is_tensor(state: Any, x: Any) -> bool:
    # No type has address 0, which both have before a tensor's call is known.
    return bool(x.type in (state.tensor_type, state.parameter_type))


@njit
def _are_readable(state: Any, given: Any, tensors: Any) -> bool:
    """Return whether a call's arrays are of one kind and in C order, and its result is writable.

    Tensors are described at the address `tensors`.
    """
    first, second = load(given), load(given + _WORD)
    x, out = array(first), array(second)
    has_out = second not in (state.none, first)
    if x.type == state.array_type:
        return is_contiguous(x) and (
            second == state.none or (out.type == x.type and is_writable(out))
        )
    if not _is_tensor(state, x):
        return False
    if not has_out:
        return not _is_negated(state, given) and _describe(state, first, tensors)
    return (
        _is_tensor(state, out)
        # Before anything is described, because this may run Python.
        and not _is_negated(state, given)
        and not _is_negated(state, given + _WORD)
        and _describe(state, first, tensors)
        and _describe(state, second, tensors + _TENSOR_BYTES)
    )


@njit
def _fits(state: Any, at: Any, first: Any, second: Any, tensors: Any) -> bool:
    """Return whether a result has the dtype and shape of the entry at `at`, and may be there."""
    entry, shape = record(at, ENTRY), at + _ENTRY.result_shape
    x, out = array(first), array(second)
    if x.type == state.array_type:
        if (
            out.descr != x.descr
            or out.ndim != entry.result_axes
            or not _same_words(out.shape, shape, entry.result_axes)
        ):
            return False
        between = out.data - x.data
    else:
        source, result = record(tensors, TENSOR), record(tensors + _TENSOR_BYTES, TENSOR)
        if (
            _dtype_number(result) != entry.dtype
            or result.axes != entry.result_axes
            or not _same_words(result.shape, shape, entry.result_axes)
        ):
            return False
        between = result.data - source.data
    return bool(
        between >= entry.nbytes or -between >= entry.result_nbytes or between == -entry.input_offset
    )


@njit
def _find(state: Any, given: Any, count: Any, tensors: Any) -> int:
    """Return the address of the entry of a call; 0 if it is unknown or may not begin."""
    none = state.none
    timeout = load(given + 3 * _WORD)
    if (
        not state.enabled
        or load(state.attributed)
        or not _are_readable(state, given, tensors)
        or load(state.gate) != none  # last, because another thread may have called meanwhile
    ):
        return 0
    first, second = load(given), load(given + _WORD)
    has_out = second not in (none, first)
    x = array(first)
    dtype, axes, shape = x.descr, x.ndim, x.shape
    if x.type != state.array_type:
        tensor = record(tensors, TENSOR)
        dtype, axes, shape = _dtype_number(tensor), tensor.axes, tensor.shape
    options = given + _BEFORE_OPTIONS * _WORD
    frame = load(given + 2 * _WORD)
    for i in range(state.known):
        at = state.entries + i * _ENTRY_BYTES
        entry = record(at, ENTRY)
        if (
            entry.dtype == dtype
            and entry.axes == axes
            and entry.in_place == (first == second)
            and entry.timeout == timeout
            and entry.count == count - _BEFORE_OPTIONS
            and _same_words(options, at + _ENTRY.options, entry.count)
            and _same_words(shape, at + _ENTRY.shape, axes)
            and _is_at(state, frame, entry.code, entry.instruction)
            and (entry.depth == 0 or _is_called_by(state, entry, frame))
            and (not has_out or _fits(state, at, first, second, tensors))
        ):
            return at
    return 0


@njit
def _new_result(state: Any, entry: Any, given: Any, at: Any) -> int:
    """Return a new array or tensor for the result of the entry at `at`; 0 without memory."""
    x = array(load(given))
    if x.type == state.array_type:
        _take(x.descr)  # the function takes over a reference
        shape = at + _ENTRY.result_shape
        return int(call_words(state.new_array, entry.result_axes, shape, x.descr, 0))
    if not entry.result_tuple:
        return int(call_words(state.call, state.tensor_like, given, 1, 0))
    arguments = state.own + _STATE.arguments
    store(arguments, load(given))
    store(arguments + _WORD, entry.result_tuple)
    return int(call_words(state.call, state.new_tensor, arguments, 2, 0))


@njit
def _target(state: Any, at: Any, first: Any, result: Any, tensors: Any) -> int:
    """Return the address of a result's elements, 0 for a tensor of another kind than its input."""
    made = array(result)
    if made.type == state.array_type:
        return int(made.data)
    if result == first:
        return int(record(tensors, TENSOR).data)
    described = tensors + _TENSOR_BYTES
    if not _is_tensor(state, made) or not _describe(state, result, described):
        return 0
    fits = _fits(state, at, first, result, tensors)
    return int(record(described, TENSOR).data) if fits else 0


@njit
def _begin(state: Any, entry: Any, number: Any, number_object: Any) -> int:
    """Record a call, and note it for the other ranks; return the address of the record."""
    state.number = number
    begun = load(state.begun)
    made = load(state.ring + _WORD * (begun % state.capacity))
    store(state.begun, begun + 1)
    _set(made + state.failure, state.none)
    _set(made + state.operation, entry.operation)
    _set(made + state.fields, entry.fields)
    _set(made + state.caller, entry.caller)
    old = load(made + state.record_number)
    store(made + state.record_number, number_object)
    if old:
        _drop(old)
    if load(state.noted_caller) != entry.caller or load(state.noted_operation) != entry.operation:
        record(state.note_length, _LENGTH).bytes = entry.text_bytes
        copy(state.note_text, entry.text, entry.text_bytes)
        _set(state.noted_caller, entry.caller)
        _set(state.noted_operation, entry.operation)
    return made


@njit
def _enter(state: Any, entry: Any, number: Any, number_object: Any) -> int:
    """Close the gate and begin a call; return the address of its record."""
    # The gate's reference to None is kept, and stored again at the end.
    _take(entry.plan)
    store(state.gate, entry.plan)
    state.owner = _thread()
    return _begin(state, entry, number, number_object)


@njit
def _run(state: Any, entry: Any, made: Any, send: Any, out: Any) -> Any:
    """Run the kernel of a call; return its status as an object."""
    store(entry.addresses, send)
    store(entry.addresses + _WORD, out - entry.before)
    arguments = state.own + _STATE.arguments
    store(arguments, entry.block)
    store(arguments + _WORD, load(made + state.times))
    store(arguments + 2 * _WORD, load(made + state.record_number))
    return call_words(entry.kernel, state.none, arguments, 3, 0)


@njit
def _leave(state: Any, plan: Any) -> None:
    """Reopen the gate after a call."""
    # The group may have become unusable meanwhile.
    unusable = load(state.unusable)
    store(state.gate, unusable)
    if unusable != state.none:
        _take(unusable)
        _drop(state.none)
    state.owner = 0
    _drop(plan)  # last, because it may free the group and the state


def _repeat(owner: int, given: int, count: int) -> int:
    """Repeat a call, a METH_FASTCALL function whose `self` is the address of the state.

    Arguments: those of `FastPath.repeat`. Returns the result, or None if nothing has happened.
    """
    at = numba_compiler.to_number(pointer(owner))
    state = record(at, STATE)
    none = state.none
    tensors = at + _STATE.given
    found = _find(state, given, count, tensors)
    if not found:
        _take(none)
        return none
    entry = record(found, ENTRY)
    plan = entry.plan  # kept, because another thread may replace the entry while the kernel runs
    first, result = load(given), load(given + _WORD)
    is_new = result == none
    are_tensors = array(first).type != state.array_type
    send = record(tensors, TENSOR).data if are_tensors else array(first).data
    if not is_new:
        _take(result)
    else:
        result = _new_result(state, entry, given, found)
    target = _target(state, found, first, result, tensors) if result else 0
    number = state.number + 1
    number_object = numba_compiler.from_number(number)
    # Without memory the full call informs the other ranks. Another thread may have run while
    # PyTorch made the result.
    if not target or not number_object or load(state.gate) != none or entry.plan != plan:
        _clear_error()
        if result:
            _drop(result)
        if number_object:
            _drop(number_object)
        _take(none)
        return none
    # Kept, because another thread may replace the entry while the kernel runs.
    marks, mismatch, complete = entry.marks, entry.detail_mismatch, entry.complete
    made = _enter(state, entry, number, number_object)
    status_object = _run(state, entry, made, send, target)
    if numba_compiler.to_number(pointer(status_object)) or load(mismatch):
        arguments = at + _STATE.arguments
        store(arguments, plan)
        store(arguments + _WORD, status_object)
        store(arguments + 2 * _WORD, result)
        store(arguments + 3 * _WORD, first)
        store(arguments + 4 * _WORD, load(given + _WORD))
        store(arguments + 5 * _WORD, load(given + 3 * _WORD))
        completed = call_words(state.call, complete, arguments, 6, 0)
        _drop(result)
        _drop(none)  # `complete` has stored a reference of its own
        result = completed
    else:
        _leave(state, plan)
    _drop(status_object)
    if are_tensors and marks and result and not is_new:
        # Lets autograd refuse a backward pass that needs the old elements.
        answer = call_words(state.call, state.mark_written, given + _WORD, 1, 0)
        if not answer:
            _drop(result)
            return 0
        _drop(answer)
    return result


def _repeat_at(at: int, found: int, send: int, out: int) -> int:
    """Repeat a call on memory, a C function for callers that hold the GIL.

    Args:
        at: address of the state.
        found: address of an entry.
        send: address of the array.
        out: address of the result.

    Returns:
        The status of the kernel, which `FastPath.complete` needs unless it is 0 (DONE). -1 if
        nothing has happened.
    """
    state, entry = record(at, STATE), record(found, ENTRY)
    none = state.none
    if not state.enabled or load(state.gate) != none or entry.generation != state.generation:
        return -1
    number = state.number + 1
    number_object = numba_compiler.from_number(number)
    if not number_object:
        _clear_error()
        return -1
    plan = entry.plan  # kept, because another thread may replace the entry while the kernel runs
    made = _enter(state, entry, number, number_object)
    status_object = _run(state, entry, made, send, out)
    status = numba_compiler.to_number(pointer(status_object))
    _drop(status_object)
    if status:
        _drop(none)  # `complete` stores a reference of its own
    else:
        _leave(state, plan)
    return status


_KINDS: dict[str, tuple[Any, int]] = {"repeat": (_repeat, 3), "repeat_at": (_repeat_at, 4)}


def all_words() -> Iterator[tuple[str, ...]]:
    """Yield the words of all functions."""
    return ((kind,) for kind in _KINDS)


def make(symbol: str, kind: str) -> bytes:
    """Return an object file with a function; arguments as `machine_code.load`."""
    function, arguments = _KINDS[kind]
    signature = types.int64(*[types.int64] * arguments)
    return numba_compiler.object_code(function, signature, symbol)
