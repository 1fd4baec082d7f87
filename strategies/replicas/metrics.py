"""Metrics accumulated by replicas and merged on request."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from strategies.core import array_ops
from strategies.core.validation import number
from strategies.replicas import context
from strategies.replicas.variable import Variable

__all__ = ["MeanMetric", "SumMetric"]


class _Strategy(Protocol):
    """What makes variables."""

    is_in_step: bool

    def variable(self, initial_value: Any, **options: Any) -> Variable:
        """See `Strategy.variable`."""


class SumMetric:
    """A sum of what all replicas of all ranks have added.

    Adding exchanges nothing: each replica has a sum of its own, in float64, or on devices of JAX in
    what it computes with, usually float32. Where a strategy compiles, it is a part of the program.

    Args:
        strategy: whose replicas add to it; one whose replicas are in step. *Collective*: all ranks
            make the same metrics in the same order.
        name: of its variable, also in checkpoints.

    Raises:
        ValueError: the name is taken, or the replicas are not in step.
    """

    def __init__(self, strategy: _Strategy, name: str) -> None:
        self.name = name
        self._total = _sum(strategy, name)

    def update(self, values: Any) -> None:
        """Add all elements of an array, or a number; in a replica."""
        self._total.assign_add(_add(values))

    def result(self) -> float:
        """Return the sum over all replicas; *collective*, outside of replicas."""
        return float(self._total.value)

    def reset(self) -> None:
        """Begin anew; on all ranks, outside of replicas."""
        self._total.assign(np.zeros(()))


class MeanMetric:
    """A mean over the rows of all replicas of all ranks, such as of a loss or an accuracy.

    As if one process had seen all rows: replicas with more rows count more, and one without any
    does not count.

    Args:
        strategy: as for `SumMetric`.
        name: of the metric; its variables are `NAME/total` and `NAME/rows`.

    Raises:
        ValueError: as `SumMetric`.

    Example:
        >>> from strategies.strategy.synchronous_strategies import MirroredStrategy
        >>> strategy = MirroredStrategy(["/cpu:0", "/cpu:1"])
        >>> loss = MeanMetric(strategy, "loss")
        >>> for rows in strategy.distribute_dataset([np.array([1.0, 2.0, 6.0])]):
        ...     _ = strategy.run(loss.update, args=(rows,))
        >>> loss.result()
        3.0
    """

    def __init__(self, strategy: _Strategy, name: str) -> None:
        self.name = name
        self._total = _sum(strategy, f"{name}/total")
        self._rows = _sum(strategy, f"{name}/rows")

    def update(self, values: Any, examples: float | None = None) -> None:
        """Add rows; in a replica.

        Args:
            values: an array of any library with a number or truth value for each row; or, with
                `examples`, one number, which is a mean.
            examples: over how many rows `values` is the mean, 0 allowed: it may then be NaN.

        Raises:
            ValueError: `examples` is not a number >= 0.
        """
        if examples is None:
            self._total.assign_add(_add(values))
            self._rows.assign_add(float(np.prod(np.shape(values))))
            return
        rows = number(f"{self.name}: update", "examples", examples)
        self._total.assign_add(_add(values) * rows if rows else 0.0)
        self._rows.assign_add(rows)

    def result(self) -> float:
        """Return the mean; NaN if there was no row. *Collective*, outside of replicas."""
        total, rows = float(self._total.value), float(self._rows.value)
        return total / rows if rows else float("nan")

    def reset(self) -> None:
        """Begin anew; on all ranks, outside of replicas."""
        self._total.assign(np.zeros(()))
        self._rows.assign(np.zeros(()))


def _sum(strategy: _Strategy, name: str) -> Variable:
    if not strategy.is_in_step:
        raise ValueError(
            f"metric: replicas of a {type(strategy).__name__} are not in step, so that none can "
            f"ask for the sums of all, expected each to report its own numbers (metric: {name})"
        )
    return strategy.variable(np.zeros(()), name=name, synchronization="on_read", aggregation="sum")


def _add(values: Any) -> Any:
    """Return the sum of an array's elements: a float, or traced where a program is compiled."""
    top = context.current()
    array = values if array_ops.is_array(values) else np.asarray(values)
    if hasattr(array, "detach"):  # a tensor: no gradient goes through here
        array = array.detach()
    total = array_ops.arithmetic_dtype(array).sum()
    traced = top is not None and top.replica is not None and top.replica.is_traced
    return total if traced else float(total)
