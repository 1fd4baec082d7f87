"""`shared_variable`: creates or finds a variable on tasks."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.errors import InvalidArgumentError, NotFoundError, UnavailableError
from strategies.optimizers import Optimizer
from strategies.rpc.service import Service
from strategies.rpc.wire import Array
from strategies.variables import partition
from strategies.variables.array_input import to_host
from strategies.variables.client_ops import is_missing
from strategies.variables.initial_values import PartInitializer
from strategies.variables.initializers import Initializer
from strategies.variables.partition import Partitioner
from strategies.variables.request_handler import KIND, initialize_once
from strategies.variables.stored_variable import optimizer_to_dict
from strategies.variables.variable import PartitionedVariable, SharedVariable

__all__ = [
    "InitialValue",
    "open_variable",
    "reset_container",
    "shared_partitioned_variable",
    "shared_variable",
]

InitialValue = npt.ArrayLike | Callable[[], npt.ArrayLike] | None

# Before a longer initial value is sent, a request checks that the variable needs one.
_SHORT = 1 << 15  # bytes


def shared_variable(
    initial_value: InitialValue,
    *,
    service: Service,
    shared_name: str,
    task: int | str | None = None,
    container: str | None = None,
    optimizer: Optimizer | None = None,
    dtype: Any = None,
) -> SharedVariable:
    """Create a variable on a task, or find an existing one.

    The first initial value that arrives is used. Later ones are ignored, but must have the same
    shape and dtype. To choose the task that sets the value, pass None on all other tasks. Reads
    wait until the variable has a value.

    Args:
        initial_value: shape (...), copied; or a function without arguments that returns the array,
            called only if the variable has no value yet; or None if another task sets the value.
        service: open on all tasks.
        shared_name: name of the variable.
        task: number, or a device string such as "/job:ps/task:1". The enclosing `device` blocks
            fill in missing parts, or all of it for None.
        container: container of `shared_name`; None for the current one.
        optimizer: optimizer for `apply_gradients`. The task creates an equal optimizer for this
            variable alone, with slots on that task. A learning-rate function must be importable
            there.
        dtype: dtype of the variable; None for the dtype of `initial_value`.

    Raises:
        InvalidArgumentError: the name belongs to another object, or to a variable of another shape,
            dtype or optimizer; the message states the difference. An optimizer of None fits any.
        UnavailableError: the task cannot be reached.
        ValueError: the task does not exist, the name is empty, or the learning rate cannot be
            imported.
        TypeError: the value is not a numeric array, or the optimizer is not from this package.

    Example:
        >>> import collectives as cc
        >>> from strategies.optimizers import SGD
        >>> with Service(cc.init()) as service:
        ...     w = shared_variable(
        ...         [1.0, 2.0], service=service, shared_name="w", optimizer=SGD(0.5)
        ...     )
        ...     value, version = w.read()
        ...     update = w.apply_gradients(2 * value, seen=version)
        ...     w.read().value.tolist(), update.staleness
        ([0.0, 0.0], 0)
    """
    return open_variable(
        initial_value,
        service=service,
        shared_name=shared_name,
        task=task,
        container=container,
        optimizer=optimizer,
        dtype=dtype,
    )


def open_variable(
    initial_value: InitialValue,
    *,
    service: Service,
    shared_name: str,
    task: int | str | None,
    container: str | None,
    optimizer: Optimizer | None,
    shape: Sequence[int] | None = None,
    dtype: Any = None,
    whole: Mapping[str, Any] | None = None,
) -> SharedVariable:
    """Create or find a variable, also a part of a partitioned one; see `shared_variable`."""
    words = optimizer_to_dict(optimizer, "shared_variable")
    value = None
    if initial_value is not None and not callable(initial_value):
        value = _check(initial_value, dtype, shared_name)
    wanted = _properties(value, words, whole)
    if shape is not None:
        # Known without a value, such as for a part, so device functions can place it by size.
        wanted |= {"shape": list(shape), "dtype": np.dtype(dtype).name}
    # Without the value, which is sent only to a variable without one.
    address, _ = service.open(KIND, wanted, name=shared_name, task=task, container=container)
    variable = SharedVariable(service, address)
    # A short value costs no more than the question whether it is needed.
    short = value is not None and value.nbytes <= _SHORT
    if initial_value is None or not (short or is_missing(service, address)):
        return variable
    # Only an initializer of a part can be sent by name; other functions run on this task.
    part = initial_value if isinstance(initial_value, PartInitializer) else None
    here = address.task == service.task
    # The initializer makes the value in place, without a message.
    if part is not None and here:
        initialize_once(service.here(KIND, address), part, wanted)
    elif part is None or not _made_there(variable, part, wanted):
        if callable(initial_value):
            value = _check(initial_value(), dtype, shared_name)
            wanted = _properties(value, words, whole)
        assert value is not None
        if here:
            initialize_once(service.here(KIND, address), value, wanted)
        else:
            service.request(address, "initialize", {"is": wanted}, [value])
    return variable


def _made_there(variable: SharedVariable, part: PartInitializer, wanted: Mapping[str, Any]) -> bool:
    """Create the initial value on the variable's task; False if it lacks the initializer."""
    words = part.to_dict()
    if words is None:
        return False
    try:
        variable.service.request(variable.address, "make", {"is": dict(wanted), "part": words})
    except NotFoundError:  # such as a function of another program's `__main__`
        return False
    return True


