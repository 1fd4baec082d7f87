"""Fast path: a call that equals an earlier one from the same line runs as one C function.

The function (`collectives.kernels.fast_path_kernel`) compares a call with up to `MOST_ENTRIES`
known ones: the program's code and instruction, dtype and options by identity, shapes by value. It
sees PyTorch's tensors on the host by DLPack's C interface, without a NumPy array. It then does what
`plan_cache.run_cached` and `NodeCall.repeat` do for a plan of the node engine: sets the gate,
numbers and records the call, notes it on the status board, and runs the kernel. So flight records
and errors are those of other calls. Any other call returns None, and nothing has happened.

Cost: 0.3 us per call besides the kernel, 0.9 us in Python, 3 for a result of another shape; for a
tensor 0.7 us instead of 3 to 9.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import torch_adapter
from collectives.arrays.host_arrays import address
from collectives.kernels import buffer_address, machine_code
from collectives.kernels.fast_path_layout import (
    APART,
    MOST_AXES,
    MOST_ENTRIES,
    MOST_OPTIONS,
    TENSOR,
    Entry,
    State,
)
from collectives.node.control_block import Block
from collectives.tracing import call_sites
from collectives.tracing.peer_status import StatusBoard
from collectives.tracing.recorder import Record

__all__ = ["FastPath", "Given", "address_of", "is_usable", "slot_address"]

# Calls with one plan before the fast path learns them: a call that never comes again would only
# replace others.
_CALLS_BEFORE = 3

# How often the fast path learns calls with one plan: those of many lines would replace each other.
_MOST_LINES = 4

# Calls with one plan before a group of one rank learns them: loading compiled code takes 0.1 s, and
# saves 4 us per call.
_CALLS_BEFORE_ALONE = 500

# Index of PyArray_Empty among the functions of NumPy's C interface, in all versions.
_EMPTY = 184


_REPEAT = "collectives.kernels.fast_path_kernel", "repeat"


def _unknown(*call: object) -> None:
    """Return None: no call is known."""


class Given(NamedTuple):
    """Arguments of a call as the program gave them.

    Attributes:
        x: array or tensor.
        out: for the result; None for a new one.
        marks: whether autograd sees a write to the tensor `out`.
    """

    x: Any
    out: Any
    marks: bool = True


class FastPath:
    """Calls of one group that compiled code repeats.

    Attributes:
        repeat: called with array or tensor, result or None, caller's frame, timeout and options.
            Returns the result; None if the call is unknown, and nothing has happened.
        state: number and owner of the call under way; see `fast_path_layout.STATE`.
    """

    def __init__(self) -> None:
        self.state: Any = State()
        self.repeat: Any = _unknown
        self._entries = (Entry * MOST_ENTRIES)()
        # Objects of the entries, which hold only addresses.
        self._kept: list[object] = [None] * MOST_ENTRIES
        self._next = 0
        self._ring = np.zeros(0, np.int64)
        self._learned: dict[int, int] = {}
        # Threads of a group of one rank may learn calls at the same time.
        self._lock = threading.Lock()
        # Plan and number of the last call that `learn` was given.
        self._newest: tuple[Any, int] | None = None

    def clear(self) -> None:
        """Forget all calls."""
        self.state.known = self._next = 0
        self.state.generation += 1
        self._newest = None
        self._kept = [None] * MOST_ENTRIES
        self._learned.clear()

    def forget(self, plan: Any) -> None:
        """Forget the calls with one plan."""
        for entry in self._entries:
            if entry.plan == id(plan):
                entry.code = 0

    def learn(
        self, group: Any, plan: Any, options: tuple[object, ...], given: Given,
        timeout: float | None, frame: FrameType,
    ) -> None:  # fmt: skip
        """Learn the call that has just ended, after some calls with its plan.

        Does nothing while another thread learns a call, because a later one will do.

        Args:
            group: the `Group` of this fast path.
            plan: its `PreparedCall`.
            options: as given to `repeat`.
            given: learned only if these are arrays of NumPy, or tensors.
            timeout: seconds; None uses UNISONO_TIMEOUT.
            frame: frame of the operation's caller.
        """
        if timeout is None and plan.shape is None:
            self._newest = plan, self.state.number
        count = self._learned[id(plan)] = self._learned.get(id(plan), 0) + 1
        before = _CALLS_BEFORE if group.size > 1 else _CALLS_BEFORE_ALONE
        if count < before or count >= before + _MOST_LINES or not _is_loadable(group):
            return
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._store(group, plan, options, given, timeout, frame)
        finally:
            self._lock.release()

    def _store(
        self, group: Any, plan: Any, options: tuple[object, ...], given: Given,
        timeout: float | None, frame: FrameType,
    ) -> None:  # fmt: skip
        """Store the call that has just ended; arguments as `learn`."""
        x, out, marks = given
        generation = self.state.generation
        is_array = type(x) is np.ndarray
        number = id(x.dtype) if is_array else self._number_of(x)
        # A tensor and a parameter may be mixed.
        fits = out is None or type(out) is type(x) or (not is_array and self._number_of(out))
        if not number or not fits:
            return
        # Read once: another thread may begin a call at any time.
        operation, caller = _newest(group)
        depth = call_sites.depth_of(caller, frame)
        shape = tuple(x.shape) if plan.shape is None else plan.shape
        # A flat view of `out` may have been the result.
        shape = shape if out is None else tuple(out.shape)
        if (
            depth is None
            or operation != plan.operation
            or max(x.ndim, len(shape)) > MOST_AXES
            or len(options) > MOST_OPTIONS
            # Arrays in shared memory have plans of their own, by their address.
            or (out is x and group.node_engine is not None and len(group.node_engine.shared))
            or (node := plan.node_call()) is None
        ):
            return
        at = self._next % MOST_ENTRIES
        entry = self._entries[at]
        # Equal to no call until it is complete, because another thread may call meanwhile.
        entry.code = 0
        entry.instruction, entry.depth = frame.f_lasti, depth
        entry.program_code, entry.program_instruction = id(caller[0]), caller[1]
        entry.timeout, entry.in_place, entry.marks = id(timeout), out is x, marks
        entry.count = len(options)
        entry.options[: len(options)] = [id(option) for option in options]
        entry.dtype, entry.axes = number, x.ndim
        entry.shape[: x.ndim] = x.shape
        entry.result_axes, entry.result_tuple = len(shape), 0
        entry.result_shape[: len(shape)] = shape
        if shape != tuple(x.shape):
            entry.result_tuple = id(shape)
        entry.nbytes, entry.result_nbytes = x.nbytes, math.prod(shape) * x.dtype.itemsize
        entry.input_offset = APART if plan.shape is None else plan.input_offset
        described = self._describe(entry, group, plan, node, caller)
        code = frame.f_code
        if self.state.generation != generation:  # another thread has called `clear`
            return
        self._kept[at] = options, timeout, x.dtype, code, shape, described
        entry.code = id(code)
        self._next += 1
        self.state.known = min(self._next, MOST_ENTRIES)

    def _number_of(self, x: Any) -> int:
        """Return DLPack's number of a tensor's dtype; 0 if compiled code cannot read `x`."""
        functions = torch_adapter.tensor_functions(x)
        # Complex tensors may be lazily conjugated.
        if functions is None or x.is_complex():
            return 0
        state = self.state
        if not state.tensor_type:
            state.describe, state.is_neg = functions.describe, id(functions.is_neg)
            state.tensor_like, state.new_tensor = id(functions.empty_like), id(functions.new_empty)
            state.false = id(False)
            state.mark_written = id(functions.increment_version)
            state.parameter_type = id(functions.parameter)
            state.tensor_type = id(functions.tensor)
        kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
        described = np.zeros(1, TENSOR)
        kind(functions.describe)(x, address(described))
        code, bits, lanes = (int(described[name][0]) for name in ("code", "bits", "lanes"))
        return code + (bits << 8) + (lanes << 16)

    def take_newest(self, group: Any) -> tuple[Any, object] | None:
        """Return an entry of the group's last call for `repeat_at` of the kernel.

        Returns:
            The entry, and the objects that it refers to; None if `learn` was not given the call, or
            another thread learns one.
        """
        newest, self._newest = self._newest, None
        if newest is None or newest[1] != self.state.number or not is_usable():
            return None
        plan, _ = newest
        if not self._lock.acquire(blocking=False):
            return None
        try:
            operation, caller = _newest(group)
            if operation != plan.operation or (node := plan.node_call()) is None:
                return None
            entry = Entry(generation=self.state.generation)
            return entry, self._describe(entry, group, plan, node, caller)
        finally:
            self._lock.release()

    def _describe(
        self, entry: Any, group: Any, plan: Any, node: Any, caller: tuple[CodeType, int]
    ) -> object:
        """Store plan, record and note of a call in an entry; return their objects."""
        if self.repeat is _unknown:
            self._bind(group, group.status)
        text = group.status.text_of(node.operation, caller)
        entry.plan, entry.complete = id(plan), id(type(plan).complete)  # the class lives on
        entry.block, entry.addresses = id(node.block), node.block + Block.send.offset
        entry.before = -node.input_offset
        entry.detail_mismatch = node.block + Block.detail_mismatch.offset
        entry.kernel = _code_address(node.kernel)
        entry.operation, entry.fields = id(node.operation), id(node.fields)
        entry.caller = id(caller)
        entry.text, entry.text_bytes = address(np.frombuffer(text, np.uint8)), len(text)
        return plan, node, caller, caller[0], text, node.block

    def _bind(self, group: Any, board: StatusBoard) -> None:
        """Store the addresses that do not change, and load the function."""
        state = self.state
        state.own, state.entries = ctypes.addressof(state), ctypes.addressof(self._entries)
        state.gate, state.unusable = slot_address(group, "gate"), slot_address(group, "unusable")
        self._ring, state.capacity, state.begun = group.recorder.in_memory()
        state.ring = address(self._ring)
        names = ("failure", "number", "operation", "fields", "caller", "address")
        (
            state.failure, state.record_number, state.operation, state.fields, state.caller,
            state.times,
        ) = (_slot_offset(Record, name) for name in names)  # fmt: skip
        state.noted_operation = slot_address(board, "operation")
        state.noted_caller = slot_address(board, "caller")
        state.note_length, state.note_text = board.in_memory()
        state.none, state.array_type = id(None), id(np.ndarray)
        state.attributed = id(call_sites.attributed) + _ITEMS_OF_DICT
        state.call = address_of(ctypes.pythonapi.PyObject_Vectorcall)
        state.instruction_of = address_of(ctypes.pythonapi.PyFrame_GetLasti)
        state.new_array = _numpy_function(_EMPTY)
        self.repeat = machine_code.bound_function(ctypes.addressof(state), *_REPEAT)


def _newest(group: Any) -> tuple[str, tuple[CodeType, int]]:
    """Return operation and caller of a group's last call."""
    record = group.recorder.newest
    return record.operation, record.caller


