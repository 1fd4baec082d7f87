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
    """The part of a strategy that makes variables."""

    is_in_step: bool

    def variable(self, initial_value: Any, **options: Any) -> Variable:
        """See `Strategy.variable`."""


class SumMetric:
    """The sum of all values that the replicas of all ranks have added.

    Adding needs no communication: each replica has its own sum, in float64. On JAX devices the sum
    has the dtype of arithmetic, usually float32. If a strategy compiles, adding is part of the
    program.

    Args:
        strategy: strategy whose replicas add; they must be in step. *Collective*: all ranks make
            the same metrics in the same order.
        name: name of its variable, also in checkpoints.

    Raises:
        ValueError: the name is in use, or the replicas are not in step.
    """

    def __init__(self, strategy: _Strategy, name: str) -> None:
        self.name = name
        self._total = _sum(strategy, name)

    def update(self, values: Any) -> None:
        """Add a number, or all elements of an array; in a replica."""
        # In float64, or the dtype of JAX: see `_sum`.
        self._total.assign_add(_add(values))

    def result(self) -> float:
        """Return the sum over all replicas; *collective*, outside of replicas."""
        return float(self._total.value)

    def reset(self) -> None:
        """Set the sum to 0; on all ranks, outside of replicas."""
        self._total.assign(np.zeros(()))


class MeanMetric:
    """The mean over the rows of all replicas of all ranks, such as of a loss or an accuracy.

    As if one process had seen all rows: replicas are weighted by their rows.

    Args:
        strategy: as for `SumMetric`.
        name: name of the metric; its variables are `NAME/total` and `NAME/rows`.

    Raises:
        ValueError: as for `SumMetric`.

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
            examples: number of rows that `values` is the mean of; with 0 it may be NaN.

        Raises:
            ValueError: `examples` is not a number >= 0.
        """
        if examples is None:
            self._total.assign_add(_add(values))
            # `np.shape` accepts arrays of all libraries; () has one element.
            self._rows.assign_add(float(np.prod(np.shape(values))))
            return
        rows = number(f"{self.name}: update", "examples", examples)
        # Without rows the mean may be NaN, and NaN * 0 is NaN.
        self._total.assign_add(_add(values) * rows if rows else 0.0)
        self._rows.assign_add(rows)

    def result(self) -> float:
        """Return the mean; NaN without rows. *Collective*, outside of replicas."""
        total, rows = float(self._total.value), float(self._rows.value)
        return total / rows if rows else float("nan")

    def reset(self) -> None:
        """Remove all rows; on all ranks, outside of replicas."""
        self._total.assign(np.zeros(()))
        self._rows.assign(np.zeros(()))


def _sum(strategy: _Strategy, name: str) -> Variable:
    if not strategy.is_in_step:
        # An "on_read" sum over replicas that never synchronize has no defined moment.
        raise ValueError(
            f"metric: replicas of a {type(strategy).__name__} are not in step, so sums over all "
            f"of them are undefined; report numbers per replica (metric: {name})"
        )
    return strategy.variable(np.zeros(()), name=name, synchronization="on_read", aggregation="sum")


def _add(values: Any) -> Any:
    """Return the sum of an array's elements: a float, or a traced value in a compiled program."""
    top = context.current()
    array = values if array_ops.is_array(values) else np.asarray(values)
    if hasattr(array, "detach"):  # a tensor: gradients do not flow through a metric
        array = array.detach()
    # 16-bit floats lose small terms in long sums.
    total = array_ops.arithmetic_dtype(array).sum()
    traced = top is not None and top.replica is not None and top.replica.is_traced
    return total if traced else float(total)