def _properties(
    value: Array | None, optimizer: Mapping[str, Any] | None, whole: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the properties that all tasks must agree on; None fits any value."""
    return {
        "shape": None if value is None else list(value.shape),
        "dtype": None if value is None else value.dtype.name,
        "optimizer": None if optimizer is None else dict(optimizer),
        "whole": None if whole is None else dict(whole),
    }


def shared_partitioned_variable(
    initial_value: npt.ArrayLike | Initializer | None,
    *,
    partitioner: Partitioner,
    service: Service,
    shared_name: str,
    tasks: Sequence[int | str] | None = None,
    container: str | None = None,
    optimizer: Optimizer | None = None,
    shape: Sequence[int] | None = None,
    dtype: Any = None,
) -> PartitionedVariable:
    """Create or find a variable in parts on several tasks; see `shared_variable`.

    Args:
        initial_value: the whole array; or an initializer `(first, last, shape, dtype) -> rows first
            .. last - 1`, such as those of `strategies.variables.initializers`, so that no task
            holds the whole; or None if another task sets the value. An initializer and None require
            `shape`, because all tasks must compute the same partition. An initializer at the top
            level of a module, or a `functools.partial` of it with numbers or text, runs on the task
            of each part. Any other initializer runs on this task, once per part without a value. If
            the partition is along another axis than the first, all rows are created for each part,
            in blocks.
        partitioner: number of parts, such as `partition.fixed_size(4)`.
        service: open on all tasks.
        shared_name: name of the whole.
        tasks: tasks for the parts, in turn; None lets the enclosing `device` blocks place each
            part.
        container: container of the name; None for the current one.
        optimizer: optimizer; each part gets its own.
        shape: shape of the whole.
        dtype: dtype of the whole; None for the dtype of `initial_value`, float32 for an
            initializer.

    Raises:
        InvalidArgumentError: see `shared_variable`; or an initializer returns rows of the wrong
            shape.
        ValueError: shape or dtype is missing or does not fit, or the partition is invalid.

    Example:
        >>> import collectives as cc
        >>> with Service(cc.init()) as service:
        ...     table = shared_partitioned_variable(
        ...         np.zeros((10, 2)), partitioner=partition.fixed_size(3), service=service,
        ...         shared_name="table", tasks=[0],
        ...     )
        ...     versions = table.scatter_add([9, 0, 9], np.ones((3, 2)))
        ...     table.parts[2].name, versions, table.gather([9, 1, 0]).value[:, 0].tolist()
        ('table/part_2', (1, None, 1), [2.0, 0.0, 1.0])
    """
    value = None
    if callable(initial_value):
        dtype = np.float32 if dtype is None else dtype
    elif initial_value is not None:
        value = _check(initial_value, dtype, shared_name)
        if shape is not None:
            partition.check_shape("shared_partitioned_variable", value, shape, shared_name)
        shape, dtype = value.shape, value.dtype
    if shape is None or dtype is None:
        raise ValueError(
            f"shared_partitioned_variable: expected an array, or shape and dtype, got shape "
            f"{shape} and dtype {dtype} (variable: {shared_name})"
        )
    # `index` rejects floats, which `int` would truncate.
    shape, dtype = tuple(map(operator.index, shape)), np.dtype(dtype)
    if callable(initial_value) and not shape:
        raise ValueError(
            f"shared_partitioned_variable: expected a shape of at least one axis for an "
            f"initializer, got () (variable: {shared_name})"
        )
    cut = partition.checked(partitioner(shape, dtype), shape)
    axis, ends = partition.axis_of(cut), partition.offsets(shape, cut)
    parts = []
    for n, (low, high) in enumerate(itertools.pairwise(ends)):
        first: InitialValue = None
        if callable(initial_value):
            first = PartInitializer(initial_value, shape, dtype, axis, low, high, shared_name)
        elif value is not None:
            rows = (*[slice(None)] * axis, slice(low, high)) if shape else ()
            # A function, so that a part is copied and sent only if it has no value yet.
            first = partial(operator.getitem, value, rows)
        part = open_variable(
            first,
            service=service,
            shared_name=f"{shared_name}/part_{n}",
            # Round-robin, as TensorFlow's `replica_device_setter` places parts.
            task=tasks[n % len(tasks)] if tasks else None,
            container=container,
            optimizer=optimizer,
            shape=[high - low if at == axis else shape[at] for at in range(len(shape))],
            dtype=dtype,
            # A property, so that tasks with different partitions get an error.
            whole={"shape": list(shape), "partition": cut, "part": n},
        )
        parts.append(part)
    return PartitionedVariable(parts, shared_name, shape, dtype, cut)


def _check(value: Any, dtype: Any, name: str) -> Array:
    try:
        array = to_host(value, "shared_variable", name)
        if dtype is not None:
            array = to_host(array.astype(dtype), "shared_variable", name)
    except InvalidArgumentError as error:
        raise TypeError(str(error)) from error
    # The reshape keeps scalars: `ascontiguousarray` returns shape (1,) for them.
    return np.ascontiguousarray(array).reshape(array.shape)


def reset_container(
    containers: str | Iterable[str], *, service: Service, tasks: Iterable[int | str] | None = None
) -> None:
    """Remove the named resources of containers on several tasks; see `Service.reset`.

    Args:
        containers: one name, or several.
        service: service that reaches the tasks.
        tasks: tasks to reset; None for all.

    Raises:
        UnavailableError: a task cannot be reached; the reset of the remaining tasks is still done.
    """
    chosen = [containers] if isinstance(containers, str) else list(containers)
    failure: Exception | None = None
    for task in range(service.size) if tasks is None else tasks:
        try:
            service.reset(chosen, task=task)
        except UnavailableError as error:
            # Other tasks are still reset; the first error is raised at the end.
            failure = failure or error
    if failure is not None:
        raise failure
