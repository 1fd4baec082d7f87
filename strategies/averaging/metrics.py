"""Metrics averaged over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, overload

import numpy as np

import collectives as cc
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
    """Average a metric, or several, over the rows of all ranks.

    As if one process had computed it over all rows, where it is a mean over rows.

    *Collective*: all ranks, with the same names. The order of names does not matter.

    Args:
        metrics: a number, or numbers by name: of Python, or arrays of one element.
        examples: how many rows this rank's numbers are means of, 0 allowed: they may then be NaN.
            As it is, all ranks count alike.
        comm: the ranks; the whole job if None.

    Returns:
        The mean as a float, or means by name; the same bits on all ranks.

    Raises:
        ValueError: `examples` is not a number >= 0, or there are none on any rank; on all ranks.
        MismatchError: ranks differ in their names; on all ranks.

    Example:
        >>> metric_average({"loss": 0.5, "accuracy": 0.75}, examples=32)
        {'loss': 0.5, 'accuracy': 0.75}
    """
    comm = cc.init() if comm is None else comm
    several = isinstance(metrics, Mapping)
    named = metrics if several else {"": metrics}

    def prepare() -> tuple[np.ndarray[Any, Any], list[str]]:
        rows = number("metric_average", "examples", examples)
        values = [float(named[name]) for name in sorted(named)]
        sums = [value * rows if rows else 0.0 for value in values]
        return np.array([rows, *sums]), [f"metrics {sorted(named)}"]

    total, *sums = comm.allreduce(
        agreement.compare(comm, "metric_average", prepare), op=cc.SUM
    ).tolist()
    if not total:
        raise ValueError("metric_average: no rank has an example, expected at least one")
    means = dict(zip(sorted(named), (s / total for s in sums), strict=True))
    return {name: means[name] for name in named} if several else means[""]
