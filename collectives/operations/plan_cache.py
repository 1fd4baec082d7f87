"""Plan cache: a repeated call finds the plan of its first call and runs it.

Plans are found for contiguous arrays of NumPy. What is of other kinds is looked for as what NumPy
sees of it:

| kind | what is looked for | and the result |
| --- | --- | --- |
| tensor on the host | an array of its memory | is there, or becomes a tensor |
| number, list | the array of it | is an array of NumPy |
| array of JAX on the host | its memory, to be read | becomes one of JAX |
| small array on a CUDA device | pinned memory that the group keeps | is copied back |

Nothing has happened where nothing is found, or anything looks odd: the caller goes the long way,
which says what is wrong and tells the other ranks.

Cost: 1 to 2 us of Python per call in shared memory, 2 more for tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import adapters
from collectives.arrays.adapter import ArrayAdapter
from collectives.arrays.host_arrays import Array, identity
from collectives.calls.group import Group
from collectives.devices.staged import DeviceOperations
from collectives.kernels import buffer_address
from collectives.node.shared_arrays import SharedLocation
from collectives.plans import planner as plans

__all__ = ["DEFERRED_OUT", "Key", "run_cached", "run_cached_into", "store"]

Key = tuple[object, ...]

# In place of an array: the caller finds one for the result, perhaps as the ranks meet.
DEFERRED_OUT: Any = object()

# What goes wrong in a look-up and is for the long way, which tells the other ranks of it: an
# unknown call, arguments that cannot be looked for or compared, no memory for the result.
_NOT_FOUND = (KeyError, TypeError, ValueError, MemoryError)

# What else goes wrong where arrays of other libraries are looked at.
_NOT_ADAPTED = (*_NOT_FOUND, AttributeError, BufferError, LookupError, RuntimeError)

# Of what NumPy makes arrays, when it is asked for one.
_NUMBERS = (bool, int, float, complex, list, tuple, np.generic)


def run_cached(
    group: Group, key: Key, x: Any, out: Any, timeout: float | None, frame: FrameType
) -> Any:
    """Make a call that is like an earlier one, by the plan of that one.

    Args as the caller's. `out` may be `DEFERRED_OUT`; `frame` is that of the caller's caller.

    Returns:
        Where the result is: `out`, or a new array; `DEFERRED_OUT` if that was given and the plan
        makes none. None where no plan is known, or something needs a closer look: nothing has
        happened then.

    Raises:
        As `NodeCall.run`.
    """
    if type(x) is not np.ndarray:
        return _run_adapted(run_cached, group, key, x, out, timeout, frame)
    try:
        dtype, shape = x.dtype, x.shape
        plan = group.plans[key, dtype, shape, _place(group, x) if out is x else None]
        result = np.empty(shape, dtype) if out is None else out
        if (
            group.listener is not group.status  # who wants to know more than a kernel tells
            or not (timeout is None or timeout > 0)
        ):
            return _by_addresses(group, key, x, out, timeout, frame)
        if group.gate is not None:
            group.check_free(plan.operation)
        group.gate = plan  # before its block changes, because another thread may use the plan
        if not group.address_reader.bind(plan.arrays, x, result):
            group.gate = group.unusable
            return _by_addresses(group, key, x, out, timeout, frame)
    except _NOT_FOUND:
        return _by_addresses(group, key, x, out, timeout, frame)
    plan.repeat(timeout, frame)
    return result


def _place(group: Group, x: Array) -> SharedLocation | None:
    """Say where an array that is reduced in place lies in shared memory, for its plan's key."""
    engine = group.node_engine
    if engine is None or not engine.shared:
        return None
    return engine.shared.location_at(group.address_reader.readable(x), x.nbytes)


def _by_addresses(
    group: Group, key: Key, x: Array, out: Any, timeout: float | None, frame: FrameType
) -> Any:
    """As `run_cached`, for plans of any kind; finds out here whether the arrays share memory."""
    try:
        readable, writable, _ = group.address_reader
        send: Any = readable(x)
        if not send or not (timeout is None or timeout > 0):
            return None
        target: Any = 0
        place = None
        if out is not None and out is not DEFERRED_OUT:
            target = writable(x, out)
            if not target:
                return None
            if target == send:
                engine = group.node_engine  # its place in shared memory is a part of the key
                place = None if engine is None else engine.shared.location_at(send, x.nbytes)
            elif -x.nbytes < target - send < x.nbytes:  # what is written would be read again
                return None
        plan = group.plans[key, x.dtype, x.shape, place]
        if out is None:
            out = np.empty(x.shape if plan.shape is None else plan.shape, x.dtype)
            target = readable(out)
        if plan.by_messages:
            send, target = x.reshape(-1), None if out is DEFERRED_OUT else out.reshape(-1)
    except _NOT_FOUND:
        return None
    made = plan.run(send, target, timeout, frame)
    return out if made is None else made


