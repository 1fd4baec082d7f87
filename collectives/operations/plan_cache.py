"""Plan cache: a repeated call finds the plan of its first call and runs it.

Plans exist for contiguous NumPy arrays. Arguments of other kinds are adapted to NumPy:

| kind | NumPy array for the lookup | result |
| --- | --- | --- |
| tensor on the host | view of its memory | `out`, or a new tensor |
| number, list | converted array | NumPy array |
| JAX array on the host | read-only view of its memory | new JAX array |
| small array on a CUDA device | pinned memory that the group keeps | copied back |

`NoPlan` means that no plan exists or an argument needs a check, and that nothing has happened yet.
The caller then runs the full call, which checks the arguments and informs the other ranks.

Cost: 1 to 2 us of Python per call in shared memory, 2 us more for tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from collectives.arrays import adapters
from collectives.arrays.adapter import ArrayAdapter
from collectives.arrays.host_arrays import Array, identity
from collectives.calls.call import is_timeout
from collectives.calls.fast_path import Given
from collectives.calls.group import Group
from collectives.devices.staged import DeviceOperations
from collectives.kernels import buffer_address
from collectives.node.shared_arrays import SharedLocation
from collectives.plans import planner as plans

__all__ = ["Key", "NoPlan", "run_cached", "run_cached_into", "run_cached_send", "store"]

Key = tuple[object, ...]
T = TypeVar("T")

# Types that `np.asarray` converts to an array.
_NUMBERS = (bool, int, float, complex, list, tuple, np.generic)


class NoPlan(Exception):
    """No plan exists, or an argument needs a check; nothing has happened yet."""


def run_cached(
    group: Group, key: Key, x: Any, out: Any, timeout: float | None, frame: FrameType,
    given: Given | None = None,
) -> Any:  # fmt: skip
    """Repeat an earlier call with its plan.

    Args as the caller's; `frame` is the frame of the caller's caller, `given` the caller's array
    and result if those of this call are adapted.

    Returns:
        `out`, or a new array with the result.

    Raises:
        NoPlan: run the full call.
        Others as `PreparedCall.run`.
    """
    if type(x) is not np.ndarray:
        array, target, finish = _adapt(group, key, x, out)
        return finish(run_cached(group, key, array, target, timeout, frame, Given(x, out)))
    dtype, shape = x.dtype, x.shape
    # A reduction in shared memory in place has a kernel and a plan of its own.
    place = _place(group, x) if out is x else None
    try:
        plan = group.plans[key, dtype, shape, place]
    except (KeyError, TypeError):  # an unknown call, or an argument without a hash
        raise NoPlan from None
    if (
        group.listener is not group.status  # a timeline needs more than the kernel records
        or not (timeout is None or is_timeout(timeout))
    ):
        return _run_checked(group, key, plan, x, out, timeout, frame, given)
    try:
        result = np.empty(shape, dtype) if out is None else out
    except MemoryError:  # the full call informs the other ranks
        raise NoPlan from None
    if group.gate is not None:
        group.check_free(plan.operation)
    group.gate = plan  # before its block changes, because another thread may use the plan
    if not group.address_reader.bind(plan.arrays, x, result):
        # Free again: `_run_checked` finds out what `bind` has refused, and may raise `NoPlan`.
        group.gate = group.unusable
        return _run_checked(group, key, plan, x, out, timeout, frame, given)
    plan.repeat(timeout, frame)
    group.fast_path.learn(group, plan, key, given or Given(x, out), timeout, frame)
    return result


def _place(group: Group, x: Array) -> SharedLocation | None:
    """Return where an in-place array is in shared memory, as part of its plan's key."""
    engine = group.node_engine
    if engine is None or not engine.shared:
        return None
    return engine.shared.location_at(group.address_reader.readable(x), x.nbytes)


def _find(group: Group, key: Key, x: Array, place: SharedLocation | None = None) -> Any:
    """Return the plan of a call with `x`, or raise `NoPlan`."""
    try:
        return group.plans[key, x.dtype, x.shape, place]
    except (KeyError, TypeError):  # an unknown call, or an argument without a hash
        raise NoPlan from None


def _run_checked(
    group: Group, key: Key, plan: Any, x: Array, out: Any, timeout: float | None, frame: FrameType,
    given: Given | None,
) -> Any:  # fmt: skip
    """Run a plan of any kind as `run_cached` does, after a check for overlapping arrays."""
    given = given or Given(x, out)
    readable, writable, _ = group.address_reader
    send = readable(x)
    if not send or not is_timeout(timeout):
        raise NoPlan
    if out is None:
        try:
            out = np.empty(x.shape if plan.shape is None else plan.shape, x.dtype)
        except MemoryError:  # the full call informs the other ranks
            raise NoPlan from None
    else:
        target = writable(x, out)
        if not target or (target != send and -x.nbytes < target - send < x.nbytes):
            raise NoPlan  # partial overlap: the call would overwrite input before reading it
        # Two objects with one memory: also in place, so `run_cached` has looked for the wrong plan.
        if target == send and out is not x:
            plan = _find(group, key, x, _place(group, x))
    plan.run(x, out, timeout, frame)
    group.fast_path.learn(group, plan, key, given, timeout, frame)
    return out


