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

# A longer initial value is sent only if nobody has set one yet, which is asked first.
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
    """Make a variable that lives on a task, or find it there.

    Who comes first with an initial value sets it; later ones are not used, but must have the same
    shape and dtype. So the value is the one of a certain task if that one alone gives any. Who
    reads the variable before there is a value waits for it.

    Args:
        initial_value: shape (...), copied; or a function without arguments that returns it, called
            only if there is no value yet; or None to let another task set it.
        service: open on all tasks.
        shared_name: of the variable.
        task: where it lives: a number, or a device string such as "/job:ps/task:1"; what that
            leaves open, or None, is decided by the `device` blocks around.
        container: set of names that `shared_name` belongs to; None for the current one.
        optimizer: for `apply_gradients`. The task makes one like it for this variable alone, and
            its slots live there. A learning rate that is a function must be one that the task can
            import.
        dtype: of the variable, that of `initial_value` if None.

    Raises:
        InvalidArgumentError: the name belongs to something else, or to a variable of another shape,
            dtype or optimizer; says which. An optimizer of None fits any.
        UnavailableError: the task cannot be reached.
        ValueError: no such task, no name, or a learning rate that the task cannot import.
        TypeError: not an array of numbers, or not one of the optimizers of this package.

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
    """As `shared_variable`, for one that may be part of a whole."""
    words = optimizer_to_dict(optimizer, "shared_variable")
    value = None
    if initial_value is not None and not callable(initial_value):
        value = _check(initial_value, dtype, shared_name)
    wanted = _properties(value, words, whole)
    if shape is not None:
        wanted |= {"shape": list(shape), "dtype": np.dtype(dtype).name}
    address, _ = service.open(KIND, wanted, name=shared_name, task=task, container=container)
    variable = SharedVariable(service, address)
    short = value is not None and value.nbytes <= _SHORT
    if initial_value is None or not (short or is_missing(service, address)):
        return variable
    part = initial_value if isinstance(initial_value, PartInitializer) else None
    here = address.task == service.task
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
    """Let the task of a variable make its first value; False if it cannot import what makes it."""
    words = part.to_dict()
    if words is None:
        return False
    try:
        variable.service.request(variable.address, "make", {"is": dict(wanted), "part": words})
    except NotFoundError:  # such as of another program's `__main__`
        return False
    return True


def _properties(
    value: Array | None, optimizer: Mapping[str, Any] | None, whole: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return what all who ask for a variable must agree in; None fits any."""
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
    """Make a variable in parts that live on tasks, or find it there; see `shared_variable`.

    Args:
        initial_value: the whole; or an initializer `(first, last, shape, dtype) -> rows first ..
            last - 1`, such as those of `strategies.variables.initializers`, by which nobody has
            the whole; or None, to let another task set it. With the latter two `shape` is needed,
            since all tasks have to cut alike. An initializer at the top of a module, also one in
            `functools.partial` with numbers or text, is called on the task of each part; any other
            one here, for one part after the other that nobody has set. Cut along another axis than
            the first, all rows are made for each part, a few at a time.
        partitioner: how many parts there are, such as `partition.fixed_size(4)`.
        service: open on all tasks.
        shared_name: of the whole.
        tasks: on which the parts are in turn; if None, the `device` blocks around decide for each.
        container: set of names; None for the current one.
        optimizer: each part has one of its own.
        shape: of the whole.
        dtype: of the whole, that of `initial_value` if None; float32 for an initializer.

    Raises:
        InvalidArgumentError: as `shared_variable`; or an initializer makes other rows than it was
            asked for.
        ValueError: shape or dtype are not known, do not fit, or the partitioner gives no partition.

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
            first = partial(operator.getitem, value, rows)
        part = open_variable(
            first,
            service=service,
            shared_name=f"{shared_name}/part_{n}",
            task=tasks[n % len(tasks)] if tasks else None,
            container=container,
            optimizer=optimizer,
            shape=[high - low if at == axis else shape[at] for at in range(len(shape))],
            dtype=dtype,
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
    return np.ascontiguousarray(array).reshape(array.shape)


def reset_container(
    containers: str | Iterable[str], *, service: Service, tasks: Iterable[int | str] | None = None
) -> None:
    """Forget the named things in a container, on several tasks; see `Service.reset`.

    Args:
        containers: one name, or several.
        service: reaches the tasks.
        tasks: which ones; all if None.

    Raises:
        UnavailableError: a task cannot be reached; the others' things are forgotten nevertheless.
    """
    chosen = [containers] if isinstance(containers, str) else list(containers)
    failure: Exception | None = None
    for task in range(service.size) if tasks is None else tasks:
        try:
            service.reset(chosen, task=task)
        except UnavailableError as error:
            failure = failure or error
    if failure is not None:
        raise failure
