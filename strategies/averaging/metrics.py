"""Metrics averaged over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, overload

import numpy as np

import collectives as cc
from collectives import extend
from strategies.core import agreement
from strategies.core.validation import number

__all__ = ["metric_average"]

M = TypeVar("M", bound=Mapping[str, Any])


@overload
def metric_average(
    metrics: Mapping[str, Any], examples: float = 1, *, comm: cc.Communicator | None = None
) -> dict[str, float]: ...
@overload
def metric_average(
    metrics: Any, examples: float = 1, *, comm: cc.Communicator | None = None
) -> float: ...
def metric_average(
    metrics: Any, examples: float = 1, *, comm: cc.Communicator | None = None
) -> Any:
    """Average one or several metrics over the rows of all ranks.

    For a mean over rows, as if one process had computed it over all rows.

    *Collective*: all ranks, with the same names in any order.

    Args:
        metrics: a number, or numbers by name: Python numbers, or arrays of one element.
        examples: number of rows that this rank's numbers are the mean of. With 0 they may be NaN.
            The default weights all ranks equally.
        comm: the ranks; None for the whole job.

    Returns:
        The mean as a float, or means by name; the same bits on all ranks.

    Raises:
        ValueError: `examples` is not a number >= 0, or it is 0 on all ranks; on all ranks.
        MismatchError: ranks differ in their names; on all ranks.

    Example:
        >>> metric_average({"loss": 0.5, "accuracy": 0.75}, examples=32)
        {'loss': 0.5, 'accuracy': 0.75}
    """
    comm = extend.comm_or_world(comm, "metric_average")
    several = isinstance(metrics, Mapping)
    named = metrics if several else {"": metrics}

    def prepare() -> tuple[np.ndarray[Any, Any], list[str]]:
        rows = number("metric_average", "examples", examples)
        # Sorted, because ranks may pass the names in different orders.
        values = [float(named[name]) for name in sorted(named)]
        # Without rows the value may be NaN, which must not enter the sum.
        sums = [value * rows if rows else 0.0 for value in values]
        return np.array([rows, *sums]), [f"metrics {sorted(named)}"]

    total, *sums = comm.allreduce(
        agreement.compare(comm, "metric_average", prepare), op=cc.SUM
    ).tolist()
    if not total:
        raise ValueError("metric_average: no rank has an example, expected at least one")
    means = dict(zip(sorted(named), (s / total for s in sums), strict=True))
    # In the caller's order, which may differ from the sorted one of the sums.
    return {name: means[name] for name in named} if several else means[""]