def run_cached_into(
    group: Group, key: Key, x: Any, out: Any, timeout: float | None, frame: FrameType,
    given: Given | None = None,
) -> Any:  # fmt: skip
    """Repeat a call as `run_cached` does, if the result has another shape than `x`.

    One array may be a part of the other, at the offset that the plan expects.
    """
    if type(x) is not np.ndarray:
        array, target, finish = _adapt(group, key, x, out)
        return finish(run_cached_into(group, key, array, target, timeout, frame, Given(x, out)))
    plan = _find(group, key, x)
    # The full call reports a wrong timeout to the other ranks.
    if type(out) is not np.ndarray or not is_timeout(timeout):
        raise NoPlan
    readable = group.address_reader.readable
    send, target = readable(x), readable(out)
    fits = out.shape == plan.shape and out.dtype == x.dtype and out.flags.writeable
    # Apart if one array ends before the other begins.
    apart = target - send >= x.nbytes or send - target >= out.nbytes
    apart = apart or (plan.input_offset is not None and target + plan.input_offset == send)
    if not (send and target and fits and apart):
        raise NoPlan
    plan.run(x, out, timeout, frame)
    group.fast_path.learn(group, plan, key, given or Given(x, out), timeout, frame)
    return out


def run_cached_send(
    group: Group, key: Key, x: Any, timeout: float | None, frame: FrameType,
    given: Given | None = None,
) -> Any:  # fmt: skip
    """Repeat a call as `run_cached` does, if its plan creates the result or has none on this rank.

    Args as `run_cached`; without `given` the fast path does not learn the call.

    Returns:
        The new array, of the kind of `x`; None without a result.
    """
    if type(x) is not np.ndarray:
        # Without a target, because the plan creates the result, or this rank has none.
        array, _, finish = _adapt(group, key, x, None)
        made = run_cached_send(group, key, array, timeout, frame, given)
        return None if made is None else finish(made)
    plan = _find(group, key, x)
    if not x.flags.c_contiguous or not is_timeout(timeout):
        raise NoPlan
    result = plan.run(x, None, timeout, frame)
    if given is not None:
        group.fast_path.learn(group, plan, key, given, timeout, frame)
    return result


def _adapt(group: Group, key: Key, x: Any, out: Any) -> tuple[Array, Any, Callable[[Array], Any]]:
    """Adapt an array of another kind to NumPy.

    Returns:
        The NumPy array; the array for its result, None for a new one; and a function that converts
        the result for the caller.
    """
    if isinstance(x, _NUMBERS):
        # The full call returns a NumPy array for numbers.
        return _ask(np.asarray, x), out, identity
    memory = _adapter_for(x)
    # One adapter for an in-place call, so that result and argument are one memory.
    to = memory if out is x else None
    if out is not x and not (out is None or type(out) is np.ndarray):
        to = _adapter_for(out)
    if memory.pinnable:
        array, target = _staging_copies(group, key, memory, to, out)
    elif memory.private or not (to is None or to.shared):
        # The full call copies elements that NumPy cannot view, and results that need a copy back.
        raise NoPlan
    else:
        array = target = _ask(memory.elements)
        if to is not memory:
            target = out if to is None else _ask(to.elements)
    if to is None:
        return array, target, identity if type(out) is np.ndarray else memory.wrap

    def write(made: Array) -> Any:
        to.write(made)
        return out

    return array, target, write


def _ask(library: Callable[..., T], *arguments: Any) -> T:
    """Call another library; on its errors raise `NoPlan`, because the full call reports them."""
    try:
        return library(*arguments)
    except adapters.FOREIGN_ERRORS:
        raise NoPlan from None


def _adapter_for(x: Any) -> ArrayAdapter:
    try:
        memory = None if isinstance(x, np.ndarray) else adapters.adapter_for(x)
    except adapters.FOREIGN_ERRORS:  # as in `_ask`
        raise NoPlan from None
    if memory is None:
        raise NoPlan
    return memory


def _staging_copies(
    group: Group, key: Key, memory: ArrayAdapter, to: ArrayAdapter | None, out: Any
) -> tuple[Array, Any]:
    """Copy a device array to host memory that the group keeps, and find memory for its result.

    Raises:
        NoPlan: no plan or memory exists, or the result does not fit; before any copy.
    """
    array = group.state_of(DeviceOperations).host_memory(str(key[0]), memory)
    if array is None:
        raise NoPlan
    # The kept memory may be shared among the ranks, so its place is a part of the key.
    plan = _find(group, key, array, _place(group, array))
    if plan.shape is not None:  # the result has another shape than `x`
        fits = to is None or to.shared
    elif to is not None and to.pinnable:
        alike = (to.shape, to.dtype) == (array.shape, array.dtype)
        fits = alike and to.why_constant() is None
    else:
        # For a NumPy `out` the result would stay in pinned memory, which the next call overwrites.
        fits = out is None
    if not fits:
        raise NoPlan
    # After all checks, because the copy waits for the device.
    _ask(memory.fetch, array)
    if plan.shape is None:
        return array, array
    return array, out if to is None else _ask(to.elements)


def store(group: Group, key: Key, x: Array, result: Any, plan: object) -> None:
    """Keep the plan of a call with `x` and its result on the host, if later calls can find it."""
    # Lookups are for contiguous arrays in native byte order.
    if x.flags.c_contiguous and x.dtype.isnative:
        engine, place = group.node_engine, None
        if engine is not None and isinstance(result, np.ndarray):
            place = engine.shared.location_of_pair(x, result)
        if group.size > 1:  # a single rank needs no compiled code
            group.address_reader = buffer_address.address_reader()
        if len(group.plans) >= plans.MOST:
            # All at once; ranks may differ in that, because first and later calls make the same
            # rounds.
            group.plans.clear()
            group.fast_path.clear()
        group.plans[key, x.dtype, x.shape, place] = plan