# Offset of the number of items in a dict, after the two words of any object.
_ITEMS_OF_DICT = 16


def _is_loadable(group: Any) -> bool:
    """Return whether the fast path is usable; one rank compiles no code for it."""
    return (group.size > 1 or machine_code.is_kept(*_REPEAT)) and is_usable()


@functools.cache
def is_usable() -> bool:
    """Return whether the fast path knows this Python and this NumPy."""
    if (
        buffer_address.address_reader() is buffer_address.in_python
        or not hasattr(ctypes.pythonapi, "PyFrame_GetLasti")  # before Python 3.11
    ):
        return False
    x = np.ones((2, 3), np.float32)
    dicts: list[dict[int, int]] = [{}, {1: 2, 3: 4}]
    items = [ctypes.c_ssize_t.from_address(id(d) + _ITEMS_OF_DICT).value for d in dicts]
    shape, dtype = np.array(x.shape, np.intp), x.dtype
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dtype))  # the function takes over a reference
    made = ctypes.PYFUNCTYPE(
        ctypes.py_object, ctypes.c_int, ctypes.c_void_p, ctypes.py_object, ctypes.c_int
    )(_numpy_function(_EMPTY))(x.ndim, address(shape), dtype, 0)
    fits = (type(made), made.dtype, made.shape) == (np.ndarray, x.dtype, x.shape)
    return fits and items == [0, 2]


def address_of(function: Any) -> int:
    """Return the address of a function of `ctypes`."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _numpy_function(index: int) -> int:
    # NumPy 1.26 has a `_core` without the table.
    core = getattr(np, "_core", np)
    core = core if hasattr(core, "multiarray") else np.core
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    table = pointer(core.multiarray._ARRAY_API, None)
    return int(ctypes.c_int64.from_address(table + 8 * index).value)


def _code_address(function: Any) -> int:
    get = ctypes.pythonapi.PyCFunction_GetFunction
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object,)
    return int(get(function))


def slot_address(owner: object, name: str) -> int:
    """Return the address of an attribute of an object whose class declares it in `__slots__`."""
    kind: Any = type(owner)
    return id(owner) + _slot_offset(kind, name)


@functools.cache
def _slot_offset(owner: Any, name: str) -> int:
    """Return where objects of a class have an attribute of its `__slots__`, in bytes."""
    made, mark = owner.__new__(owner), object()
    setattr(made, name, mark)
    words = np.frombuffer(ctypes.string_at(id(made), owner.__basicsize__), np.int64)
    (found,) = np.flatnonzero(words == id(mark))
    return 8 * int(found)