def run_cached_into(
    group: Group, key: Key, x: Any, out: Any, timeout: float | None, frame: FrameType
) -> Any:
    """As `run_cached`, for a call whose result has another shape than `x`, and goes into `out`.

    Either of them may be a part of the other one, in its place.

    Returns:
        `out`; None where no plan is known, or something needs a closer look.
    """
    if type(x) is not np.ndarray:
        return _run_adapted(run_cached_into, group, key, x, out, timeout, frame)
    if type(out) is not np.ndarray:
        return None
    try:
        plan = group.plans[key, x.dtype, x.shape, None]
        readable = group.address_reader.readable
        send: Any = readable(x)
        target: Any = readable(out)
        fits = out.shape == plan.shape and out.dtype == x.dtype and out.flags.writeable
        apart = target - send >= x.nbytes or send - target >= out.nbytes
        apart = apart or (plan.input_offset is not None and target + plan.input_offset == send)
        if not (send and target and fits and apart and (timeout is None or timeout > 0)):
            return None
        if plan.by_messages:
            send, target = x.reshape(-1), out.reshape(-1)
    except _NOT_FOUND:
        return None
    plan.run(send, target, timeout, frame)
    return out


class _Adapted(NamedTuple):
    """What is looked for in place of an array of another kind.

    Attributes:
        array: with its elements.
        out: for the result: an array; None for a new one, or `DEFERRED_OUT`.
        finish: makes of the result what the caller gets.
    """

    array: Array
    out: Any
    finish: Callable[[Array], Any]


def _run_adapted(
    find: Callable[..., Any],
    group: Group,
    key: Key,
    x: Any,
    out: Any,
    timeout: float | None,
    frame: FrameType,
) -> Any:
    """As `find`, which is `run_cached` or `run_cached_into`, for what is not an array of NumPy."""
    try:
        seen = _adapt(group, key, x, out)
    except _NOT_ADAPTED:
        return None
    if seen is None:
        return None
    made = find(group, key, seen.array, seen.out, timeout, frame)
    return made if made is None or made is DEFERRED_OUT else seen.finish(made)


def _adapt(group: Group, key: Key, x: Any, out: Any) -> _Adapted | None:
    """See an array of another kind as one of NumPy, and where its result goes."""
    if isinstance(x, _NUMBERS):
        return _Adapted(np.asarray(x), out, identity)
    memory = None if isinstance(x, np.ndarray) else adapters.adapter_for(x)
    if memory is None:
        return None
    to = memory if out is x else None
    if out is not x and not (out is None or out is DEFERRED_OUT or type(out) is np.ndarray):
        to = adapters.adapter_for(out)
        if to is None or not (to.shared or to.pinnable):
            return None
    array, result = (_staging_copies if memory.pinnable else _host_views)(
        group, key, memory, to, out
    )
    if to is None:
        return _Adapted(array, result, identity if type(out) is np.ndarray else memory.wrap)

    def write(made: Array) -> Any:
        to.write(made)
        return out

    return _Adapted(array, result, write)


def _host_views(
    group: Group, key: Key, memory: ArrayAdapter, to: ArrayAdapter | None, out: Any
) -> tuple[Array, Any]:
    """Return the memory of an array of the host, and that of its result.

    Raises:
        LookupError: this is not memory of theirs.
    """
    if memory.private or not (to is None or to.shared):
        raise LookupError
    array = memory.elements()
    if to is None:
        return array, out
    return array, array if to is memory else to.elements()


def _staging_copies(
    group: Group, key: Key, memory: ArrayAdapter, to: ArrayAdapter | None, out: Any
) -> tuple[Array, Any]:
    """Copy an array of a device to host memory that is kept, where its result goes, too.

    Raises:
        LookupError: there is no plan, or the result does not fit; before anything is copied.
    """
    array = group.state_of(DeviceOperations).host_memory(str(key[0]), memory)
    if array is None:
        raise LookupError
    plan = group.plans[key, array.dtype, array.shape, _place(group, array)]
    in_place = plan.shape is None and out is not DEFERRED_OUT
    if not in_place:  # the result is of another shape
        fits = to is None or to.shared
    elif to is not None and to.pinnable:
        alike = (to.shape, to.dtype) == (array.shape, array.dtype)
        fits = alike and to.why_constant() is None
    else:
        fits = out is None
    if not fits:
        raise LookupError
    memory.fetch(array)
    if in_place:
        return array, array
    return array, out if to is None else to.elements()


def store(group: Group, key: Key, x: Array, result: Any, plan: object) -> None:
    """Keep the plan of a call with `x` and its result in host memory, if later ones can find it."""
    if x.flags.c_contiguous and x.dtype.isnative:
        engine, place = group.node_engine, None
        if engine is not None and isinstance(result, np.ndarray):
            place = engine.shared.location_of_pair(x, result)
        if group.size > 1:  # nothing is compiled for a rank alone
            group.address_reader = buffer_address.address_reader()
        if len(group.plans) >= plans.MOST:
            group.plans.clear()
        group.plans[key, x.dtype, x.shape, place] = plan
