"""Compiled part of `collectives.calls.fast_path`: a repeated call as one C function.

It holds the GIL, except while the kernel of the plan runs. Importing this module loads numba.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import njit, types

from collectives.kernels import numba_compiler
from collectives.kernels.buffer_address_kernel import are_apart, array, fits, is_contiguous
from collectives.kernels.fast_path_layout import ENTRY, STATE
from collectives.kernels.intrinsics import call_words, copy, load, pointer, record, store
from collectives.kernels.structures import offsets

__all__ = ["all_words", "make"]

_WORD = 8
_LENGTH = np.dtype([("bytes", "u2")])

# Arguments of the operation: the array, the result, the frame and the timeout; then its options.
_BEFORE_OPTIONS = 4

_ENTRY, _STATE = offsets(ENTRY), offsets(STATE)
_ENTRY_BYTES = ENTRY.itemsize

# Objects are passed as their addresses.
_take: Any = types.ExternalFunction("Py_IncRef", types.void(types.int64))
_drop: Any = types.ExternalFunction("Py_DecRef", types.void(types.int64))
_thread: Any = types.ExternalFunction("PyThread_get_thread_ident", types.int64())
_code_of: Any = types.ExternalFunction("PyFrame_GetCode", types.int64(types.int64))
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
def _is_same_call(at: Any, options: Any, count: Any, x: Any) -> bool:
    """Return whether a call has the options, dtype and shape of an entry."""
    entry = record(at, ENTRY)
    if entry.count != count or entry.dtype != x.descr or entry.axes != x.ndim:
        return False
    for i in range(count):
        if load(options + _WORD * i) != load(at + _ENTRY.options + _WORD * i):
            return False
    for axis in range(x.ndim):  # noqa: SIM110 (numba compiles no generator expression)
        if load(x.shape + _WORD * axis) != load(at + _ENTRY.shape + _WORD * axis):
            return False
    return True


@njit
def _find(state: Any, given: Any, count: Any) -> int:
    """Return the address of the entry of a call; 0 if it is unknown or may not begin."""
    none = state.none
    timeout = load(given + 3 * _WORD)
    if not state.enabled or load(state.gate) != none or timeout != none or load(state.attributed):
        return 0
    first, second = load(given), load(given + _WORD)
    x = array(first)
    if x.type != state.array_type or not is_contiguous(x):
        return 0
    frame = load(given + 2 * _WORD)
    code = _code_of(frame)
    _drop(code)  # the frame keeps it
    # An int, in the lower half of the word.
    instruction = call_words(state.instruction_of, frame, 0, 0, 0) & 0xFFFFFFFF
    for i in range(state.known):
        at = state.entries + i * _ENTRY_BYTES
        entry = record(at, ENTRY)
        if (
            entry.code == code
            and entry.instruction == instruction
            and entry.in_place == (first == second)
            and _is_same_call(at, given + _BEFORE_OPTIONS * _WORD, count - _BEFORE_OPTIONS, x)
        ):
            if second == none:
                return at
            out = array(second)
            return at if fits(x, out) and (first == second or are_apart(x, out)) else 0
    return 0


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


def _repeat(owner: int, given: int, count: int) -> int:
    """Repeat a call, a METH_FASTCALL function whose `self` is the address of the state.

    Arguments: those of `FastPath.repeat`. Returns the result, or None if nothing has happened.
    """
    at = numba_compiler.to_number(pointer(owner))
    state = record(at, STATE)
    none = state.none
    found = _find(state, given, count)
    if not found:
        _take(none)
        return none
    entry = record(found, ENTRY)
    first, result = load(given), load(given + _WORD)
    if result != none:
        _take(result)
    else:
        result = call_words(state.new_like, first, 0, 0, 0)
    number = state.number + 1
    number_object = numba_compiler.from_number(number)
    if not result or not number_object:  # out of memory: the full call informs the other ranks
        _clear_error()
        if result:
            _drop(result)
        if number_object:
            _drop(number_object)
        _take(none)
        return none
    # The gate's reference to None is kept, and stored again at the end.
    plan = entry.plan
    _take(plan)
    store(state.gate, plan)
    state.owner = _thread()
    made = _begin(state, entry, number, number_object)
    store(entry.addresses, array(first).data)
    store(entry.addresses + _WORD, array(result).data)
    arguments = at + _STATE.arguments
    store(arguments, entry.block)
    store(arguments + _WORD, load(made + state.times))
    store(arguments + 2 * _WORD, number_object)
    status_object = call_words(entry.kernel, none, arguments, 3, 0)
    if numba_compiler.to_number(pointer(status_object)):
        store(arguments, plan)
        store(arguments + _WORD, status_object)
        store(arguments + 2 * _WORD, result)
        completed = call_words(state.call, state.complete, arguments, 3, 0)
        _drop(status_object)
        _drop(result)
        _drop(none)  # `complete` has stored a reference of its own
        return completed
    _drop(status_object)
    # The group may have become unusable meanwhile.
    unusable = load(state.unusable)
    store(state.gate, unusable)
    if unusable != none:
        _take(unusable)
        _drop(none)
    _drop(plan)
    state.owner = 0
    return result


def all_words() -> Iterator[tuple[str, ...]]:
    """Yield the words of all functions."""
    yield ("repeat",)


def make(symbol: str, kind: str) -> bytes:
    """Return an object file with a function; arguments as `machine_code.load`."""
    signature = types.int64(types.int64, types.int64, types.int64)
    return numba_compiler.object_code(_repeat, signature, symbol)
