"""`hvd.broadcast_object`, `broadcast_parameters` and related functions.

They are not matched by name: all ranks call them in the same order.
"""

from __future__ import annotations

from typing import Any

import strategies.averaging.broadcast as broadcasts
from strategies.averaging import metrics as of_ranks
from strategies.horovod.process_sets import Bound, ProcessSet, global_process_set

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "metric_average",
]


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of one rank, by pickle; *collective*. `name` is ignored."""
    bound = process_set.bound("broadcast_object")
    assert bound.comm is not None
    return bound.comm.broadcast_object(obj, _root(bound, root_rank, "broadcast_object"))


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, by pickle; *collective*. `name` is ignored."""
    bound = process_set.bound("allgather_object")
    assert bound.comm is not None
    return list(bound.comm.allgather_object(obj))


def broadcast_parameters(
    params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Broadcast the parameters of one rank; *collective*.

    Args:
        params: as for `strategies.broadcast_parameters`: a `state_dict()`, `named_parameters()`, a
            module.
        root_rank: rank with the parameters, as a rank of the world.
        process_set: the ranks.
    """
    bound = process_set.bound("broadcast_parameters")
    root = _root(bound, root_rank, "broadcast_parameters")
    broadcasts.broadcast_parameters(params, root, comm=bound.comm)


def broadcast_optimizer_state(
    optimizer: Any,
    root_rank: int = 0,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Broadcast the optimizer state of one rank; *collective*. `model` is ignored."""
    bound = process_set.bound("broadcast_optimizer_state")
    root = _root(bound, root_rank, "broadcast_optimizer_state")
    broadcasts.broadcast_optimizer_state(optimizer, root, comm=bound.comm)


def metric_average(
    metrics: Any, examples: float = 1, process_set: ProcessSet = global_process_set
) -> Any:
    """Average one or several metrics; as `strategies.metric_average`."""
    comm = process_set.bound("metric_average").comm
    return of_ranks.metric_average(metrics, examples, comm=comm)


def _root(bound: Bound, root_rank: int, operation: str) -> int:
    """Return a root's number in the process set; -1 for other ranks, which operations reject."""
    return bound.ranks.index(root_rank) if root_rank in bound.ranks else -1
