"""Memory of `collectives.calls.fast_path`, which Python and compiled code share.

Fields are 64-bit integers. *Object* means the address of a Python object, *slot* the address of an
attribute of an object whose class declares it in `__slots__`.
"""

from __future__ import annotations

import numpy as np

from collectives.kernels.structures import structure

__all__ = [
    "APART", "ENTRY", "MOST_AXES", "MOST_ENTRIES", "MOST_OPTIONS", "STATE", "TENSOR", "Entry",
    "State",
]  # fmt: skip

# Options of a call after its array, result, frame and timeout.
MOST_OPTIONS = 6

MOST_AXES = 4

# `input_offset` of arrays that may not overlap: no address is so far away.
APART = 1 << 62

# Calls of different lines, dtypes, shapes or options that are known at a time. A call takes 2 ns
# longer for each entry before its own.
MOST_ENTRIES = 64

# DLPack's DLTensor.
TENSOR = np.dtype(
    [
        ("data", "i8"),  # address, as shape and strides
        ("device_type", "i4"),
        ("device_id", "i4"),
        ("axes", "i4"),
        ("code", "u1"),  # kind of number
        ("bits", "u1"),
        ("lanes", "u2"),
        ("shape", "i8"),
        ("strides", "i8"),  # in elements; 0 in C order
        ("byte_offset", "i8"),
    ]
)

ENTRY = np.dtype(
    [
        # A call is repeated if all of these are equal:
        ("code", "i8"),  # object, of the frame that called the operation
        ("instruction", "i8"),
        ("depth", "i8"),  # frames from there out to the program's
        ("program_code", "i8"),  # object
        ("program_instruction", "i8"),
        ("timeout", "i8"),  # object
        ("count", "i8"),  # of options
        ("options", "i8", MOST_OPTIONS),  # objects
        ("dtype", "i8"),  # object; for a tensor the number of DLPack
        ("axes", "i8"),
        ("shape", "i8", MOST_AXES),
        ("in_place", "i8"),  # whether the result is the array itself
        # The result, whose dtype is that of the array:
        ("result_axes", "i8"),
        ("result_shape", "i8", MOST_AXES),
        ("result_tuple", "i8"),  # object, its shape if that is not the array's; else 0
        ("nbytes", "i8"),  # of the array
        ("result_nbytes", "i8"),
        # Bytes from the result to the array if the array may be a part of the result, or the result
        # a part of the array; else `APART`.
        ("input_offset", "i8"),
        ("marks", "i8"),  # whether autograd sees the write to a tensor
        # The plan:
        ("plan", "i8"),  # object
        ("kernel", "i8"),  # address of its C function
        ("block", "i8"),  # object, an int
        ("addresses", "i8"),  # of the two words for the addresses of the arrays
        ("before", "i8"),  # bytes by which the second one is before the result
        ("detail_mismatch", "i8"),  # address of a word; not 0 if the kernel has moved nothing
        ("complete", "i8"),  # object, `complete` of the plan's class
        # The record and the note of the call:
        ("operation", "i8"),  # object
        ("fields", "i8"),  # object
        ("caller", "i8"),  # object
        ("text", "i8"),  # address
        ("text_bytes", "i8"),
        ("generation", "i8"),  # of the state; for `repeat_at`
    ]
)

STATE = np.dtype(
    [
        ("enabled", "i8"),
        ("own", "i8"),  # address of this structure
        ("number", "i8"),  # of the group's last call
        # Thread that is in a compiled call, or was interrupted before `complete`.
        ("owner", "i8"),
        ("entries", "i8"),  # address
        ("known", "i8"),  # number of entries
        ("generation", "i8"),  # how often all calls have been forgotten
        # Of the group:
        ("gate", "i8"),  # slot
        ("unusable", "i8"),  # slot
        # Of the recorder:
        ("ring", "i8"),  # address of the records, objects
        ("capacity", "i8"),
        ("begun", "i8"),  # address of the number of records begun
        ("failure", "i8"),  # this and the next four: offsets of slots in a record
        ("record_number", "i8"),
        ("operation", "i8"),
        ("fields", "i8"),
        ("caller", "i8"),
        ("times", "i8"),  # offset of the slot with the address of the times, an int
        # Of the status board:
        ("noted_operation", "i8"),  # slot
        ("noted_caller", "i8"),  # slot
        ("note_text", "i8"),  # address
        ("note_length", "i8"),  # address of 16 bits
        # Of Python and NumPy:
        ("none", "i8"),  # object
        ("array_type", "i8"),  # object
        ("attributed", "i8"),  # address of the number of items of `call_sites.attributed`
        # Addresses of C functions; the first two since Python 3.11:
        ("call", "i8"),  # PyObject_Vectorcall
        ("instruction_of", "i8"),  # PyFrame_GetLasti
        ("new_array", "i8"),  # PyArray_Empty
        # Of PyTorch, 0 until a tensor's call is known:
        ("tensor_type", "i8"),  # object
        ("parameter_type", "i8"),  # object
        ("describe", "i8"),  # address of `dltensor_from_py_object_no_sync`
        ("is_neg", "i8"),  # object, `torch.Tensor.is_neg`
        ("tensor_like", "i8"),  # object, `torch.empty_like`
        ("new_tensor", "i8"),  # object, `torch.Tensor.new_empty`
        ("mark_written", "i8"),  # object, `torch.autograd.graph.increment_version`
        ("false", "i8"),  # object
        ("arguments", "i8", 6),  # of the kernel, and of `complete`
        ("given", "i8", 2 * TENSOR.itemsize // 8),  # two of `TENSOR`: array and result
    ]
)

Entry, State = map(structure, (ENTRY, STATE))
